"""Launchers with several results as one operation of a traced graph.

An operation of `torch.library` returns a list of tensors, and a launcher has None in the place of a
result that is not wanted.
"""

import inspect
from collections.abc import Callable, Iterable

import torch


def present(results: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return those that are there, in their order."""
    return [each for each in results if each is not None]


def spread(
    found: Iterable[torch.Tensor], wanted: Iterable[bool]
) -> tuple[torch.Tensor | None, ...]:
    """Return the results again: those that are there, and None in the place of each other."""
    left = iter(found)
    return tuple(next(left) if there else None for there in wanted)


def operation(name: str, launcher: Callable, fake: Callable) -> Callable:
    """Return the operation `tilewright::name`, which calls a launcher that writes no argument.

    It takes the arguments of the launcher by position, and returns its results that are there.
    fake: returns tensors of their shapes, dtypes and strides for such arguments.
    """

    def called(*arguments):
        return present(launcher(*arguments))

    signature = inspect.signature(launcher)
    called.__signature__ = signature.replace(return_annotation=list[torch.Tensor])
    made = torch.library.custom_op(f"tilewright::{name}", called, mutates_args=())
    made.register_fake(fake)
    return made

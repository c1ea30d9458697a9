"""Launchers with several results as one operation of a traced graph.

An operation of `torch.library` returns a list of tensors, and a launcher has None in the place of a
result that is not wanted.
"""

from collections.abc import Iterable

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

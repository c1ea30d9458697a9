"""The time of each part by itself, on the arguments that it has within a network.

A part is faster or slower alone by some factor. The paper's ladder of parts says what that factor
should make of a step.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from network.parts import NAMES
from network.stack import Stack


@dataclass
class Use:
    """Arguments with which a part is called, and how often it is called with such ones."""

    given: tuple
    calls: int = 0


Uses = dict[str, dict[tuple, Use]]


def watched(stack: Stack) -> tuple[Stack, Uses]:
    """Return the same stack, and the uses of each part, which fill while it runs.

    Uses of a part are told apart by shapes, strides and other arguments. The first arguments
    of each use are kept as copies.
    """
    uses: Uses = {}
    wrapped = {name: _watching(name, getattr(stack.parts, name), uses) for name in NAMES}
    return dataclasses.replace(stack, parts=stack.parts.with_parts(**wrapped)), uses


def _watching(name, part, uses):
    if part is None:
        return None

    @functools.wraps(part)
    def run(*given):
        found = uses.setdefault(name, {})
        use = found.setdefault(tuple(map(_kind, given)), Use(()))
        if not use.calls:
            use.given = tuple(map(_copied, given))
        use.calls += 1
        return part(*given)

    return run


def _kind(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return value


def _copied(value):
    if not isinstance(value, torch.Tensor):
        return value
    # A copy with the strides of its own, which `clone` would change where entries overlap.
    fresh = torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=value.device
    ).copy_(value.detach())
    return fresh.requires_grad_(value.requires_grad)


def step_of(part: Callable, use: Use) -> Callable[[], object]:
    """Return a call of a part with its backward pass, for gradients drawn once."""
    wanted = [x for x in use.given if isinstance(x, torch.Tensor) and x.requires_grad]
    with torch.enable_grad():
        roots = _roots(part(*use.given))
    gradients = [torch.randn_like(root) for root in roots]

    def step() -> object:
        with torch.enable_grad():
            roots = _roots(part(*use.given))
        return torch.autograd.grad(roots, wanted, gradients, allow_unused=True) if roots else None

    return step


def _roots(results):
    results = results if isinstance(results, tuple) else (results,)
    # A norm without a residual returns its input as the sum; that is no computation of its own.
    return [each for each in results if each.grad_fn is not None]

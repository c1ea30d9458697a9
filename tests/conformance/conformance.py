"""Run calls that other projects' tests make against our functions, and count declined calls.

A call passes if each output and each gradient is as close to float64 as PyTorch's own, or nearly.
It is declined if our function has no such feature: the adapter raises `Declined`, or the function
refuses by TypeError or ValueError. Anything else fails the test.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

# The allowed error in steps of the dtype at the largest entry, on top of PyTorch's own error. Sums
# over long rows therefore need no bound of their own.
STEPS = 4
# The least size, in steps, of a result whose error is measured. Gradients of norms cancel to nearly
# zero, and no sum of numbers near one cancels exactly.
LEAST = 1 / 8
PROPERTY = "conformance"


class Declined(Exception):
    """Our function has no such feature; the message names it."""


@dataclass
class Tally:
    """Count the outcomes of the calls of one suite.

    wrong: a line for each call that failed.
    none: the reason why no call passes, if that is expected.
    """

    passed: int = 0
    declined: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    none: str = ""

    def call(self, name: str, ours: Callable, theirs: Callable, tensors: Sequence) -> None:
        """Compare one call.

        ours, theirs: functions of `tensors` that return a tensor or a tuple. `theirs` must also
        work in float64. If ours gives gradients, each tensor that requires one gets one.
        """
        try:
            found = results(ours, tensors)
        except Declined as why:
            self.declined[str(why)] += 1
            return
        except (TypeError, ValueError) as why:
            self.declined[general(str(why))] += 1
            return
        try:
            near = results(theirs, tensors)
            exact = results(theirs, [wide(x) for x in tensors])
        except RuntimeError as why:
            self.declined[f"PyTorch itself: {general(str(why))}"] += 1
            return
        fault = next(filter(None, map(difference, found, near, exact)), "")
        if len(found) != len(exact):
            fault = f"{len(found)} results and gradients for {len(exact)}"
        if fault:
            self.wrong.append(f"{name}: {fault}")
        else:
            self.passed += 1


def results(function: Callable, tensors: Sequence) -> list[torch.Tensor]:
    """Return the outputs of a call, then the gradients of a fixed weighted sum of them."""
    leaves = [x.detach().requires_grad_(x.requires_grad) if is_tensor(x) else x for x in tensors]
    out = function(*leaves)
    outs = list(out) if isinstance(out, tuple) else [out]
    wanted = [x for x in leaves if is_tensor(x) and x.requires_grad]
    if not wanted:
        return outs
    seeds = [weights(y).to(y.dtype) for y in outs]
    grads = torch.autograd.grad(outs, wanted, seeds, allow_unused=True)
    return outs + [
        torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)
    ]


def weights(out: torch.Tensor) -> torch.Tensor:
    """Upstream gradients that any dtype holds exactly: multiples of 1/8 between -1 and 1."""
    n = torch.arange(out.numel(), device=out.device)
    return ((n * 5 + 3) % 17 - 8).reshape(out.shape).double() / 8


def difference(found: torch.Tensor, near: torch.Tensor, exact: torch.Tensor) -> str:
    """Return how a result differs from float64, or "" if by no more than PyTorch's own."""
    if found.shape != exact.shape:
        return f"shape {tuple(found.shape)} for {tuple(exact.shape)}"
    if found.dtype != near.dtype:
        return f"{found.dtype} for {near.dtype}"
    if not found.is_floating_point():
        return "" if torch.equal(found, near) else "other integers"
    if found.numel() == 0:
        return ""
    # A value beyond the range of the dtype is infinite in it.
    exact = exact.double()
    held = exact.to(found.dtype).double()
    finite = held.isfinite() & near.double().isfinite()
    other = ~finite & near.double().isfinite().logical_not() & held.isfinite().logical_not()
    same = (found.double() == held) | (found.isnan() & held.isnan())
    if (other & ~same).any():
        return "other values that are not finite"
    if not finite.any():
        return ""
    scale = exact[finite].abs().max()
    error = (found.double() - exact)[finite].abs().max()
    own = (near.double() - exact)[finite].abs().max()
    info = torch.finfo(found.dtype)
    bound = STEPS * info.eps * max(scale, LEAST) + 2 * own
    return "" if error <= bound else f"off by {error:.3g}, where {bound:.3g} is allowed"


def wide(x: object) -> object:
    if not is_tensor(x) or not x.is_floating_point():
        return x
    return x.detach().double().requires_grad_(x.requires_grad)


def is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def general(words: str) -> str:
    """Remove the numbers of a refusal, so that refusals for the same reason count as one."""
    first = words.splitlines()[0]
    return re.sub(r"\[[^]]*\]|\([^)]*\)|-?\d+(\.\d+)?", "…", first)[:90]


def representable(p: float) -> float:
    """The probability nearest to p that our dropout has: a multiple of 2^-16, as it says."""
    return round(p * 2**16) / 2**16

"""The one rule by which an output is right.

An output may be twice as far from the float64 oracle as PyTorch eager in the same dtype, plus a
floor per dtype. Distance is taken in the maximum norm and in the root-mean-square norm. The rule
follows the tests of flash-attention (Dao, 2022), made relative and applied to every rival.

Eager may be lucky if the problem itself is ill-conditioned, as the sum of a dot product whose terms
cancel. So if eager's distance does not suffice, the largest beside the case counts. That is at
inputs one step of the dtype away or up to a sixteenth, and at multiples of the gradients of the
outputs. The oracle's own sensitivity counts if it is larger still. This is the distance by which
the oracle moves if each input is rounded once more in float32. A backward-stable computation has
that error (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 1.5).

No bound is wider than CAP. A distance of one is that of a result of zeros, and within a half each
result is nearer to the oracle than to zeros. Twice eager's error may be more than CAP, as in
gradients that cancel almost to nothing. A result further from the oracle than CAP must then lie
within CAP of eager's.
"""

import math
from dataclasses import dataclass

import torch

FACTOR = 2.0
# The distance up to which no result of zeros, nor a constant in place of what varies, can come.
CAP = 0.5
# Distances allowed beyond eager's, relative to the oracle. Other dtypes have none: integers match.
FLOOR = {
    # Eager may add a sum in a luckier order: an error of a few ulp where its own is less than one.
    torch.float32: 32 * torch.finfo(torch.float32).eps,
    # Eager may hit the rounded oracle exactly; one rounding to nearest is half an ulp.
    torch.float16: torch.finfo(torch.float16).eps / 2,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps / 2,
}
# Below this the oracle, fed with numbers around one, holds the rounding noise of float64: zero.
# Fed with numbers of another scale, it does so below this times the scale.
ZERO = 1e-11
# Elements compared at a time: float64 copies of a whole tensor of the sweep would not fit.
CHUNK = 2**24
# An integer dtype of each size in bytes, to compare bits.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Distance:
    """Largest and root-mean-square distance over the oracle's; inf if inf or NaN is misplaced."""

    max: float
    rms: float


def elementwise_max(one: Distance, other: Distance) -> Distance:
    """Return the larger of two distances, in either norm."""
    return Distance(max(one.max, other.max), max(one.rms, other.rms))


@dataclass(frozen=True)
class Verdict:
    """One tensor against the rule; `eager` is None if PyTorch has no eager result."""

    distance: Distance
    eager: Distance | None
    bound: Distance

    @property
    def ratio(self) -> float:
        """The worse of distance over bound; the tensor is right up to one."""
        return max(
            _over(self.distance.max, self.bound.max), _over(self.distance.rms, self.bound.rms)
        )

    def row(self, name: str) -> dict[str, object]:
        """Return the tensor's entry in a verify report; None if a number is not finite."""
        numbers = {
            "max_err": self.distance.max,
            "rms_err": self.distance.rms,
            "eager_max_err": self.eager.max if self.eager else math.nan,
            "eager_rms_err": self.eager.rms if self.eager else math.nan,
            "bound_max": self.bound.max,
            "bound_rms": self.bound.rms,
            "ratio": self.ratio,
        }
        return {"name": name} | {
            key: value if math.isfinite(value) else None for key, value in numbers.items()
        }


def judge(
    distance: Distance,
    eager: Distance | None,
    dtype: torch.dtype,
    sensitivity: Distance | None = None,
    to_eager: Distance | None = None,
) -> Verdict:
    """Compare a distance from the oracle with the bound that eager's distance and the dtype set.

    sensitivity: the distance by which the oracle moves if its inputs are rounded. to_eager: the
    distance of the result from eager's. The module says when each of them counts.
    """
    floor = FLOOR.get(dtype, 0.0)
    # If eager itself overflows, it allows nothing: the floor counts as its distance.
    known = eager is not None and math.isfinite(eager.max)
    allowed = [eager if known else Distance(floor, floor)]
    if sensitivity is not None and math.isfinite(sensitivity.max):
        allowed.append(sensitivity)
    near = to_eager is not None and to_eager.max <= CAP and to_eager.rms <= CAP
    most = math.inf if near else CAP
    bound = Distance(
        min(most, FACTOR * max(each.max for each in allowed) + floor),
        min(most, FACTOR * max(each.rms for each in allowed) + floor),
    )
    return Verdict(distance, eager, bound)


def beyond_cap(eager: Distance, result: torch.Tensor) -> bool:
    """Return whether eager's own result is kept, because CAP would refuse twice its distance.

    A result whose entries are all the same is not kept: any constant would match it.
    """
    floor = FLOOR.get(result.dtype, 0.0)
    wide = CAP < FACTOR * max(eager.max, eager.rms) + floor < math.inf
    return wide and bool((result != result.reshape(-1)[0]).any())


def distance(x: torch.Tensor, oracle: torch.Tensor, scale: float = 1.0) -> Distance:
    """Return the distance of x from the oracle, a float64 (or integer) tensor of its shape.

    The oracle may lie on another device than x.

    An entry of the oracle that x's dtype cannot hold is inf or NaN there, and x must hold the same.
    All other entries of x must be finite; those of an integer x must be the same. Half a step of
    x's subnormal numbers is no distance, since no rounding does better. An oracle of zeros is
    compared absolutely, in units of `scale`, the size of the numbers it was fed with.
    """
    if x.shape != oracle.shape:
        raise ValueError(f"shape {tuple(x.shape)}, oracle {tuple(oracle.shape)}")
    if not x.numel():
        return Distance(0.0, 0.0)
    parts = zip(x.detach().reshape(-1).split(CHUNK), oracle.reshape(-1).split(CHUNK), strict=True)
    sums = [_compare(part, truth.to(part.device)) for part, truth in parts]
    misplaced, worst, square, largest, truth_square = torch.stack(sums).unbind(1)
    if misplaced.any():
        return Distance(math.inf, math.inf)
    unit, norm = scale, scale * math.sqrt(x.numel())
    if largest.max().item() > ZERO * scale:
        unit, norm = largest.max().item(), math.sqrt(truth_square.sum().item())
    return Distance(worst.max().item() / unit, math.sqrt(square.sum().item()) / norm)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits, in any layout."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kind = INTEGERS[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def _compare(x: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """misplaced, max |x - o|, sum (x - o)^2, max |o| and sum o^2 of the finite part, in float64."""
    held = oracle.to(x.dtype)
    finite = held.isfinite()
    same = (held == x) | (held.isnan() & x.isnan())
    # In float64 large integers that differ by one would be equal.
    floats = x.is_floating_point()
    misplaced = (torch.where(finite, ~x.isfinite(), ~same) if floats else ~same).any()
    truth = torch.where(finite, oracle, 0).double()
    gap = torch.where(finite, x, 0).double().sub_(truth).abs_()
    if floats:
        kind = torch.finfo(x.dtype)
        gap.sub_(kind.tiny * kind.eps / 2).clamp_(min=0)
    return torch.stack(
        [misplaced.double(), gap.max(), gap.square().sum(), truth.abs().max(), truth.square().sum()]
    )


def _over(error: float, bound: float) -> float:
    if error == 0.0:
        return 0.0
    # A misplaced entry passes no bound, not even one that overflows.
    return error / bound if bound and math.isfinite(error) else math.inf

"""Laws of chance, to which random results are held that no oracle knows."""

import itertools
import math

import torch

# A law is broken where chance breaks it less than once in 10**8 times.
SIGMAS, NATS = 6.0, 20.0
MOST_BINS, LEAST_IN_BIN = 256, 16


def improbable(what: str, count: int, of: int, probability: float, slack: float = 0.0) -> str:
    """Why `count` of so many independent draws is no chance; "" where it may be one.

    slack: by how much the probability may be off.
    """
    expected = of * probability
    # Bernstein's inequality: wider than the normal law where few are expected.
    width = SIGMAS * math.sqrt(expected * (1 - probability)) + NATS + slack * of
    if abs(count - expected) <= width:
        return ""
    return f"{what}: {count} of {of}, expected {expected:.0f} ± {width:.0f}"


def uneven(x: torch.Tensor, low: int, high: int) -> str:
    """Why integers are no independent, uniform draws from [low, high); "" where they may be.

    Their range, Pearson's chi-square over bins of equal width, and neighbours.
    """
    x, count, span = x.reshape(-1), x.numel(), high - low
    if not count:
        return ""
    least, most = x.min().item(), x.max().item()
    if least < low or most >= high:
        return f"range: {least} to {most}, expected {low} to {high - 1}"
    bins = max(1, min(span, MOST_BINS, count // LEAST_IN_BIN))
    edges = [low + -(-index * span // bins) for index in range(bins + 1)]
    inner = torch.tensor(edges[1:-1], dtype=x.dtype, device=x.device)
    found = torch.bincount(torch.bucketize(x, inner, right=True), minlength=bins).double()
    widths = [after - before for before, after in itertools.pairwise(edges)]
    expected = torch.tensor([count * width / span for width in widths], dtype=torch.float64)
    square = ((found.cpu() - expected) ** 2 / expected).sum().item()
    # Laurent and Massart (2000), lemma 1: the tail of a chi-square variable.
    limit = bins - 1 + 2 * math.sqrt((bins - 1) * NATS) + 2 * NATS
    if square > limit:
        return f"chi-square over {bins} bins: {square:.0f}, expected at most {limit:.0f}"
    half = span // 2
    upper = x[: count // 2 * 2].reshape(-1, 2) >= low + half
    alike = int((upper[:, 0] == upper[:, 1]).sum().item())
    share = half / span
    probability = share**2 + (1 - share) ** 2
    return improbable("neighbours in the same half", alike, count // 2, probability)

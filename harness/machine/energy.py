"""The energy of a call, from a counter that moves in steps.

A driver brings its counter of a board's energy up to date every 20 to 100 ms, and one reading of it
may take milliseconds. So the GPU works without pause while the counter is read again and again. The
energy and the calls between two moves of the counter count.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scipy import special

# The sensor behind the counter follows the load late.
SETTLE_S = 0.05
# Fewer steps than this tell too little about how much they scatter.
FEWEST_STEPS = 3
# How long a counter may take beyond the window before it is taken for one that does not move.
LIMIT_S = 1.0
RESOLUTION_MJ = 1
CONFIDENCE = 0.95


class Edge(NamedTuple):
    """A move of the counter: within `slack` seconds of `at` it came to show `energy_mj`."""

    at: float
    slack: float
    energy_mj: int


def edges(
    read: Callable[[], int | None], clock: Callable[[], float], window_s: float
) -> list[Edge]:
    """The moves of a counter in mJ, at least FEWEST_STEPS apart and over at least the window.

    Fewer, or none, where the counter is absent (None) or too slow. The moves are those between the
    beginning of one reading and the end of the next; clock: the time in seconds.
    """
    found: list[Edge] = []
    started = before = clock()
    last = read()
    while last is not None and (began := clock()) < started + window_s + LIMIT_S:
        value, ended = read(), clock()
        if value not in (last, None) and before >= started + SETTLE_S:
            found.append(Edge((before + ended) / 2, (ended - before) / 2, value))
            if len(found) > FEWEST_STEPS and _span(found) + _slack(found) >= window_s:
                break
        before, last = began, value
    return found


def per_call(
    found: Sequence[Edge], ended: Callable[[float], float]
) -> tuple[float, float] | tuple[None, None]:
    """The energy of one call in µJ, and the half-width of its 95 % interval.

    found: from `edges`; None where they hold fewer than FEWEST_STEPS steps. ended: how many calls
    had ended at a time of the clock. The half-width joins the scatter of the steps (Student's t),
    the times within which the first and the last move may lie, and the counter's resolution.
    """
    if len(found) <= FEWEST_STEPS:
        return None, None
    done = [ended(edge.at) for edge in found]
    if not all(a < b for a, b in itertools.pairwise(done)):
        return None, None
    steps = [
        (b.energy_mj - a.energy_mj, n - m)
        for (a, m), (b, n) in itertools.pairwise(zip(found, done, strict=True))
    ]
    count = done[-1] - done[0]
    mean = (found[-1].energy_mj - found[0].energy_mj) / count
    # The error of a ratio of sums (Cochran 1977, "Sampling techniques", section 6.3).
    squares = sum((mj - mean * calls) ** 2 for mj, calls in steps)
    t = float(special.stdtrit(len(steps) - 1, (1 + CONFIDENCE) / 2))
    scatter = t * math.sqrt(squares * len(steps) / (len(steps) - 1)) / count
    timing = mean * _slack(found) / _span(found)
    resolution = RESOLUTION_MJ / count
    return mean * 1e3, math.hypot(scatter, timing, resolution) * 1e3


def _span(found: Sequence[Edge]) -> float:
    return found[-1].at - found[0].at


def _slack(found: Sequence[Edge]) -> float:
    """By how much the span may be too long or too short."""
    return found[0].slack + found[-1].slack

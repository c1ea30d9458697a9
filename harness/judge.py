"""Judges a family of differences: each from its blocks, its offsets and what should be equal.

`harness.statistics` has the rules; here they meet the cells, which may lack what the rules ask for.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from harness import statistics
from harness.cells import Cell
from harness.statistics import Estimate

NEIGHBOURS = 20
# A gap that would have to be known and is not: nothing can be decided.
UNKNOWN = Estimate(math.nan, 0.0, 1.0)


class Difference(NamedTuple):
    """The log ratio of two times in one cell, and what tells how far to trust it.

    log: uncertain by its blocks alone. offset: the variance between things that should be equal,
    beyond their blocks, and its degrees of freedom. gaps: what should be zero in this cell; None
    says nothing.
    """

    log: Estimate
    offset: tuple[float, float]
    gaps: tuple[Estimate | None, ...]


def judged(family: Sequence[Sequence[Difference]]) -> list[dict]:
    """What is to be said of each member of a family, in columns of a table.

    A member is the mean over some cells. Its noise floor is the widest of its gaps, taken over the
    same cells. `ratio`, `ci_lo`, `ci_hi` hold the exponential, with its interval by Student's t.
    """
    if not family:
        return []
    logs = stacked([combined(member) for member in family])
    noise = np.array([_noise(member) for member in family])
    ratios = statistics.ratio_interval(logs)
    p = statistics.p_value(logs, noise)
    p_holm = statistics.holm(p)
    columns = (*ratios, noise, p, p_holm, statistics.verdicts(logs.value, noise, p_holm))
    names = ("ratio", "ci_lo", "ci_hi", "noise", "p", "p_holm", "verdict")
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def combined(member: Sequence[Difference]) -> Estimate:
    """The mean over cells. Their offsets are known from the same gaps, so these count once."""
    variances, freedoms = np.transpose([one.offset for one in member])
    blocks = statistics.mean(stacked([one.log for one in member]))
    return statistics.plus(blocks, variances.mean() / len(member), freedoms.mean())


def offsets(
    ours: Mapping[tuple, Cell], gaps: Mapping[tuple, Estimate | None]
) -> dict[tuple, tuple[float, float]]:
    """The variance behind the gaps, with its degrees of freedom, in each cell of ours.

    It is that of the NEIGHBOURS gaps in the cells whose calls of ours are nearest in length: an
    offset of some tenths of a microsecond is much of a short call and nothing of a long one.
    """
    lengths = {
        key: math.log(statistics.median_interval(list(cell.times().values())).value)
        for key, cell in ours.items()
    }
    known = [key for key in lengths if gaps.get(key) is not None]
    if not known:
        return dict.fromkeys(lengths, (0.0, 1.0))
    values = stacked([gaps[key] for key in known])
    placed = np.array([lengths[key] for key in known])
    found = {}
    for key, length in lengths.items():
        near = np.argsort(np.abs(placed - length), kind="stable")[:NEIGHBOURS]
        variance, freedom = statistics.spread(Estimate(*(part[near] for part in values)))
        found[key] = float(variance), float(freedom)
    return found


def stacked(parts: Sequence[Estimate]) -> Estimate:
    return Estimate(*(np.array(column, dtype=float) for column in zip(*parts, strict=True)))


def grouped(items: Iterable, key: Callable[..., Hashable]) -> dict:
    found: dict = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _noise(member: Sequence[Difference]) -> float:
    kinds = (
        [gap for gap in kind if gap is not None]
        for kind in zip(*(one.gaps for one in member), strict=True)
    )
    means = [statistics.mean(stacked(kind)) for kind in kinds if kind]
    return float(np.max(statistics.reach(stacked(means)))) if means else math.nan

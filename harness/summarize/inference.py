"""Judges a family of differences: each from its blocks, its offsets and what should be equal.

`harness.stats` has the rules; here they meet the cells, which may lack what the rules ask for.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from harness import stats
from harness.stats import Estimate

NEIGHBOURS = 40
# How many gaps of neighbouring length have their tails fitted together, and from one such window to
# the next.
ALIKE, NEXT = 200, 20
# Up to so many degrees of freedom a Student's t has no fourth moment.
FOURTH_MOMENT = 4.0
# A gap that would have to be known and is not: nothing can be decided.
UNKNOWN = Estimate(math.nan, 0.0, 1.0)


class Offset(NamedTuple):
    """The variance between things that should be equal, beyond their blocks.

    freedom: the degrees of freedom of that variance, for intervals. tails: those of the Student's t
    that the offsets follow, for verdicts.
    """

    variance: float
    freedom: float
    tails: float

    def joined(self, other: "Offset") -> "Offset":
        """Return the offset of a difference that has both offsets."""
        variances = np.array([self.variance, other.variance])
        pooled = (
            float(stats.pooled(variances, np.array(pair)))
            for pair in ((self.freedom, other.freedom), (self.tails, other.tails))
        )
        return Offset(float(variances.sum()), *pooled)


NONE = Offset(0.0, 1.0, 1.0)


class Difference(NamedTuple):
    """The log ratio of two times in one cell, and what tells how far to trust it.

    log: uncertain by its blocks alone. gaps: what should be zero in this cell; None says nothing.
    """

    log: Estimate
    offset: Offset
    gaps: tuple[Estimate | None, ...]


class Offsets:
    """How far two processes that run the same code differ, for calls of any length.

    An offset of some tenths of a microsecond is much of a short call and nothing of a long one. So
    the variance at a length is that of the NEIGHBOURS gaps between calls nearest in length. Long
    calls seldom differ, and then by many times that: their tails are the heavier. So the tails are
    those of ALIKE gaps of that length, each over the standard deviation of its neighbours.

    own: the offset between two processes in a cell that is not like the others.
    """

    def __init__(
        self,
        lengths_us: Sequence[float],
        gaps: Sequence[Estimate],
        own: Mapping[Hashable, Offset] = MappingProxyType({}),
    ):
        self.own = own
        self._found: dict[bytes, float] = {}
        self._places, self._gaps = np.log(lengths_us), stacked(gaps)
        self._tails = Tails(self._gaps, self._places)

    def of(self, key: Hashable) -> "Offsets":
        """Return the offsets of a cell: these, or those of calls of any length that are its own."""
        return OwnOffset(self.own[key]) if key in self.own else self

    def at(self, length_us: float) -> Offset:
        """Return the offset of the gap between two processes, for calls of so many microseconds."""
        if not self._places.size:
            return NONE
        near = neighbours(np.log([length_us]), self._places)
        # The same neighbours serve many lengths, and the estimate takes a while.
        key = near.tobytes()
        if key not in self._found:
            self._found[key] = float(variances(self._gaps, near)[0])
        return Offset(self._found[key], float(near.size), float(self._tails.at(length_us)[0]))

    def alone(self, length_us: float, processes: int = 1) -> Offset:
        """Return the offset of the mean of so many processes: for one, half that of a gap."""
        gap = self.at(length_us)
        return gap._replace(variance=gap.variance / 2 / processes)

    def between(self, length_us: float, ours: int, theirs: int) -> Offset:
        """Return the offset of the gap between the means of so many processes each."""
        return averaged(self.at(length_us), ours, theirs)


class OwnOffset(Offsets):
    """The offset of one cell, whatever the length of a call.

    Few processes tell its variance, and its tails are those of that estimate. More processes do not
    make them lighter.
    """

    def __init__(self, offset: Offset):
        super().__init__([], [])
        self._offset = offset

    def at(self, length_us: float) -> Offset:
        return self._offset

    def between(self, length_us: float, ours: int, theirs: int) -> Offset:
        return averaged(self._offset, ours, theirs)._replace(tails=self._offset.tails)


def averaged(gap: Offset, ours: np.ndarray, theirs: np.ndarray) -> Offset:
    """The offset of the gap between the means of so many processes, from that of single ones."""
    ours, theirs = (np.asarray(one, dtype=float) for one in (ours, theirs))
    share = 1 / ours + 1 / theirs
    # One for single processes; for means of the same number that number.
    count = share**2 / (1 / ours**3 + 1 / theirs**3) / 2
    return gap._replace(variance=gap.variance * share / 2, tails=of_mean(gap.tails, count))


def of_mean(tails: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The tails of the mean of so many independent offsets.

    Heavy tails thin out slowly: one large offset among several moves the mean by less, and is met
    more often. So the degrees grow by the sixth root of n. The cube root would do for a variance
    that is known, and more than that where a kurtosis exists. But the variance is learned from few
    gaps, and those may lack the large offsets (docs/lab/statistics.md).

    A gap between one process and a mean of several is that of fewer than one. A Student's t with
    f > 4 degrees has an excess kurtosis of 6 / (f - 4), so 4 + n (f - 4) degrees fit there. The
    lesser of them and of those by the cube root are taken.
    """
    tails, count = np.asarray(tails, dtype=float), np.asarray(count, dtype=float)
    few = np.minimum(FOURTH_MOMENT + count * (tails - FOURTH_MOMENT), tails * np.cbrt(count))
    return np.where(count < 1, few, tails * count ** (1 / 6))


def neighbours(places: np.ndarray, among: np.ndarray, others: bool = False) -> np.ndarray:
    """The indices of the NEIGHBOURS gaps `among` that lie nearest to each place, (places, count).

    others: the i-th gap is not among the neighbours of the i-th place. The first of several gaps at
    the same distance counts.
    """
    distances = np.abs(places[:, None] - among[None, :])
    if others:
        np.fill_diagonal(distances, np.inf)
    count = min(NEIGHBOURS, len(among) - others)
    return np.argsort(distances, stable=True)[:, :count]


def variances(gaps: Estimate, near: np.ndarray) -> np.ndarray:
    """The variance of offsets at each place, (..., places), from gaps, (..., gaps)."""
    return stats.between(Estimate(*(np.asarray(part)[..., near] for part in gaps)))


class Tails:
    """The degrees of freedom of the Student's t that offsets follow, by the length of a call.

    gaps: (..., gaps). places: the logarithms of the lengths of their calls, (gaps,).
    """

    def __init__(self, gaps: Estimate, places: np.ndarray):
        order = np.argsort(places, stable=True)
        last = max(0, len(order) - ALIKE)
        windows = [order[first : first + ALIKE] for first in (*range(0, last, NEXT), last)]
        scored = scores(gaps, places) if len(order) > 1 else np.asarray(gaps.value)
        self._fitted = np.stack([stats.tails(scored[..., one]) for one in windows], axis=-1)
        self._centres = np.array([np.median(places[one]) if one.size else 0.0 for one in windows])

    def at(self, lengths_us: np.ndarray) -> np.ndarray:
        """Those of calls of such lengths, (..., lengths)."""
        away = np.abs(np.log(np.reshape(lengths_us, (-1, 1))) - self._centres)
        return self._fitted[..., away.argmin(axis=-1)]


def scores(gaps: Estimate, places: np.ndarray) -> np.ndarray:
    """Gaps, (..., gaps), each over the standard deviation of its neighbours."""
    whole = variances(gaps, neighbours(places, places, others=True)) + np.asarray(gaps.variance)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(whole > 0, np.asarray(gaps.value) / np.sqrt(whole), 0.0)


def judged(family: Sequence[Sequence[Difference]]) -> list[dict]:
    """Judge each member of a family; return the columns of a table.

    A member is the mean over some cells. Its noise floor is the widest of its gaps, taken over the
    same cells. `ratio`, `ci_lo`, `ci_hi` hold the exponential, with its interval by Student's t.
    """
    if not family:
        return []
    ratios = stats.ratio_interval(stacked([combined(member) for member in family]))
    logs = stacked([proving(member) for member in family])
    noise = np.array([floor(member) for member in family])
    p = stats.p_value(logs, noise)
    p_holm = stats.holm(p)
    found = {
        "ratio": ratios.value,
        "ci_lo": ratios.lo,
        "ci_hi": ratios.hi,
        "noise": noise,
        "p": p,
        "p_holm": p_holm,
        "verdict": stats.verdicts(logs.value, noise, p_holm),
    }
    return [{name: one[i].item() for name, one in found.items()} for i in range(len(family))]


def against_best(members: Sequence[Sequence[Difference]]) -> dict:
    """Judge the least of several true differences; return the columns of a table.

    members: a rival each, over its cells. `closest` is the index of the one with the least ratio;
    `comparisons.best_rows` says how p and verdict follow. No family is corrected for.
    """
    logs, shown = (stacked([how(member) for member in members]) for how in (proving, combined))
    noise, count = np.array([floor(member) for member in members]), len(members)
    band = np.maximum(stats.MARGIN, noise)
    better = stats.above(logs, band).max()
    worse = count * stats.below(logs, -band).min()
    level = max(
        stats.above(logs, -stats.MARGIN).max(),
        count * stats.below(logs, stats.MARGIN).min(),
    )
    closest = int(np.argmin(logs.value))
    # Two edges of one band, as in `stats.p_value`.
    found = {"better": 2 * better, "worse": 2 * worse, "no difference": level}
    verdict = min(found, key=found.get)
    p = math.nan if np.isnan(noise).any() else min(1.0, float(found[verdict]))
    value = float(np.exp(logs.value[closest]))
    sure = 1 - (1 - stats.CONFIDENCE) / count
    lo = stats.ratio_interval(shown).lo.min()
    hi = stats.ratio_interval(shown, sure).hi.min()
    return {"closest": closest, "ratio": value, "ci_lo": float(lo), "ci_hi": float(hi)} | {
        "noise": float(noise[closest]),
        "p": p,
        "verdict": verdict,
    }


def combined(member: Sequence[Difference]) -> Estimate:
    """The mean over cells, for its interval."""
    return over_cells(*_parts(member))


def proving(member: Sequence[Difference]) -> Estimate:
    """The mean over cells, for a verdict."""
    return over_cells(*_parts(member), proving=True)


def over_cells(logs: Estimate, offsets: Offset, proving: bool = False) -> Estimate:
    """The mean of independent differences, (..., cells), with the variance of their offsets.

    All cells know that variance from the same gaps, and it has their degrees of freedom.

    proving: with the tails of the offsets instead. Large offsets are met in few cells. So tails
    thin out by the cube root of the number of cells, which counts them by their variance. The
    scatter of blocks makes no large offset rarer: the whole has the harmonic mean by variance.
    """
    variance = np.asarray(offsets.variance)
    count = variance.shape[-1]
    known = np.asarray(offsets.freedom).mean(axis=-1)
    blocks, between = stats.mean(logs), variance.sum(axis=-1) / count**2
    whole = stats.plus(blocks, between, known)
    if not proving:
        return whole
    with np.errstate(divide="ignore", invalid="ignore"):
        alike = variance.sum(axis=-1) ** 2 / (variance**2).sum(axis=-1)
        heavy = (variance / np.asarray(offsets.tails)).sum(axis=-1) / count**2 / np.cbrt(alike)
        tails = whole.variance / (blocks.variance / blocks.freedom + np.nan_to_num(heavy))
    return whole._replace(freedom=np.where(whole.variance > 0, tails, whole.freedom))


def floor(member: Sequence[Difference]) -> float:
    """The noise floor of a member: how far the widest of its gaps reaches."""
    kinds = (
        [gap for gap in kind if gap is not None]
        for kind in zip(*(one.gaps for one in member), strict=True)
    )
    means = [stats.mean(stacked(kind)) for kind in kinds if kind]
    return float(np.max(stats.reach(stacked(means)))) if means else math.nan


def stacked(parts: Sequence[Estimate]) -> Estimate:
    """Estimates in arrays, (parts,) each; of none, empty ones."""
    return Estimate(*np.reshape(parts, (len(parts), 3)).T)


def grouped(items: Iterable, key: Callable[..., Hashable]) -> dict:
    found: dict = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def known(
    gaps: Mapping[tuple, tuple[float, Estimate | None]],
    own: Mapping[Hashable, Offset] = MappingProxyType({}),
) -> Offsets:
    """Offsets from the length of a call in microseconds and its gap, where there is one.

    own: the offsets of cells that have one of their own.
    """
    found = [(length, gap) for length, gap in gaps.values() if gap is not None]
    return Offsets([length for length, _ in found], [gap for _, gap in found], own)


def _parts(member: Sequence[Difference]) -> tuple[Estimate, Offset]:
    """The logs and the offsets of the cells, each part in an array."""
    offsets = np.array([one.offset for one in member])
    return stacked([one.log for one in member]), Offset(*offsets.T)


NOTHING_KNOWN = Offsets([], [])

"""Medians with intervals, paired ratios and verdicts; blocks are the unit of resampling."""

import functools
import math
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
MARGIN = 0.01
FEWEST_BLOCKS = 5


class Interval(NamedTuple):
    """An estimate and the bounds of its 95 % interval."""

    value: float
    lo: float
    hi: float


def median_interval(values: np.ndarray) -> Interval:
    """The median of the last axis, by percentile bootstrap.

    values: (..., blocks), float. Each field of the result has the leading shape; a 1-D input gives
    floats.
    """
    values = np.asarray(values, dtype=np.float64)
    blocks = values.shape[-1]
    if blocks == 0:
        raise ValueError("median_interval: no blocks")
    ordered = np.sort(values, axis=-1)
    rank = _lower_rank(blocks)
    bounds = (np.median(ordered, axis=-1), ordered[..., rank], ordered[..., blocks - 1 - rank])
    return Interval(*(map(float, bounds) if values.ndim == 1 else bounds))


def paired_ratio(numerator: np.ndarray, denominator: np.ndarray) -> Interval:
    """The median over blocks of numerator/denominator, block by block.

    Both are (..., blocks): the times of two implementations in the same blocks, so that a drift
    which meets both in one block cancels.
    """
    return median_interval(np.asarray(numerator, float) / np.asarray(denominator, float))


def noise(twin: Interval) -> float:
    """The noise floor: how far the interval of an A/A ratio reaches from one, as a fraction."""
    return max(abs(math.log(twin.lo)), abs(math.log(twin.hi)))


def verdict(ratio: Interval, noise_floor: float, blocks: int) -> str:
    """What a ratio (a rival's time over ours) says, given the noise floor of its cell.

    A band around one holds all that does not count: MARGIN, or the noise floor if that is wider.
    The interval lies above the band ("better"), below ("worse"), inside ("no difference") or
    across an edge of it ("undecided"). Fewer than FEWEST_BLOCKS blocks decide nothing: the range
    of five values is the first to hold their median with more than 90 % confidence.
    """
    if blocks < FEWEST_BLOCKS or not math.isfinite(noise_floor):
        return "undecided"
    band = max(MARGIN, noise_floor)
    lo, hi = math.log(ratio.lo), math.log(ratio.hi)
    if lo > band:
        return "better"
    if hi < -band:
        return "worse"
    if -band <= lo and hi <= band:
        return "no difference"
    return "undecided"


def geometric_mean(values: np.ndarray) -> float:
    """exp of the mean logarithm of positive values."""
    values = np.asarray(values, dtype=np.float64)
    if values.size == 0 or not (values > 0).all():
        raise ValueError("geometric_mean: wants at least one value, all above zero")
    return float(np.exp(np.log(values).mean()))


@functools.cache
def _lower_rank(blocks: int) -> int:
    """The rank, from 0, of the value that bounds the median's bootstrap distribution from below.

    The distribution of a resampled median is known (Efron 1979), so nothing is drawn and nothing
    depends on a seed: `blocks` draws with replacement have their middle at or below the i-th
    smallest value with the probability that a binomial count of draws among the first i reaches
    the middle. Of an even number of blocks the lower of the two middle values is followed.
    """
    middle = (blocks + 1) // 2
    for first in range(1, blocks):
        share = first / blocks
        below = sum(
            math.comb(blocks, count) * share**count * (1 - share) ** (blocks - count)
            for count in range(middle, blocks + 1)
        )
        if below > (1 - CONFIDENCE) / 2:
            return first - 1
    return 0

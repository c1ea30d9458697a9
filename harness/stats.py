"""Medians and ratios with their uncertainty, and what they prove; blocks are what is resampled.

A comparison starts as an `Estimate`: the median over blocks of the logarithm of a rival's time over
ours, with its variance under the bootstrap. The median's bootstrap distribution is known in closed
form (Efron 1979, "Bootstrap methods: another look at the jackknife"), so nothing is drawn and
nothing depends on a seed. That variance is itself uncertain by a relative error of the order of
blocks^(-1/4) (Hall and Martin 1988, "Exact convergence rate of bootstrap quantile variance
estimator"). A variance of about 2 sqrt(blocks) degrees of freedom has that error. With those,
Student's t keeps to its error rates for 5 to 41 blocks, down to 1 in 10,000.

Blocks do not tell all. Two processes that run the same code differ by an offset, which stays the
same for all their blocks (Kalibera and Jones 2013, "Rigorous benchmarking in reasonable time"). The
A/A gaps of many cells show how much. `between` is the variance of these offsets, estimated as that
of effects between studies is (Paule and Mandel 1982). Each gap weighs by its own uncertainty, so
one noisy cell does not hide the offsets of the others. `plus` adds a variance. Variances from
several sources have the pooled degrees of freedom of Satterthwaite (1946).

Offsets have heavy tails: a few processes of a study stand several standard deviations off. `tails`
fits Student's t to them (Lange, Little and Taylor 1989, "Robust statistical modeling using the t
distribution"). An interval of 95 % hardly depends on that. A verdict that is corrected for its
family lives far out in the tails, so `p_value` takes the fitted degrees of freedom. It does not
shrink that t to unit variance: the variance of heavy-tailed offsets is itself known from few gaps.

`p_value` and `holm` decide. `harness.summarize.rates` resamples a run's own A/A gaps and counts how
often the verdicts err and how much they find; tests/summarize/test_error_rates.py holds the rates
on the recorded run.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from scipy import special

CONFIDENCE = 0.95
MARGIN = 0.01
FEWEST_BLOCKS = 5
# The degrees of freedom among which `tails` chooses; where scores are fewer, the tails assumed.
TAILS = (3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0, 8.0, 10.0, 14.0, 20.0, 30.0)
FEWEST_SCORES, FEW_TAILS = 100, 4.0
# One standard error of a parameter, in units of the logarithm of the likelihood.
WITHIN = 0.5
FITTING_STEPS = 20
# The least variance that is told from none; when a variance is known well enough.
TINY, PRECISION, NEWTON_STEPS = 1e-18, 1e-9, 200


class Interval(NamedTuple):
    """An estimate and the bounds of its 95 % interval."""

    value: float
    lo: float
    hi: float


class Estimate(NamedTuple):
    """The logarithm of a ratio, its variance and the degrees of freedom of that; arrays or floats.

    A value is the relative difference as a fraction, as far as it is small.
    """

    value: np.ndarray
    variance: np.ndarray
    freedom: np.ndarray


def median_interval(values: np.ndarray) -> Interval:
    """The median of the last axis, by percentile bootstrap.

    values: (..., blocks), float. Each field of the result has the leading shape; a 1-D input gives
    floats.
    """
    values = np.asarray(values, dtype=np.float64)
    blocks = values.shape[-1]
    if blocks == 0:
        raise ValueError("median_interval: no blocks")
    ordered = np.sort(values)
    rank = _lower_rank(blocks)
    bounds = (np.median(ordered, axis=-1), ordered[..., rank], ordered[..., blocks - 1 - rank])
    return Interval(*(map(float, bounds) if values.ndim == 1 else bounds))


def paired_ratio(numerator: np.ndarray, denominator: np.ndarray) -> Interval:
    """The median over blocks of numerator/denominator, block by block.

    Both are (..., blocks): the times of two implementations in the same blocks, so that a drift
    which meets both in one block cancels.
    """
    return median_interval(np.divide(numerator, denominator))


def log_median(values: np.ndarray) -> Estimate:
    """The median over the last axis of the logarithms of positive values, (..., blocks)."""
    ordered = np.sort(np.log(values))
    blocks = ordered.shape[-1]
    weights = _weights(blocks)
    middle = (ordered * weights).sum(axis=-1, keepdims=True)
    variance = ((ordered - middle) ** 2 * weights).sum(axis=-1)
    freedom = np.full_like(variance, max(1.0, min(blocks - 1, 2 * math.sqrt(blocks))))
    return Estimate(np.median(ordered, axis=-1), variance, freedom)


def log_ratio(numerator: np.ndarray, denominator: np.ndarray) -> Estimate:
    """The median over blocks of log(numerator/denominator), block by block; (..., blocks) each."""
    return log_median(np.divide(numerator, denominator))


def between(gaps: Estimate) -> np.ndarray:
    """The variance of the offsets that scatter gaps, (..., gaps), beyond their own uncertainty.

    Gaps between things that should be equal: the mean is taken to be zero. With this variance the
    squares of the gaps, each over its whole variance, have a mean of one (Paule and Mandel 1982,
    "Consensus values and weighting factors"). It is zero if the blocks alone explain the gaps.
    """
    squares, own = np.asarray(gaps.value) ** 2, np.asarray(gaps.variance)
    # The mean falls with the variance and is convex, so that Newton's steps from below never go
    # too far. It is at least one where all gaps are as uncertain as the most uncertain of them.
    found = np.maximum(squares.mean(axis=-1) - own.max(axis=-1), TINY)
    for _ in range(NEWTON_STEPS):
        whole = found[..., None] + own
        parts = squares / whole
        with np.errstate(divide="ignore"):
            step = (parts.mean(axis=-1) - 1) / (parts / whole).mean(axis=-1)
        step = np.fmax(step, 0.0)
        found = found + step
        if (step <= PRECISION * found).all():
            break
    return np.where(found > TINY, found, 0.0)


def tails(scores: np.ndarray) -> np.ndarray:
    """The degrees of freedom of the Student's t that scores, (..., count), follow, by likelihood.

    Several may be likely: the logarithm of their likelihood is within WITHIN of the best. The
    heaviest tails are taken, because a verdict must not rest on tails that may be too light.

    scores: gaps over their standard deviations. The scale is fitted along, by expectation and
    maximisation. Fewer than FEWEST_SCORES tell too little: FEW_TAILS.
    """
    scores = np.asarray(scores)
    if scores.shape[-1] < FEWEST_SCORES:
        return np.full(scores.shape[:-1], FEW_TAILS)
    freedom = np.array(TAILS)[:, None]
    squares = scores[..., None, :] ** 2
    scale = np.maximum(squares.mean(axis=-1, keepdims=True), 1e-300)
    for _ in range(FITTING_STEPS):
        weights = (freedom + 1) / (freedom + squares / scale)
        scale = np.maximum((weights * squares).mean(axis=-1, keepdims=True), 1e-300)
    free = freedom[:, 0]
    density = special.gammaln((free + 1) / 2) - special.gammaln(free / 2) - np.log(free) / 2
    spread = (free + 1) / 2 * np.log1p(squares / (freedom * scale)).mean(axis=-1)
    likelihood = density - np.log(scale[..., 0]) / 2 - spread
    behind = likelihood.max(axis=-1, keepdims=True) - likelihood
    # The heaviest come first.
    return free[(scores.shape[-1] * behind <= WITHIN).argmax(axis=-1)]


def plus(estimate: Estimate, variance: np.ndarray, freedom: np.ndarray) -> Estimate:
    """The same estimate, uncertain for one more independent reason."""
    variances = np.stack(np.broadcast_arrays(estimate.variance, variance), axis=-1)
    freedoms = np.stack(np.broadcast_arrays(estimate.freedom, freedom), axis=-1)
    return Estimate(estimate.value, variances.sum(-1), pooled(variances, freedoms))


def mean(parts: Estimate) -> Estimate:
    """The mean over the last axis of independent estimates."""
    variance, count = np.asarray(parts.variance), np.shape(parts.value)[-1]
    freedom = pooled(variance, np.asarray(parts.freedom))
    return Estimate(np.mean(parts.value, axis=-1), variance.sum(-1) / count**2, freedom)


def ratio_interval(estimate: Estimate, confidence: float = CONFIDENCE) -> Interval:
    """The ratio with its interval, of 95 % unless told, from Student's t."""
    return around(np.exp(np.asarray(estimate.value)), estimate, confidence)


def around(value: np.ndarray, estimate: Estimate, confidence: float = CONFIDENCE) -> Interval:
    """A time or a ratio with the interval that the estimate of its logarithm gives it."""
    half = _half_width(estimate, confidence)
    return Interval(value, value * np.exp(-half), value * np.exp(half))


def reach(estimate: Estimate) -> np.ndarray:
    """The noise floor: how far the 95 % interval of an A/A gap reaches from zero, a fraction."""
    return np.abs(estimate.value) + _half_width(estimate)


def p_value(estimate: Estimate, noise: np.ndarray) -> np.ndarray:
    """How hard the estimate is to reconcile with the opposite of what `verdicts` makes of it.

    The band is that of MARGIN, or of the noise floor if that is wider. For an estimate beyond the
    band, the opposite is that the true difference lies in it: the tails beyond both of its edges.
    For an estimate below MARGIN, the opposite is that the true difference is not: two one-sided
    tests (Schuirmann 1987), of which the nearer edge has the larger p. One of the two hypotheses is
    true, never both, so that asking both costs nothing (Finner and Strassburger 2002, "The
    partitioning principle"). Between MARGIN and the noise floor nothing can be said, p is one:
    noise never proves that two things are equal. NaN where the noise is.
    """
    value, band = np.abs(estimate.value), np.maximum(MARGIN, noise)
    beyond = _tail(value - band, estimate) + _tail(value + band, estimate)
    p = np.where(value > band, beyond, np.where(value < MARGIN, _tail(MARGIN - value, estimate), 1))
    return np.where(np.isnan(band), np.nan, p)


def below(estimate: Estimate, bound: np.ndarray) -> np.ndarray:
    """The one-sided p of the hypothesis that the true value is not below the bound."""
    return _tail(bound - np.asarray(estimate.value), estimate)


def above(estimate: Estimate, bound: np.ndarray) -> np.ndarray:
    """The one-sided p of the hypothesis that the true value is not above the bound."""
    return _tail(np.asarray(estimate.value) - bound, estimate)


def holm(p_values: np.ndarray) -> np.ndarray:
    """p-values adjusted for their family, the last axis, by Holm's step-down (1979); NaN stays."""
    p = np.asarray(p_values)
    order = np.argsort(p)
    ranked = np.take_along_axis(p, order)
    left = np.isfinite(p).sum(axis=-1, keepdims=True) - np.arange(p.shape[-1])
    stepped = np.minimum(1.0, np.maximum.accumulate(ranked * left, axis=-1))
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, stepped, axis=-1)
    return adjusted


def verdicts(value: np.ndarray, noise: np.ndarray, p_holm: np.ndarray) -> np.ndarray:
    """Return the verdict on ours of each log ratio of a rival's time over ours, as text.

    "better" or "worse" beyond the band of `p_value`, "no difference" below MARGIN, each if `p_holm`
    is at most 0.05; else "undecided".
    """
    value, band = np.asarray(value), np.maximum(MARGIN, noise)
    said = np.where(value < -band, "worse", np.where(value > band, "better", "no difference"))
    return np.where(np.asarray(p_holm) <= 1 - CONFIDENCE, said, "undecided")


def _tail(distance: np.ndarray, estimate: Estimate) -> np.ndarray:
    """P(T > distance in standard errors); without any scatter 0, 1 or, at no distance, 1/2."""
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(distance == 0, 0.0, distance / np.sqrt(estimate.variance))
    return special.stdtr(estimate.freedom, -t)


def _half_width(estimate: Estimate, confidence: float = CONFIDENCE) -> np.ndarray:
    return special.stdtrit(estimate.freedom, (1 + confidence) / 2) * np.sqrt(estimate.variance)


def pooled(variances: np.ndarray, freedoms: np.ndarray) -> np.ndarray:
    """Satterthwaite's degrees of freedom of the sum over the last axis."""
    total, parts = variances.sum(-1) ** 2, (variances**2 / freedoms).sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(parts > 0, total / parts, freedoms.sum(-1))


@functools.cache
def _lower_rank(blocks: int) -> int:
    """The rank, from 0, of the value that bounds the median's bootstrap distribution from below.

    For an even number of blocks it follows the lower of the two middle values.
    """
    below = _below(blocks, (blocks + 1) // 2)
    return max(0, int(np.argmax(below > (1 - CONFIDENCE) / 2)) - 1)


@functools.cache
def _weights(blocks: int) -> np.ndarray:
    """The share of resamples whose middle is the i-th smallest value.

    For an even number of blocks either middle value counts half, which spreads a little wider than
    their mean does.
    """
    lower, upper = (_below(blocks, middle) for middle in ((blocks + 1) // 2, blocks // 2 + 1))
    return np.diff((lower + upper) / 2)


def _below(blocks: int, middle: int) -> np.ndarray:
    """P(the `middle`-th smallest of as many draws is among the first i values), i = 0 … blocks.

    It is when a binomial count of draws among the first i reaches the middle.
    """
    return special.bdtrc(middle - 1, blocks, np.arange(blocks + 1) / blocks)

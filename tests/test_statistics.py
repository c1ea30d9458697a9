"""The statistics against traces whose answer is known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import statistics

BLOCKS = 9


def traces(count, difference, noise, seed, drift=0.05):
    """Times of ours and of a rival slower by `difference`: (count, BLOCKS) each.

    A drift common to both meets every block; `noise` is each time's own relative spread.
    """
    rng = np.random.default_rng(seed)
    common = 100 * np.exp(rng.normal(0, drift, (count, BLOCKS)))
    ours = common * np.exp(rng.normal(0, noise, (count, BLOCKS)))
    rival = common * (1 + difference) * np.exp(rng.normal(0, noise, (count, BLOCKS)))
    twin = common * np.exp(rng.normal(0, noise, (count, BLOCKS)))
    return ours, rival, twin


def verdicts(difference, noise, seed, count=3000):
    ours, rival, twin = traces(count, difference, noise, seed)
    ratios = zip(*statistics.paired_ratio(rival, ours), strict=True)
    twins = zip(*statistics.paired_ratio(twin, ours), strict=True)
    return [
        statistics.verdict(
            statistics.Interval(*r), statistics.noise(statistics.Interval(*t)), BLOCKS
        )
        for r, t in zip(ratios, twins, strict=True)
    ]


@pytest.mark.parametrize(
    ("difference", "expected"),
    [(0.0, "no difference"), (0.03, "better"), (-0.03, "worse"), (0.10, "better")],
)
def test_a_clear_trace_gets_its_verdict(difference, expected):
    found = verdicts(difference, noise=0.003, seed=1)
    assert found.count(expected) > 0.98 * len(found)


def test_an_equal_pair_is_hardly_ever_called_different():
    found = verdicts(0.0, noise=0.02, seed=2)
    assert found.count("better") + found.count("worse") < 0.01 * len(found)


def test_a_small_difference_in_much_noise_is_not_called_the_wrong_way():
    found = verdicts(0.03, noise=0.03, seed=3)
    assert "undecided" in found
    assert found.count("worse") < 0.005 * len(found)


def test_the_interval_covers_the_true_ratio():
    ours, rival, _ = traces(4000, 0.10, 0.02, seed=4)
    _, lo, hi = statistics.paired_ratio(rival, ours)
    covered = ((lo <= 1.10) & (hi >= 1.10)).mean()
    assert 0.92 < covered < 0.995


def test_pairing_removes_a_drift_common_to_both():
    ours, rival, _ = traces(200, 0.03, 0.001, seed=5, drift=0.2)
    _, lo, hi = statistics.paired_ratio(rival, ours)
    assert (hi - lo).max() < 0.02


def test_few_blocks_and_an_unknown_noise_floor_decide_nothing():
    clear = statistics.Interval(1.5, 1.45, 1.55)
    assert statistics.verdict(clear, 0.001, statistics.FEWEST_BLOCKS) == "better"
    assert statistics.verdict(clear, 0.001, statistics.FEWEST_BLOCKS - 1) == "undecided"
    assert statistics.verdict(clear, math.nan, BLOCKS) == "undecided"


def test_a_difference_below_the_noise_floor_is_no_difference():
    small = statistics.Interval(1.03, 1.02, 1.04)
    assert statistics.verdict(small, 0.05, BLOCKS) == "no difference"
    assert statistics.verdict(small, 0.001, BLOCKS) == "better"


@pytest.mark.parametrize("blocks", [5, 6, 8, 9, 12, 15])
def test_the_interval_is_that_of_a_drawn_bootstrap(blocks):
    values = np.exp(np.random.default_rng(blocks).normal(size=blocks))
    draws = np.random.default_rng(7).choice(values, (40_000, blocks))
    draws.sort(axis=1)
    lower, upper = draws[:, (blocks - 1) // 2], draws[:, blocks // 2]
    found = statistics.median_interval(values)
    assert (lower < found.lo).mean() < 0.026
    assert (lower <= found.lo).mean() > 0.024
    assert (upper > found.hi).mean() < 0.026
    assert (upper >= found.hi).mean() > 0.024


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=25))
def test_an_interval_lies_among_its_values_around_its_median(values):
    found = statistics.median_interval(np.array(values))
    assert min(values) <= found.lo <= found.hi <= max(values)
    assert found == statistics.median_interval(np.array(values))
    assert found.value == np.median(values)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=25), st.floats(1e-3, 1e3))
def test_the_geometric_mean_scales_and_inverts(values, factor):
    values = np.array(values)
    mean = statistics.geometric_mean(values)
    assert statistics.geometric_mean(factor * values) == pytest.approx(factor * mean)
    assert statistics.geometric_mean(1 / values) == pytest.approx(1 / mean)


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [1.0, -2.0], [math.nan]])
def test_the_geometric_mean_refuses_what_has_none(values):
    with pytest.raises(ValueError, match="geometric_mean"):
        statistics.geometric_mean(np.array(values))


def test_the_inverse_ratio_has_the_inverse_interval():
    ours, rival, _ = traces(1, 0.1, 0.02, seed=6)
    there, back = (
        statistics.paired_ratio(rival[0], ours[0]),
        statistics.paired_ratio(ours[0], rival[0]),
    )
    assert (back.lo, back.hi) == pytest.approx((1 / there.hi, 1 / there.lo))


def test_no_blocks_have_no_median():
    with pytest.raises(ValueError, match="no blocks"):
        statistics.median_interval(np.array([]))

"""Check the statistics on a few numbers, with results that a hand computes; each test is quick.

`make mutants` runs these tests: one edge of one formula each. The error rates of the formulas are
tested in test_stats.py and test_error_rates.py.
"""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from harness import stats as statistics
from harness.stats import Estimate

ONE = Estimate(np.array(0.03), np.array(1e-6), np.array(9.0))


def estimate(value, variance, freedom=9.0):
    value, variance, freedom = np.broadcast_arrays(value, variance, freedom)
    return Estimate(value.astype(float), variance.astype(float), freedom.astype(float))


def test_the_median_of_whole_numbers_has_bounds_that_are_floats():
    found = statistics.median_interval([3, 1, 2])
    assert found == (2, 1, 3)
    assert {type(bound) for bound in found} == {float}
    many = statistics.median_interval([[3, 1, 2], [30, 10, 20]])
    assert [bound.tolist() for bound in many] == [[2, 20], [1, 10], [3, 30]]
    assert {bound.dtype for bound in many} == {np.dtype(np.float64)}


def test_bounds_leave_as_many_blocks_out_on_either_side():
    """The fifth of nine draws is among the two smallest values in 2.9 % of resamples."""
    assert statistics._below(9, 5)[1] < 0.025 < statistics._below(9, 5)[2]
    assert statistics.median_interval([9, 1, 8, 2, 7, 3, 6, 4, 5]) == (5, 2, 8)
    assert statistics.median_interval([7]) == (7, 7, 7)


def test_ratios_are_taken_block_by_block():
    found = statistics.paired_ratio([2, 6, 4], [1, 2, 1])
    assert found == (3, 2, 4)
    log = statistics.log_ratio([[2, 6, 4], [1, 1, 1]], [[1, 2, 1], [1, 2, 4]])
    np.testing.assert_allclose(log.value, [math.log(3), -math.log(2)])
    assert log.variance.shape == log.freedom.shape == (2,)


@pytest.mark.parametrize(
    ("blocks", "freedom"), [(1, 1), (2, 1), (3, 2), (4, 3), (5, 4), (9, 6), (16, 8)]
)
def test_the_variance_of_a_median_has_few_degrees_of_freedom(blocks, freedom):
    values = np.arange(1.0, blocks + 1)
    assert statistics.log_median(values).freedom == pytest.approx(freedom)
    if blocks == 5:
        assert statistics.log_median(values).freedom == 4 < 2 * math.sqrt(5)


def test_the_weights_of_the_middle_are_binomial():
    # The second smallest of three draws is the first value of three if two draws are.
    np.testing.assert_allclose(statistics._below(3, 2) * 27, [0, 7, 20, 27])
    np.testing.assert_allclose(statistics._below(2, 1) * 4, [0, 3, 4])
    np.testing.assert_allclose(statistics.log_median([1, 2]).value, math.log(2) / 2)
    np.testing.assert_allclose(statistics.log_median([1, 2]).variance, (math.log(2) / 2) ** 2)


def test_medians_of_logarithms_are_found_row_by_row():
    rows = [[1, 2, 4], [1, 30, 40]]
    found, alone = statistics.log_median(rows), [statistics.log_median(row) for row in rows]
    np.testing.assert_allclose(found.variance, [one.variance for one in alone])
    # The weights of three values are 7, 13 and 7 of 27; the logarithms of the first row 0, 1 and 2.
    assert alone[0].variance == pytest.approx(14 / 27 * math.log(2) ** 2)


def test_offsets_are_found_row_by_row():
    """The first row has equal variances, so that the start is the answer: 4 - 1."""
    gaps = estimate([[2, 2, -2], [0.1, 0.1, 0.1]], [[1, 1, 1], [16, 16, 16]])
    assert statistics.between(gaps).tolist() == [3, 0]
    rows = estimate([[2, 1, 0], [200, 100, 0], [0, 0, 0]], [[1, 0.5, 0], [1, 0.5, 0], [1, 2, 3]])
    alone = [float(statistics.between(Estimate(*(part[row] for part in rows)))) for row in range(3)]
    np.testing.assert_allclose(statistics.between(rows), alone, rtol=1e-8)
    assert alone[2] == 0


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_the_offsets_make_the_mean_square_one(scale):
    gaps = scale * np.array([[2.0, 1.0, 0.5, 0.1], [0.3, 0.3, 0.2, 0.9]])
    own = scale**2 * np.array([[1.0, 0.5, 0.25, 0.1], [0.01, 0.02, 0.04, 0.08]])
    found = statistics.between(estimate(gaps, own))
    np.testing.assert_allclose((gaps**2 / (found[:, None] + own)).mean(axis=-1), 1, rtol=1e-8)


def test_the_search_for_offsets_starts_at_the_answer_if_all_gaps_are_as_uncertain(monkeypatch):
    monkeypatch.setattr(statistics, "NEWTON_STEPS", 1)
    gaps = estimate([[2, 2, -2], [0, 0, 0]], [[1, 1, 1], [16, 16, 16]])
    assert statistics.between(gaps).tolist() == [3, 0]


def test_gaps_of_nothing_raise_no_warning():
    with np.errstate(all="raise"):
        assert statistics.between(estimate([0, 0], [0, 0])) == 0


def scores_of(freedom, scale, count=200):
    """Return as many quantiles of Student's t as asked for, times a scale."""
    return scale * stats.t.ppf((np.arange(count) + 0.5) / count, freedom)


def heaviest(likelihoods):
    """Return the least degrees of freedom of which the log likelihood is half a unit from the best
    at most.
    """
    both = zip(statistics.TAILS, likelihoods, strict=True)
    return min(free for free, found in both if max(likelihoods) - found <= 0.5)


def likely(scores, scale):
    """Return the degrees of freedom that `tails` takes if the scale is known."""
    return heaviest([stats.t.logpdf(scores, free, scale=scale).sum() for free in statistics.TAILS])


def test_tails_are_the_heaviest_of_a_great_likelihood(monkeypatch):
    monkeypatch.setattr(statistics, "FITTING_STEPS", 0)
    rows = np.array([scores_of(free, scale) for free in (3, 6, 30) for scale in (1e-3, 1, 1e3)])
    expected = [likely(row, np.sqrt((row**2).mean())) for row in rows]
    assert len(set(expected)) > 1
    assert statistics.tails(rows).tolist() == expected
    assert [statistics.tails(row) for row in rows] == expected


def test_the_scale_of_the_scores_is_fitted_along():
    scales = {3: 1e-3, 4: 1, 5: 7, 7: 1e3}
    rows = np.array([scores_of(free, scale) for free, scale in scales.items()])
    found = []
    for row in rows:
        fits = [
            -optimize.minimize_scalar(
                lambda log, row=row, free=free: (
                    -stats.t.logpdf(row, free, scale=math.exp(log)).sum()
                ),
                bracket=(math.log(row.std()) - 1, math.log(row.std())),
            ).fun
            for free in statistics.TAILS
        ]
        found.append(heaviest(fits))
    assert len(set(found)) == 4
    assert statistics.tails(rows).tolist() == found


def test_tails_are_fitted_from_as_many_scores_as_that_takes():
    enough = scores_of(30, 1, statistics.FEWEST_SCORES)
    assert statistics.tails(list(enough)) == 10
    assert statistics.tails(np.stack([enough[1:], enough[1:]])).tolist() == [4, 4]
    assert statistics.tails(enough[1:]).shape == ()


def test_estimates_of_many_cells_add_place_by_place():
    many = estimate([0.1, 0.2, 0.3], [1e-6, 2e-6, 4e-6], [9, 9, 4])
    found = statistics.plus(many, 1e-6, 4.0)
    np.testing.assert_allclose(found.value, [0.1, 0.2, 0.3])
    np.testing.assert_allclose(found.variance, [2e-6, 3e-6, 5e-6])
    # Satterthwaite: (1 + 1)^2 / (1/9 + 1/4), (2 + 1)^2 / (4/9 + 1/4), (4 + 1)^2 / (16/4 + 1/4).
    np.testing.assert_allclose(found.freedom, [144 / 13, 324 / 25, 100 / 17])


def test_single_estimates_add_and_average():
    assert statistics.plus(ONE, 3e-6, 9.0) == (0.03, pytest.approx(4e-6), pytest.approx(14.4))
    three = estimate([0.1, 0.2, 0.6], [1e-6, 2e-6, 3e-6])
    found = statistics.mean(three)
    assert found == (pytest.approx(0.3), pytest.approx(6e-6 / 9), pytest.approx(36 * 9 / 14))


def test_means_are_taken_row_by_row():
    parts = estimate([[0.1, 0.3], [1, 2]], [[1e-6, 3e-6], [1e-4, 1e-4]], [[9, 4], [5, 5]])
    found = statistics.mean(parts)
    np.testing.assert_allclose(found.value, [0.2, 1.5])
    np.testing.assert_allclose(found.variance, [1e-6, 5e-5])
    np.testing.assert_allclose(found.freedom, [16 / (1 / 9 + 9 / 4), 10])


def test_degrees_of_freedom_are_pooled_row_by_row_and_known_without_a_variance():
    variances = np.array([[1.0, 1.0], [0.0, 0.0], [2.0, 0.0]])
    freedoms = np.array([[9.0, 9.0], [3.0, 4.0], [5.0, 7.0]])
    with np.errstate(all="raise"):
        found = statistics.pooled(variances[[0, 2]], freedoms[[0, 2]])
    np.testing.assert_allclose(found, [18, 5])
    with np.errstate(all="raise"):
        assert statistics.pooled(variances, freedoms).tolist() == [18, 7, 5]
        assert statistics.pooled(np.array([1.0]), np.array([math.inf])) == math.inf
    assert statistics.pooled(variances, freedoms).dtype == np.float64


def test_the_question_of_p_changes_at_the_margin_and_at_the_band():
    """At the margin, and between the margin and the floor, nothing can be said: p is one."""
    values = np.array([0.01, -0.01, 0.03, 0.02, -0.04])
    many = Estimate(values, np.full(5, 1e-6), np.full(5, 9.0))
    p = statistics.p_value(many, np.array([0.0, 0.0, 0.03, 0.04, 0.02]))
    beyond = stats.t.sf(20, 9) + stats.t.sf(60, 9)
    np.testing.assert_allclose(p, [1, 1, 1, 1, beyond])


def test_a_difference_below_the_margin_is_as_sure_as_its_nearer_edge():
    near = estimate([0.006, -0.006, 0.006], [1e-6])
    p = statistics.p_value(near, np.array([0.0, 0.05, math.nan]))
    np.testing.assert_allclose(p, [stats.t.sf(4, 9), stats.t.sf(4, 9), math.nan])


def test_bounds_are_asked_one_side_at_a_time():
    assert statistics.below(ONE, 0.05) == pytest.approx(stats.t.sf(20, 9))
    assert statistics.above(ONE, 0.01) == pytest.approx(stats.t.sf(20, 9))


def test_intervals_are_student_s():
    t = 2.2621571628  # of 9 degrees of freedom, 97.5 %
    half = t * 0.001
    found = statistics.ratio_interval(ONE)
    assert found == tuple(pytest.approx(math.exp(0.03 + side * half)) for side in (0, -1, 1))
    around = statistics.around(200.0, ONE)
    assert around == (200, pytest.approx(200 / math.exp(half)), pytest.approx(200 * math.exp(half)))
    assert statistics.reach(ONE) == pytest.approx(0.03 + half)
    assert statistics.reach(ONE._replace(value=np.array(-0.03))) == pytest.approx(0.03 + half)
    surer = math.exp(0.03 + 3.2498355416 * 0.001)
    assert statistics.ratio_interval(ONE, 0.99).hi == pytest.approx(surer)
    assert statistics.around(1.0, ONE, 0.99).hi == pytest.approx(surer / math.exp(0.03))


def test_tails_without_scatter_are_certain_or_even():
    exact = estimate([0.03], [0])
    with np.errstate(all="raise"):
        assert statistics.above(exact, 0.02) == 0
        assert statistics.above(exact, 0.04) == 1
        assert statistics.above(exact, 0.03) == 0.5
    assert statistics.above(estimate([1.5], [0.25]), 0.5) == stats.t.sf(2, 9)


def test_holm_counts_each_family_by_itself():
    nan = math.nan
    found = statistics.holm([[0.01, nan, 0.02], [0.3, 0.01, 0.02]])
    np.testing.assert_allclose(found, [[0.02, nan, 0.02], [0.3, 0.03, 0.04]])
    assert statistics.holm([0.9, 0.8]).tolist() == [1, 1]


def test_a_verdict_is_beyond_the_band_and_sure():
    limit = 1 - statistics.CONFIDENCE
    value = np.array([0.01, -0.01, 0.02, -0.02, 0.03, -0.03, 0.03, 0.03, 0.0])
    noise = np.array([0.0, 0.0, 0.0, 0.0, 0.03, 0.03, 0.0, 0.0, 0.0])
    p = np.array([0, 0, 0, 0, 0, 0, limit, math.nan, np.nextafter(limit, 1)])
    same = "no difference"
    expected = [same, same, "better", "worse", same, same, "better", "undecided", "undecided"]
    assert statistics.verdicts(value, noise, p).tolist() == expected

"""Check the statistics on traces whose true values are known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from harness import stats

BLOCKS = 9
KNOWN = stats.Estimate(np.array(0.03), np.array(1e-6), np.array(9.0))


def traces(count, difference, noise, seed, drift=0.05):
    """Return times of ours and of a rival slower by `difference`: (count, BLOCKS) each.

    A drift common to both meets every block; `noise` is each time's own relative spread.
    """
    rng = np.random.default_rng(seed)
    common = 100 * np.exp(rng.normal(0, drift, (count, BLOCKS)))
    ours = common * np.exp(rng.normal(0, noise, (count, BLOCKS)))
    return ours, common * (1 + difference) * np.exp(rng.normal(0, noise, (count, BLOCKS)))


def test_the_interval_covers_the_true_ratio():
    ours, rival = traces(4000, 0.10, 0.02, seed=4)
    _, lo, hi = stats.paired_ratio(rival, ours)
    covered = ((lo <= 1.10) & (hi >= 1.10)).mean()
    assert 0.92 < covered < 0.995


def test_pairing_removes_a_drift_common_to_both():
    ours, rival = traces(200, 0.03, 0.001, seed=5, drift=0.2)
    _, lo, hi = stats.paired_ratio(rival, ours)
    assert (hi - lo).max() < 0.02


def decided(value, noise, error=0.001, freedom=9.0):
    estimate = stats.Estimate(np.array([value]), np.array([error**2]), np.array([freedom]))
    noise = np.array([noise])
    p = stats.p_value(estimate, noise)
    return p[0], stats.verdicts(estimate.value, noise, p)[0]


def test_p_is_that_of_the_nearer_question():
    # P(T > 20), P(T > 40) and P(T > 4) at nine degrees of freedom, as scipy.stats.t gives them.
    beyond = 4.539760650e-09 + 9.491499225e-12
    assert decided(0.03, 0.0) == (pytest.approx(beyond), "better")
    assert decided(-0.03, 0.0) == (pytest.approx(beyond), "worse")
    assert decided(0.006, 0.0) == (pytest.approx(0.001555214155), "no difference")
    assert decided(0.01, 0.0) == (1.0, "undecided")


def test_the_noise_floor_hides_a_difference_but_proves_no_equality():
    assert decided(0.03, 0.02)[1] == "better"
    assert decided(0.03, 0.04) == (1.0, "undecided")
    assert decided(0.001, 0.04)[1] == "no difference"


def test_an_unknown_noise_floor_decides_nothing():
    p, verdict = decided(0.5, math.nan)
    assert math.isnan(p)
    assert verdict == "undecided"


def test_blocks_without_scatter_decide_at_once():
    ours, rival = np.full(10, 7.0), np.full(10, 7.7)
    log = stats.log_ratio(rival, ours)
    assert log.variance == pytest.approx(0, abs=1e-20)
    assert stats.p_value(log, np.array(0.0)) == 0


def test_holm_steps_down_and_never_back():
    p = [0.01, 0.04, 0.03, math.nan, 0.005]
    found = stats.holm(np.array(p))
    np.testing.assert_allclose(found, [0.03, 0.06, 0.06, math.nan, 0.02])
    assert stats.holm(np.array([[0.6, 0.5]])).tolist() == [[1.0, 1.0]]
    assert stats.holm(np.array([])).shape == (0,)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.randoms())
def test_holm_keeps_the_order_and_knows_no_places(values, random):
    found = stats.holm(np.array(values))
    assert (found >= values).all()
    assert (found <= np.minimum(1, np.array(values) * len(values)) + 1e-15).all()
    places = list(range(len(values)))
    random.shuffle(places)
    assert stats.holm(np.array(values)[places]).tolist() == found[places].tolist()


@pytest.mark.parametrize("blocks", [5, 8, 10, 16, 25, 40])
@pytest.mark.parametrize("rate", [0.05, 0.005, 0.0005])
def test_the_median_keeps_to_student_s_rates(blocks, rate):
    values = np.exp(0.01 * np.random.default_rng(blocks).normal(size=(200_000, blocks)))
    log = stats.log_median(values)
    t = log.value / np.sqrt(log.variance)
    assert 0.02 * rate < (special.stdtr(log.freedom, -t) < rate).mean() < 1.1 * rate


@pytest.mark.parametrize("blocks", [1, 2, 9, 12])
def test_the_variance_is_that_of_a_drawn_bootstrap(blocks):
    values = np.exp(np.random.default_rng(blocks).normal(size=blocks))
    draws = np.log(np.random.default_rng(7).choice(values, (100_000, blocks)))
    draws.sort(axis=1)
    middles = draws[:, [(blocks - 1) // 2, blocks // 2]]
    assert stats.log_median(values).variance == pytest.approx(middles.var(), rel=0.02)


def test_bounds_are_asked_one_side_at_a_time():
    # P(T > 20) and P(T > -20).
    assert stats.above(KNOWN, 0.01) == pytest.approx(4.539760650e-09)
    assert stats.below(KNOWN, 0.01) == pytest.approx(1)
    assert stats.below(KNOWN, 0.05) == pytest.approx(4.539760650e-09)
    assert stats.above(KNOWN, 0.03) == stats.below(KNOWN, 0.03) == 0.5


def test_offsets_are_what_gaps_show_beyond_their_own_uncertainty():
    rng = np.random.default_rng(8)
    gaps = rng.normal(0, math.hypot(0.02, 0.01), 100_000)
    full = np.full_like(gaps, 0.01**2)
    variance = stats.between(stats.Estimate(gaps, full, full))
    assert math.sqrt(variance) == pytest.approx(0.02, rel=0.01)
    assert stats.between(stats.Estimate(gaps, 100 * full, full)) == 0
    assert stats.between(stats.Estimate(0 * gaps, 0 * full, full)) == 0


def test_a_few_noisy_gaps_do_not_hide_the_offsets_of_the_others():
    """Their variances, subtracted in a plain mean, would leave nothing."""
    rng = np.random.default_rng(9)
    own = np.where(np.arange(2000) % 20 == 0, 0.05**2, 0.001**2)
    gaps = rng.normal(0, np.sqrt(0.005**2 + own), (50, 2000))
    found = np.sqrt(stats.between(stats.Estimate(gaps, np.tile(own, (50, 1)), own)))
    assert found.mean() == pytest.approx(0.005, rel=0.02)
    assert found.std() < 0.0002


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-0.1, 0.1), st.floats(1e-5, 0.05)), min_size=2, max_size=20),
    st.floats(0.1, 10),
)
def test_the_variance_of_offsets_solves_its_equation_and_scales(pairs, factor):
    gaps, errors = np.array(pairs).T
    found = stats.between(stats.Estimate(gaps, errors**2, errors))
    over = (gaps**2 / (found + errors**2)).mean()
    assert over == pytest.approx(1, rel=1e-6) if found > 0 else over <= 1 + 1e-9
    scaled = stats.Estimate(factor * gaps, (factor * errors) ** 2, errors)
    assert stats.between(scaled) == pytest.approx(factor**2 * found, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize("freedom", [3.0, 5.0, 8.0, 30.0])
def test_the_tails_are_found_at_any_scale(freedom):
    scores = np.random.default_rng(3).standard_t(freedom, (40, 4000))
    found = stats.tails(np.concatenate([scores, 7 * scores]))
    assert (found[:40] == found[40:]).all()
    assert 1 / np.median(found) == pytest.approx(1 / freedom, abs=0.03)


def test_the_tails_of_few_scores_are_not_guessed_from_them():
    scores = np.random.default_rng(4).normal(size=stats.FEWEST_SCORES - 1)
    assert stats.tails(scores) == stats.FEW_TAILS < 30


def test_variances_add_and_pool_their_freedom():
    wider = stats.plus(KNOWN, 1e-6, 9.0)
    assert (wider.value, wider.variance) == (0.03, pytest.approx(2e-6))
    assert wider.freedom == pytest.approx(18)
    assert stats.plus(KNOWN, 1e-12, 3.0).freedom == pytest.approx(9, rel=1e-3)
    assert stats.plus(KNOWN, 0.0, 20.0).freedom == 9
    four = stats.Estimate(*(np.full(4, part) for part in KNOWN))
    together = stats.mean(four)
    assert (together.value, together.variance) == (0.03, pytest.approx(1e-6 / 4))
    assert together.freedom == pytest.approx(36)


def test_the_interval_of_an_estimate_is_student_s():
    found = stats.ratio_interval(KNOWN)
    assert found.value == pytest.approx(math.exp(0.03))
    assert found.hi == pytest.approx(math.exp(0.03 + 2.262157 * 0.001))
    assert found.lo == pytest.approx(math.exp(0.03 - 2.262157 * 0.001))
    assert stats.reach(KNOWN) == pytest.approx(0.03 + 2.262157 * 0.001)
    surer = stats.ratio_interval(KNOWN, 0.99)
    assert surer.hi == pytest.approx(math.exp(0.03 + 3.249836 * 0.001))
    time = stats.around(200.0, KNOWN)
    assert time.value == 200
    assert time.lo * time.hi == pytest.approx(200**2)
    assert time.hi == pytest.approx(200 * math.exp(2.262157 * 0.001))


@pytest.mark.parametrize("blocks", [5, 6, 8, 9, 12, 15])
def test_the_interval_is_that_of_a_drawn_bootstrap(blocks):
    values = np.exp(np.random.default_rng(blocks).normal(size=blocks))
    draws = np.random.default_rng(7).choice(values, (40_000, blocks))
    draws.sort(axis=1)
    lower, upper = draws[:, (blocks - 1) // 2], draws[:, blocks // 2]
    found = stats.median_interval(values)
    assert (lower < found.lo).mean() < 0.026
    assert (lower <= found.lo).mean() > 0.024
    assert (upper > found.hi).mean() < 0.026
    assert (upper >= found.hi).mean() > 0.024


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=25))
def test_an_interval_lies_among_its_values_around_its_median(values):
    found = stats.median_interval(np.array(values))
    assert min(values) <= found.lo <= found.hi <= max(values)
    assert found == stats.median_interval(np.array(values))
    assert found.value == np.median(values)


def test_the_inverse_ratio_has_the_inverse_interval():
    ours, rival = traces(1, 0.1, 0.02, seed=6)
    there, back = (
        stats.paired_ratio(rival[0], ours[0]),
        stats.paired_ratio(ours[0], rival[0]),
    )
    assert (back.lo, back.hi) == pytest.approx((1 / there.hi, 1 / there.lo))


def test_no_blocks_have_no_median():
    with pytest.raises(ValueError, match="no blocks"):
        stats.median_interval(np.array([]))

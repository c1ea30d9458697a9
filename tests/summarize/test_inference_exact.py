"""Check verdicts over few differences, with results that a hand computes; each test is quick.

`make mutants` runs these tests: one edge of one rule each. The verdicts of a whole study are tested
in test_comparisons.py, and their error rates in test_error_rates.py.
"""

import math

import numpy as np
import pytest
from scipy import stats

from harness import stats as statistics
from harness.stats import Estimate
from harness.summarize import inference
from harness.summarize.inference import Difference, Offset, Offsets

OFFSET = Offset(1e-6, 40.0, 4.0)


def difference(value, variance=1e-6, freedom=9.0, offset=OFFSET, gaps=((0.001, 1e-6, 9.0),)):
    gaps = tuple(Estimate(*gap) if gap else None for gap in gaps)
    return Difference(Estimate(value, variance, freedom), offset, gaps)


def test_estimates_are_stacked_part_by_part():
    found = inference.stacked([Estimate(1, 2, 3), Estimate(np.array(4.5), 5, 6)])
    assert [part.tolist() for part in found] == [[1, 4.5], [2, 5], [3, 6]]
    assert [part.shape for part in inference.stacked([])] == [(0,)] * 3


def test_two_offsets_add_and_pool_both_their_freedoms():
    found = Offset(1.0, 9.0, 4.0).joined(Offset(3.0, 5.0, 6.0))
    # (1 + 3)^2 / (1/9 + 9/5) and (1 + 3)^2 / (1/4 + 9/6).
    assert found == (4.0, pytest.approx(16 / (1 / 9 + 9 / 5)), pytest.approx(16 / 1.75))
    assert {type(part) for part in found} == {float}


def test_neighbours_are_the_nearest_and_of_equals_the_first():
    places = np.array([0.0, 1.0, 10.0, 11.5])
    assert inference.neighbours(places, places).tolist() == [
        [0, 1, 2, 3], [1, 0, 2, 3], [2, 3, 1, 0], [3, 2, 1, 0],
    ]  # fmt: skip
    assert inference.neighbours(places, places, others=True).tolist() == [
        [1, 2, 3], [0, 2, 3], [3, 1, 0], [2, 1, 0],
    ]  # fmt: skip
    assert inference.neighbours(np.array([9.0]), places).tolist() == [[2, 3, 1, 0]]
    equal = np.tile([1.0, 2.0], 50)
    assert inference.neighbours(np.zeros(1), equal).tolist() == [list(range(0, 80, 2))]
    assert inference.NEIGHBOURS == 40


def test_the_variance_at_a_place_is_that_of_its_neighbours():
    gaps = Estimate(np.array([2.0, 2.0, 0.1]), np.array([1.0, 1.0, 16.0]), np.full(3, 9.0))
    near = np.array([[0, 1], [2, 2]])
    assert inference.variances(gaps, near).tolist() == [3, 0]


def test_scores_are_gaps_over_their_neighbours_deviation():
    """Each gap has one neighbour: the variance is its square less its own uncertainty."""
    gaps = Estimate(np.array([0.3, -0.2]), np.array([0.05, 0.01]), np.full(2, 9.0))
    with np.errstate(all="raise"):
        found = inference.scores(gaps, np.array([1.0, 2.0]))
    np.testing.assert_allclose(found, [0.3 / math.sqrt(0.08), -0.2 / math.sqrt(0.05)])


def test_scores_leave_each_gap_out_of_its_own_neighbours(monkeypatch):
    monkeypatch.setattr(inference, "NEIGHBOURS", 1)
    gaps = Estimate(np.array([0.1, 0.2, 0.4]), np.zeros(3), np.full(3, 9.0))
    found = inference.scores(gaps, np.array([1.0, 2.0, 9.0]))
    np.testing.assert_allclose(found, [0.1 / 0.2, 0.2 / 0.1, 0.4 / 0.2])


def test_a_gap_without_any_variance_scores_nothing(monkeypatch):
    monkeypatch.setattr(inference, "NEIGHBOURS", 1)
    gaps = Estimate(np.array([0.0, 0.5, 0.0, 0.0]), np.zeros(4), np.full(4, 9.0))
    with np.errstate(all="raise"):
        found = inference.scores(gaps, np.array([0.0, 4.0, 9.0, 10.0]))
    assert found.tolist() == [0, 0, 0, 0]


def test_tails_are_those_of_the_window_nearest_in_length(monkeypatch):
    """`statistics.tails` counts: a window of 4 begins every 2 gaps, and one ends with the last."""
    monkeypatch.setattr(inference, "ALIKE", 4)
    monkeypatch.setattr(inference, "NEXT", 2)
    monkeypatch.setattr(inference, "scores", lambda gaps, places: gaps.value)
    monkeypatch.setattr(statistics, "tails", lambda scores: scores.sum(axis=-1))
    places = np.log([1.0, 10, 100, 1e3, 1e4, 1e5, 1e6])[::-1]
    value = 10.0 ** np.arange(7)[::-1]
    found = inference.Tails(Estimate(value, value, value), places)
    # Their centres lie at 10^1.5, 10^3.5 and 10^4.5.
    assert found.at([1.0, 300, 400, 9e3, 1.1e4, 1e9]).tolist() == [
        1111, 1111, 111100, 111100, 1111000, 1111000,
    ]  # fmt: skip
    studies = inference.Tails(Estimate(np.stack([value, 2 * value]), value, value), places)
    assert studies.at([1.0]).tolist() == [[1111], [2222]]
    few = inference.Tails(Estimate(value[:3], value[:3], value[:3]), places[:3])
    assert few.at([1.0, 1e9]).tolist() == [1110000, 1110000]


def test_long_calls_have_heavier_tails_than_short_ones():
    rng = np.random.default_rng(5)
    lengths = np.sort(np.exp(rng.uniform(1, 7, 600)))
    values = np.where(lengths < 50, rng.normal(0, 0.01, 600), 0.001 * rng.standard_t(2, 600))
    found = Offsets(lengths, [Estimate(value, 0.0, 9.0) for value in values])
    assert found.at(1000.0).tails == statistics.TAILS[0] < 7 <= found.at(5.0).tails
    assert type(found.at(5.0).tails) is float


def test_a_mean_of_several_processes_has_lighter_tails():
    """By the sixth root of their number; of less than one, by a kurtosis or the cube root."""
    four = inference.averaged(Offset(0.08, 40.0, 10.0), 4, 4)
    assert four == (pytest.approx(0.02), 40.0, pytest.approx(10 * 4 ** (1 / 6)))
    assert inference.averaged(Offset(0.08, 40.0, 10.0), 1, 1) == (0.08, 40.0, 10.0)
    assert inference.averaged(Offset(0.08, 40.0, 3.0), 64, 64).tails == pytest.approx(6.0)
    assert inference.averaged(Offset(0.08, 40.0, 3.0), 1, 1).tails == 3.0
    # Most of such a gap is one process, which has tails heavier than a gap of two.
    uneven = inference.averaged(Offset(0.08, 40.0, 10.0), 1, 4)
    assert uneven.variance == pytest.approx(0.05)
    count = 1.25**2 / (1 + 1 / 64) / 2
    assert uneven.tails == pytest.approx(4 + 6 * count)
    heavy = inference.averaged(Offset(0.08, 40.0, 3.0), 1, 4)
    assert heavy.tails == pytest.approx(3 * count ** (1 / 3))


def test_offsets_follow_the_length_of_a_call():
    """Short calls differ by 10 %, long ones by 1 %; each of `at` has the neighbours of its own."""
    lengths = [1.0 + 0.001 * n for n in range(60)] + [1000.0 + n for n in range(60)]
    gaps = [Estimate(0.1, 0.0, 9.0)] * 60 + [Estimate(-0.01, 0.0, 9.0)] * 60
    found = Offsets(lengths, gaps)
    for _ in range(2):
        assert found.at(1.0).variance == pytest.approx(0.01)
        assert found.at(1e4).variance == pytest.approx(1e-4)
    assert found.at(1.0).freedom == inference.NEIGHBOURS
    assert found.alone(1e4) == found.at(1e4)._replace(variance=found.at(1e4).variance / 2)
    # Means of several processes: 1/2 + 1/4 of a process, which is half of a gap; 1/4 of one.
    assert found.between(1e4, 2, 4).variance == pytest.approx(1e-4 * 0.75 / 2)
    assert found.between(1.0, 1, 1) == found.at(1.0)
    assert found.alone(1e4, 4).variance == pytest.approx(1e-4 / 8)
    assert found.at(1.0).tails == found.at(1e4).tails == statistics.TAILS[-1]


def test_a_cell_may_have_an_offset_of_its_own():
    own = Offset(0.04, 6.0, 5.0)
    found = Offsets([1.0, 2.0], [Estimate(0.1, 0.0, 9.0)] * 2, {"odd": own})
    assert found.of("even") is found
    odd = found.of("odd")
    assert odd.at(1.0) == odd.at(1e4) == own
    assert odd.alone(1.0, 4) == own._replace(variance=0.005)
    assert odd.between(1.0, 1, 4).variance == pytest.approx(0.025)
    assert odd.between(1.0, 4, 4) == (0.01, 6.0, 5.0)
    gaps = {("a",): (1.0, Estimate(0.1, 0.0, 9.0)), ("b",): (2.0, None)}
    assert inference.known(gaps, {"odd": own}).of("odd").at(3.0) == own
    assert inference.known(gaps).at(3.0) == (pytest.approx(0.01), 1.0, statistics.FEW_TAILS)
    assert inference.known(gaps).of("odd").at(3.0) == inference.known(gaps).at(3.0)


def test_few_gaps_have_the_tails_assumed_and_none_no_offset():
    one = Offsets([100], [Estimate(0.5, 0.0, 9.0)])
    assert one.at(3.0) == (pytest.approx(0.25), 1.0, statistics.FEW_TAILS)
    two = Offsets([100, 200], [Estimate(0.5, 0.0, 9.0)] * 2)
    assert two.at(3.0) == (pytest.approx(0.25), 2.0, statistics.FEW_TAILS)
    assert Offsets([], []).at(3.0) == inference.NONE == inference.NOTHING_KNOWN.at(3.0)


def test_known_offsets_are_those_of_the_cells_with_a_gap():
    gaps = {("a",): (1.0, Estimate(0.5, 0.0, 9.0)), ("b",): (9.0, None)}
    assert inference.known(gaps).at(1.0).variance == pytest.approx(0.25)
    assert inference.known({("b",): (9.0, None)}).at(1.0) == inference.NONE


def test_a_mean_over_cells_has_the_variance_of_its_offsets():
    logs = Estimate(
        np.array([[0.1, 0.3], [1, 2]]), np.array([[1.0, 3.0], [2, 2]]), np.full((2, 2), 5.0)
    )
    offsets = Offset(
        np.array([[2.0, 4.0], [1, 1]]),
        np.array([[10.0, 20.0], [30, 30]]),
        np.array([[4.0, 4.0], [9, 3]]),
    )
    found = inference.over_cells(logs, offsets)
    np.testing.assert_allclose(found.value, [0.2, 1.5])
    np.testing.assert_allclose(found.variance, [4 / 4 + 6 / 4, 4 / 4 + 2 / 4])
    # The mean of logs: 16/(1/5 + 9/5), 16/(4/5 + 4/5). The mean of offsets: the mean of theirs.
    alone, known = [8, 10], [15, 30]
    expected = [2.5**2 / (1 / alone[0] + 2.25 / known[0]), 1.5**2 / (1 / 10 + 0.25 / known[1])]
    np.testing.assert_allclose(found.freedom, expected)
    # By variance: the logs, and each offset with its tails times the cube root of 36/20 and of 2.
    expected = [
        2.5 / (1 / alone[0] + (0.5 / 4 + 1 / 4) / 1.8 ** (1 / 3)),
        1.5 / (1 / alone[1] + (0.25 / 9 + 0.25 / 3) / 2 ** (1 / 3)),
    ]
    np.testing.assert_allclose(inference.over_cells(logs, offsets, proving=True).freedom, expected)


def test_many_cells_thin_heavy_tails_out_slowly():
    """By the cube root of the number of cells, in which those count whose offsets vary most."""
    alone = Estimate(np.zeros((2, 4)), np.zeros((2, 4)), np.ones((2, 4)))
    tails = np.array([[3.0, 3, 3, 3], [10, 10, 10, 3]])
    offsets = Offset(np.array([[1.0, 1, 1, 1], [1, 1, 1, 9]]), np.full((2, 4), 40.0), tails)
    found = inference.over_cells(alone, offsets, proving=True).freedom
    np.testing.assert_allclose(found, [3 * 4 ** (1 / 3), (144 / 84) ** (1 / 3) * 12 / 3.3])
    nothing = offsets._replace(variance=np.zeros((2, 4)))
    assert np.isfinite(inference.over_cells(alone, nothing, proving=True).freedom).all()


def test_the_noise_floor_is_the_widest_of_the_mean_gaps():
    member = [
        difference(0.0, gaps=((0.01, 1e-6, 9.0), None, (0.5, 1e-8, 9.0))),
        difference(0.0, gaps=((0.03, 3e-6, 9.0), None, (-0.5, 1e-8, 9.0))),
    ]
    # The mean of the first kind is 0.02 with a deviation of 0.001; of the last, nothing.
    freedom = 16 / (1 / 9 + 9 / 9)
    assert inference.floor(member) == pytest.approx(0.02 + stats.t.ppf(0.975, freedom) * 1e-3)
    assert type(inference.floor(member)) is float
    some = [difference(0.0, gaps=(None, (0.02, 1e-6, 9.0))), difference(0.0, gaps=(None, None))]
    assert inference.floor(some) == pytest.approx(0.02 + stats.t.ppf(0.975, 9) * 1e-3)
    assert math.isnan(inference.floor([difference(0.0, gaps=(None,))]))
    with pytest.raises(ValueError, match="zip"):
        inference.floor([difference(0.0, gaps=(None,)), difference(0.0, gaps=(None, None))])


def test_an_interval_knows_the_variance_and_a_verdict_fears_the_tails():
    member = [difference(0.03)]
    combined, proving = inference.combined(member), inference.proving(member)
    assert combined.variance == proving.variance == pytest.approx(2e-6)
    assert combined.freedom == pytest.approx(4 / (1 / 9 + 1 / 40))
    assert proving.freedom == pytest.approx(2 / (1 / 9 + 1 / 4))


def test_a_family_is_judged_member_by_member():
    assert inference.judged([]) == []
    wide, narrow = inference.judged([[difference(0.1)], [difference(0.012)]])
    noise = 0.001 + stats.t.ppf(0.975, 9) * 1e-3
    half = stats.t.ppf(0.975, 4 / (1 / 9 + 1 / 40)) * math.sqrt(2e-6)
    freedom = 2 / (1 / 9 + 1 / 4)
    p = [
        sum(stats.t.sf((value + edge) / math.sqrt(2e-6), freedom) for edge in (-0.01, 0.01))
        for value in (0.1, 0.012)
    ]
    assert wide == {
        "ratio": pytest.approx(math.exp(0.1)),
        "ci_lo": pytest.approx(math.exp(0.1 - half)),
        "ci_hi": pytest.approx(math.exp(0.1 + half)),
        "noise": pytest.approx(noise),
        "p": pytest.approx(p[0]),
        "p_holm": pytest.approx(2 * p[0]),
        "verdict": "better",
    }
    assert list(wide) == ["ratio", "ci_lo", "ci_hi", "noise", "p", "p_holm", "verdict"]
    assert (narrow["p_holm"], narrow["verdict"]) == (pytest.approx(p[1]), "undecided")
    assert {type(value) for value in wide.values()} == {float, str}


def against(*values, **other):
    return inference.against_best([[difference(value, **other)] for value in values])


def test_the_best_of_two_rivals():
    found = against(0.2, 0.0235)
    freedom, deviation = 2 / (1 / 9 + 1 / 4), math.sqrt(2e-6)
    known = 4 / (1 / 9 + 1 / 40)
    assert found == {
        "closest": 1,
        "ratio": pytest.approx(math.exp(0.0235)),
        "ci_lo": pytest.approx(math.exp(0.0235 - stats.t.ppf(0.975, known) * deviation)),
        # The upper bound of the smaller of two is that of either at half the rate of errors.
        "ci_hi": pytest.approx(math.exp(0.0235 + stats.t.ppf(0.9875, known) * deviation)),
        "noise": pytest.approx(0.001 + stats.t.ppf(0.975, 9) * 1e-3),
        "p": pytest.approx(2 * stats.t.sf(0.0135 / deviation, freedom)),
        "verdict": "better",
    }
    assert {type(value) for value in found.values()} == {int, float, str}


def test_worse_than_one_of_two_rivals_is_worse_than_the_best():
    found = against(0.2, -0.0235)
    tail = stats.t.sf(0.0135 / math.sqrt(2e-6), 2 / (1 / 9 + 1 / 4))
    assert (found["verdict"], found["p"]) == ("worse", pytest.approx(2 * 2 * tail))


def test_no_different_from_the_best_is_no_worse_than_any_and_no_better_than_one():
    deviation, freedom = math.sqrt(2e-6), 2 / (1 / 9 + 1 / 4)
    upper = 2 * stats.t.sf((0.01 - 0.002) / deviation, freedom)
    found = against(0.2, 0.002)
    assert (found["verdict"], found["p"]) == ("no difference", pytest.approx(upper))
    lower = stats.t.sf((0.01 - 0.004) / deviation, freedom)
    found = against(0.2, -0.004)
    assert (found["verdict"], found["p"]) == ("no difference", pytest.approx(lower))


def test_the_best_rival_of_a_wide_noise_floor_is_undecided_up_to_it():
    """The floor of 0.05 hides a difference of 0.03, and p never passes one."""
    wide = {"gaps": ((0.05, 0.0, 9.0),)}
    found = against(0.03, 0.03, **wide)
    assert (found["p"], found["noise"], found["closest"]) == (1.0, 0.05, 0)
    mean = inference.against_best([[difference(0.03, **wide)], [difference(0.031)]])
    assert (mean["noise"], mean["p"]) == (0.05, 1.0)
    freedom, deviation = 2 / (1 / 9 + 1 / 4), math.sqrt(2e-6)
    for value, verdict in ((0.056, "better"), (-0.056, "worse")):
        found = against(value, **wide)
        assert found["verdict"] == verdict
        assert found["p"] == pytest.approx(2 * stats.t.sf(0.006 / deviation, freedom))


def test_a_rival_of_unknown_noise_leaves_the_best_without_p():
    found = inference.against_best([[difference(0.2)], [difference(0.1, gaps=(None,))]])
    assert math.isnan(found["p"])
    assert (found["closest"], found["ratio"]) == (1, pytest.approx(math.exp(0.1)))


def test_things_are_grouped_in_the_order_they_come():
    assert inference.grouped([3, 1, 4, 5], lambda n: n % 2) == {1: [3, 1, 5], 0: [4]}
    assert list(inference.grouped([3, 1, 4, 5], lambda n: n % 2)) == [1, 0]

"""Check rows of verdicts.csv and claims.csv from few comparisons; each test is quick.

`make mutants` runs these tests. The numbers of a row come from `harness.summarize.inference`, which
test_inference_exact.py tests. The claims of a whole study are tested in test_comparisons.py.
"""

import math

import numpy as np
import pytest
from scipy.stats import f

from harness import stats
from harness.stats import Estimate, Interval
from harness.summarize import comparisons, inference, timings
from harness.summarize.comparisons import Comparison
from harness.summarize.inference import Difference, Offset, Offsets
from tests.support.synthetic import block

OURS, RIVAL = [2.0, 4.0, 2.0, 4.0, 2.0], [6.0, 4.0, 6.0, 16.0, 8.0]
KNOWN = Offsets([3.0, 300.0], [Estimate(0.5, 0.0, 9.0)] * 2)


def study(*rows):
    return timings.group(rows)


def timed(impl, times=OURS, **other):
    return [block(number, impl, time, **other) for number, time in enumerate(times)]


def key(case="N1", pass_="forward", op="add"):
    return (op, case, "float32", pass_)


def compared(case="N1", log=0.1, baseline="rival", pass_="forward", op="add", **other):
    ratio = Interval(math.exp(log), math.exp(log) / 1.5, math.exp(log) * 1.25)
    gaps = (Estimate(0.001, 1e-6, 9.0),)
    difference = Difference(Estimate(log, 1e-6, 9.0), Offset(4e-6, 40.0, 4.0), gaps)
    return Comparison(key(case, pass_, op), "vector", baseline, ratio, difference, **other)


def test_a_gap_is_over_the_blocks_that_both_have():
    rivals = study(*timed("ours"), *timed("rival", RIVAL[:4]))[key("N1024")]
    log = stats.log_ratio(RIVAL[:4], OURS[:4])
    assert comparisons.gap(rivals, "rival") == log
    assert comparisons.gap(rivals, "other") is None
    assert comparisons.gap({"rival": rivals["rival"]}, "rival") is None
    apart = study(*timed("ours"), block(9, "rival", 3.0))[key("N1024")]
    assert comparisons.gap(apart, "rival") is None


def test_noise_is_that_of_cells_with_a_twin():
    found = comparisons.noise(
        study(
            *timed("ours", case="N1"), *timed("rival", case="N1"),
            *timed("ours", case="N2"), *timed("ours_twin", RIVAL, case="N2"),
            *timed("ours_twin", case="N3"),
        )
    )  # fmt: skip
    assert found == {key("N2"): (2.0, stats.log_ratio(RIVAL, OURS))}


def several(impl, *by_process, **other):
    """Return rows of processes that ran the same blocks."""
    return [
        row | {"process": process}
        for process, times in enumerate(by_process)
        for row in timed(impl, times, **other)
    ]


def test_a_block_of_several_processes_has_their_geometric_mean():
    rows = several("ours", [2.0, 8.0, 5.0], [8.0, 2.0])
    rows[0] |= {"call_us": 9.0}
    rows[-1] |= {"call_us": 7.0}
    cell = study(*rows)[key("N1024")]["ours"]
    # The second process lacks the last block.
    assert cell.times() == {0: pytest.approx(4.0), 1: pytest.approx(4.0)}
    assert (cell.processes, cell.least("call_us"), cell.least("device_us")) == (2, 7.0, 2.0)
    one = study(*several("ours", [3.3]))[key("N1024")]["ours"]
    assert one.times() == {0: 3.3} and one.processes == 1
    # A process whose times are all impossible contributes nothing.
    fast = [row | {"status": "impossible"} for row in rows if row["process"]]
    rest = study(*(row for row in rows if not row["process"]), *fast)[key("N1024")]["ours"]
    assert rest.times() == {0: 2.0, 1: 8.0, 2: 5.0}
    assert rest.processes == 1 and rest.spread() is None
    failed = study(*rows, rows[0] | {"status": "crashed"})[key("N1024")]["ours"]
    assert failed.times() == {} and failed.least("call_us") is None


def test_gaps_between_means_are_widened_to_those_between_processes():
    """Four processes of ours and one of the twin have 2 / (1/4 + 1) of the variance."""
    rows = [*several("ours", *[OURS] * 4), *several("ours_twin", RIVAL)]
    ((length, found),) = comparisons.noise(study(*rows)).values()
    log = stats.log_ratio(RIVAL, OURS)
    assert length == 2.0 and found.freedom == log.freedom
    assert found.value == pytest.approx(math.sqrt(1.6) * log.value)
    assert found.variance == pytest.approx(1.6 * log.variance)
    assert comparisons.processes(study(*rows)) == {key("N1024"): 4}
    assert comparisons.processes(study(*timed("rival"))) == {}


def in_processes(impl, case, *levels):
    """Rows of as many processes as there are levels, five blocks each."""
    return [
        block(number, impl, level * (1 + 0.001 * number), case=case, process=process)
        for process, level in enumerate(levels)
        for number in range(5)
    ]


# One process of ours is slow in N1, and three of the twin.
STEADY, SLOW = 2.0, 2.4
ODD = ((STEADY, STEADY, STEADY, SLOW), (STEADY, SLOW, SLOW, SLOW))


@pytest.fixture
def mixed():
    """A study of cells whose twins differ by 1 %, and of one whose kernel has two speeds."""
    rows = []
    for number in range(40):
        twin = [time * (1.01 if number % 2 else 0.99) for time in OURS]
        case = f"N{number + 2}"
        rows += [*timed("ours", case=case), *timed("ours_twin", twin, case=case)]
    for impl, levels in zip(("ours", "ours_twin"), ODD, strict=True):
        rows += in_processes(impl, "N1", *levels)
    even = in_processes("ours", "N100", *[STEADY] * 4)
    even += in_processes("ours_twin", "N100", *[2.01] * 4)
    alone = timed("ours", case="N200") + in_processes("ours_twin", "N200", *ODD[1])
    return study(*rows, *even, *alone)


def odd_offset():
    within = np.var(np.log1p(0.001 * np.arange(5)), ddof=1) / 5
    between = np.mean([np.var(np.log(levels), ddof=1) for levels in ODD])
    return between, within


def test_a_kernel_of_two_speeds_has_an_offset_of_its_own(mixed):
    between, within = odd_offset()
    gaps = comparisons._gaps(mixed)
    found = comparisons.unsteady(mixed, gaps)
    assert found == {key("N1"): (pytest.approx(2 * (between - within)), 6.0, 6.0)}
    assert all(isinstance(part, float) for part in found[key("N1")])
    steady = comparisons.noise(mixed)
    assert list(steady) == [each for each in gaps if each != key("N1")] and len(steady) == 42
    learned = comparisons.known(mixed)
    assert learned.of(key("N1")).at(1e6) == found[key("N1")]
    assert learned.of(key("N2")).at(2.0) == inference.known(steady).at(2.0)


def test_a_cell_is_unsteady_by_the_f_test(mixed, monkeypatch):
    between, within = odd_offset()
    gaps = comparisons._gaps(mixed)
    alone = inference.known(gaps).alone(gaps[key("N1")][0])
    p = f.sf(between / (alone.variance + within), 6, alone.freedom)
    assert 0 < p < comparisons.UNSTEADY == 1e-4
    monkeypatch.setattr(comparisons, "UNSTEADY", p * 1.001)
    assert key("N1") in comparisons.unsteady(mixed, gaps)
    monkeypatch.setattr(comparisons, "UNSTEADY", p * 0.999)
    assert comparisons.unsteady(mixed, gaps) == {}
    monkeypatch.setattr(f, "sf", lambda *_: comparisons.UNSTEADY)
    assert comparisons.unsteady(mixed, gaps) == {}


def test_processes_of_unlike_number_count_by_their_freedom(mixed):
    """Two processes of ours have one degree of freedom, and four of the twin have three."""
    rows = in_processes("ours", "N1", STEADY, SLOW) + in_processes("ours_twin", "N1", *ODD[1])
    steady = {each: cells for each, cells in mixed.items() if each != key("N1")}
    both = steady | study(*rows)
    found = comparisons.unsteady(both, comparisons._gaps(both))[key("N1")]
    two, four = (np.var(np.log(levels), ddof=1) for levels in ((STEADY, SLOW), ODD[1]))
    between = (two + 3 * four) / 4
    assert found == (pytest.approx(2 * (between - odd_offset()[1])), 4.0, 4.0)


def test_without_any_scatter_no_cell_is_unsteady():
    rows = [block(n, impl, 2.0, case="N1", process=p)
            for impl in ("ours", "ours_twin") for p in range(4) for n in range(5)]  # fmt: skip
    found = study(*rows)
    assert comparisons.unsteady(found, comparisons._gaps(found)) == {}


def test_the_offset_of_a_comparison_in_an_unsteady_cell_is_its_own(mixed):
    rival = study(*in_processes("ours", "N1", *ODD[0]), *in_processes("rival", "N1", *[9.0] * 4))
    mixed[key("N1")]["rival"] = rival[key("N1")]["rival"]
    (one,) = comparisons.comparisons(mixed)
    assert one.key == key("N1")
    between, within = odd_offset()
    assert one.difference.offset == (pytest.approx((between - within) / 2), 6.0, 6.0)
    own = inference.OwnOffset(Offset(2 * (between - within), 6.0, 6.0))
    rivals = mixed[key("N1")]
    expected = timings.ratio(rivals["rival"], rivals["ours"], own)
    assert one.ratio == tuple(map(pytest.approx, expected))


def test_the_offset_of_a_comparison_is_that_of_its_processes():
    rows = [*several("ours", *[OURS] * 4), *several("rival", RIVAL, RIVAL)]
    (found,) = comparisons.comparisons(study(*rows), KNOWN)
    assert found.difference.offset == KNOWN.between(2.0, 4, 2)
    assert found.difference.offset.variance == pytest.approx(KNOWN.at(2.0).variance * 0.375)


def test_a_comparison_has_the_times_of_both_in_their_blocks():
    """The first cell has no time of ours; the second has a twin, the third has none."""
    second = [*timed("ours", case="N2"), *timed("ours_twin", case="N2")]
    rows = [
        *timed("rival", case="N1"),
        *(row | {"set": "drawn"} for row in (*second, *timed("rival", RIVAL, case="N2"))),
        *timed("ours", case="N3"), *timed("rival", RIVAL, case="N3"),
        *timed("ours", case="N4"), block(9, "another", 1.0, case="N4"),
        *timed("rival", RIVAL[:4], case="N4"), *timed("ours_twin", case="N4"),
    ]  # fmt: skip
    found = comparisons.comparisons(study(*rows), KNOWN)
    log, offset = stats.log_ratio(RIVAL, OURS), KNOWN.at(2.0)
    assert log.value == math.log(3)
    twin = stats.log_ratio(OURS, OURS)
    cell = study(*second, *timed("rival", RIVAL, case="N2"))[key("N2")]
    ratio = timings.ratio(cell["rival"], cell["ours"], KNOWN)
    assert found[:2] == [
        Comparison(
            key("N2"), "vector", "rival", ratio, Difference(log, offset, (twin,)), set="drawn"
        ),
        Comparison(
            key("N3"), "vector", "rival", ratio, Difference(log, offset, (inference.UNKNOWN,))
        ),
    ]
    assert [one.key for one in found] == [key("N2"), key("N3"), key("N4")]
    assert found[2].difference.gaps == (inference.UNKNOWN,)
    assert [one[-3:] for one in found[:2]] == [
        ("graph", "drawn", "headline"), ("graph", "grid", "headline"),
    ]  # fmt: skip


def test_as_many_blocks_as_it_takes_are_not_few():
    assert len(OURS) == stats.FEWEST_BLOCKS
    rows = [*timed("ours"), *timed("ours_twin", RIVAL), *timed("rival", RIVAL)]
    (found,) = comparisons.comparisons(study(*rows), KNOWN)
    assert found.difference.gaps == (stats.log_ratio(RIVAL, OURS),)


def test_offsets_are_those_of_the_study_unless_told():
    rows = [*timed("ours"), *timed("ours_twin", RIVAL), *timed("rival", RIVAL)]
    (found,) = comparisons.comparisons(study(*rows))
    assert found.difference.offset == inference.known(comparisons.noise(study(*rows))).at(2.0)
    assert found.difference.offset != KNOWN.at(2.0)


@pytest.mark.parametrize("slow", ["ours", "rival", "ours_twin", None])
def test_events_that_timed_either_are_the_clock_of_a_comparison(slow):
    rows = [
        row | {"reason": "events: why" if impl == slow else ""}
        for impl in ("ours", "ours_twin", "rival")
        for row in timed(impl)
    ]
    (found,) = comparisons.comparisons(study(*rows), KNOWN)
    assert found.clock == ("events" if slow in ("ours", "rival") else "graph")


def test_both_passes_in_one_call_are_training_where_each_is_timed_alone():
    rows = [
        row | {"pass": pass_}
        for pass_ in ("backward", "both")
        for impl in ("ours", "rival")
        for row in timed(impl)
    ]
    assert [one.part for one in comparisons.comparisons(study(*rows), KNOWN)] == [
        "headline",
        "training",
    ]


def test_a_row_of_verdicts_tells_one_cell():
    row, other = comparisons.verdict_rows([compared(set="drawn", part="training"), compared()])
    (judged,) = inference.judged([[compared().difference]])
    assert row == {
        "op": "add",
        "case": "N1",
        "dtype": "float32",
        "pass": "forward",
        "family": "vector",
        "set": "drawn",
        "part": "training",
        "baseline": "rival",
        "timed_by": "graph",
        "offset": 0.002,
        "ratio": math.exp(0.1),
        "ci_lo": math.exp(0.1) / 1.5,
        "ci_hi": math.exp(0.1) * 1.25,
        "noise": judged["noise"],
        "p": judged["p"],
        "p_holm": judged["p"],
        "verdict": "better",
        "note": "",
    }
    assert other == row | {"set": "grid", "part": "headline"}


def test_a_family_of_verdicts_is_that_of_op_set_and_part():
    lot = [
        compared(),
        compared("N2"),
        compared("N3"),
        compared(op="mul"),
        compared(set="drawn"),
        compared(part="training"),
    ]
    found = [row["p_holm"] / row["p"] for row in comparisons.verdict_rows(lot)]
    assert found == [3, 3, 3, 1, 1, 1]


def test_a_key_of_other_than_four_parts_is_refused():
    for parts in (("add", "N1", "float32"), (*key(), "more")):
        with pytest.raises(ValueError, match="zip"):
            comparisons.verdict_rows([compared()._replace(key=parts)])
    for claim in (("add", "vector", "forward", "rival"), (*key(), "graph", "more")):
        with pytest.raises(ValueError, match="zip"):
            comparisons._named(claim)


@pytest.mark.parametrize(
    ("ratio", "noted"), [(10, False), (0.1, False), (1, False), (10.01, True), (0.0999, True)]
)
def test_a_ratio_beyond_ten_is_noted(ratio, noted):
    one = compared()._replace(ratio=Interval(ratio, ratio, ratio))
    (row,) = comparisons.verdict_rows([one])
    said = "more than 10 times: see whether both do the same work"
    assert row["note"] == (said if noted else "")


# The columns that name a claim over two of the three cells offered.
CLAIM = {
    "part": "headline",
    "op": "add",
    "family": "vector",
    "pass": "forward",
    "baseline": "rival",
    "timed_by": "graph",
    "cells": 2,
    "of": 3,
    "note": "",
}
OFFERED = [key("N1"), key("N2"), key("N3"), key("N1", "backward"), key("N1", op="mul")]


def test_a_row_of_claims_is_the_mean_over_its_cells():
    two = [compared("N1", 0.1), compared("N2", 0.3)]
    row, back = comparisons.claim_rows([*two, compared("N1", 3.0, pass_="backward")], OFFERED)
    judged, _ = inference.judged([[one.difference for one in two], [compared(log=3.0).difference]])
    assert row == judged | CLAIM | {"against": "each", "rivals": 1}
    assert (back["pass"], back["cells"], back["of"]) == ("backward", 1, 1)
    assert "see whether" in back["note"]


def test_claims_are_told_apart_by_all_that_they_are_about():
    lot = [
        compared(),
        compared(baseline="other"),
        compared(clock="events"),
        compared(op="mul"),
        compared()._replace(family="another"),
        compared(pass_="backward"),
        compared("N2"),
        compared("N3", set="drawn"),
    ]
    found = comparisons.members(lot)
    graph = ("add", "vector", "forward", "rival", "graph")
    assert {name: len(some) for name, some in found.items()} == {
        graph: 2,
        ("add", "vector", "forward", "other", "graph"): 1,
        (*graph[:4], "events"): 1,
        ("mul", *graph[1:]): 1,
        ("add", "another", *graph[2:]): 1,
        ("add", "vector", "backward", "rival", "graph"): 1,
    }


@pytest.mark.parametrize("rows", [comparisons.claim_rows, comparisons.best_rows])
def test_a_family_of_claims_is_a_part_of_the_study(rows):
    lot = [compared(), compared(op="mul"), compared(pass_="backward")]
    training = [compared("N2", part="training")]
    found = rows([*lot, *training], [*OFFERED, key("N2")])
    assert [row["p_holm"] / row["p"] for row in found] == [3, 3, 3, 1]
    assert [row["part"] for row in found] == ["headline"] * 3 + ["training"]


def test_a_row_against_the_best_shows_the_rival_of_the_least_ratio():
    far, near = [compared("N1", 0.5, "far")], [compared("N1", 0.1), compared("N2", 0.3)]
    (row,) = comparisons.best_rows(
        [*far, *near, compared("N1", -0.5, "slow", clock="events")], OFFERED
    )
    judged = inference.against_best([[one.difference for one in some] for some in (far, near)])
    assert judged.pop("closest") == 1
    assert row == judged | CLAIM | {"against": "best", "rivals": 2, "p_holm": judged["p"]}
    assert row["verdict"] == "better"
    assert "see whether" in comparisons.best_rows([compared(log=3.0)], OFFERED)[0]["note"]


def test_a_claim_unsure_against_the_best_is_undecided(monkeypatch):
    limit = 1 - stats.CONFIDENCE
    found = {"closest": 0, "ratio": 1.0, "p": limit, "verdict": "worse"}
    monkeypatch.setattr(inference, "against_best", lambda members: dict(found))
    assert comparisons.best_rows([compared()], OFFERED)[0]["verdict"] == "worse"
    found["p"] = limit + 1e-9
    assert comparisons.best_rows([compared()], OFFERED)[0]["verdict"] == "undecided"
    found["p"] = math.nan
    assert comparisons.best_rows([compared()], OFFERED)[0]["verdict"] == "undecided"

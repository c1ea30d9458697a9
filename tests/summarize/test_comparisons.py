"""Check the claims about made-up blocks whose true difference is known."""

import math
import zlib

import numpy as np
import pytest

from harness import stats
from harness.results import raw
from harness.summarize import comparisons, timings
from tests.support.synthetic import block


def study_of(*rows):
    return comparisons.comparisons(
        {key: timings.counted(rivals, {}) for key, rivals in timings.group(rows).items()}
    )


def trace(factor, impl, blocks=10, seed=0, **other):
    """Return blocks of around 100 us times a factor, with a scatter of 0.1 %."""
    rng = np.random.default_rng([seed, zlib.crc32(impl.encode())])
    times = 100 * factor * np.exp(rng.normal(0, 0.001, blocks))
    return [block(number, impl, time, **other) for number, time in enumerate(times)]


def study(factor, cells=12, **other):
    """Return ours, its twin and a baseline `factor` times as slow, in so many cells."""
    rows = []
    for number in range(cells):
        place = {"case": f"N{number + 1}", "seed": number}
        rows += trace(1, "ours", **place, **other) + trace(1, "ours_twin", **place, **other)
        rows += trace(factor, "torch_eager", **place, **other)
    return rows


def claim_of(rows):
    (row,) = comparisons.claim_rows(study_of(*rows), timings.group(rows))
    return row


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.5, "better"), (1.0, "no difference"), (0.9, "worse")]
)
def test_a_claim_is_the_geometric_mean_over_its_cells(factor, verdict):
    row = claim_of(study(factor))
    assert (row["cells"], row["of"], row["verdict"]) == (12, 12, verdict)
    assert row["ci_lo"] < factor < row["ci_hi"]
    ratios = [one.ratio.value for one in study_of(*study(factor))]
    assert row["ratio"] == pytest.approx(math.prod(ratios) ** (1 / len(ratios)))
    assert row["p_holm"] == row["p"] < 0.05
    assert 0 < row["noise"] < 0.01


def test_a_claim_of_ratios_that_cancel_is_no_advantage():
    """An arithmetic mean of 2 and 1/2 would call ours faster by a quarter."""
    rows = study(2.0, cells=1) + [row | {"case": "N7"} for row in study(0.5, cells=1)]
    assert claim_of(rows)["ratio"] == pytest.approx(1, rel=0.002)


def test_a_verdict_needs_the_twin_and_enough_blocks():
    rows = study(1.5, cells=3)
    assert {row["verdict"] for row in comparisons.verdict_rows(study_of(*rows))} == {"better"}
    alone = [row for row in rows if row["impl"] != "ours_twin"]
    short = study(1.5, cells=3, blocks=stats.FEWEST_BLOCKS - 1)
    for lacking in (alone, short):
        for row in [*comparisons.verdict_rows(study_of(*lacking)), claim_of(lacking)]:
            assert row["verdict"] == "undecided"
            assert row["ratio"] == pytest.approx(1.5, rel=0.01)
            assert math.isnan(row["p"])


def test_the_family_of_a_cell_is_its_op_and_that_of_a_claim_the_study():
    rows = study(1.013, cells=4)
    other = [row | {"op": "mul"} for row in study(1.013, cells=4)]
    alone, both = study_of(*rows), study_of(*rows, *other)
    one, two = comparisons.verdict_rows(alone), comparisons.verdict_rows(both)
    assert [row["p_holm"] for row in one] != [row["p"] for row in one]
    worst = max(one, key=lambda row: row["p"])
    assert worst["p_holm"] >= worst["p"]
    assert len(two) == 8
    first, second = comparisons.claim_rows(both, [one.key for one in both])
    assert max(first["p_holm"], second["p_holm"]) > min(first["p"], second["p"])
    assert min(first["p_holm"], second["p_holm"]) == pytest.approx(2 * min(first["p"], second["p"]))


def claims_of(rows):
    found = study_of(*rows)
    return {row["baseline"]: row for row in comparisons.claim_rows(found, timings.group(rows))}


def best_of(rows):
    (row,) = comparisons.best_rows(study_of(*rows), timings.group(rows))
    return row


def rivals(factors, blocks=10, cells=12, **other):
    """Return ours, its twin and several baselines, each slower by its factor."""
    rows = []
    for number in range(cells):
        place = {"case": f"N{number + 1}", "seed": number, "blocks": blocks} | other
        rows += trace(1, "ours", **place) + trace(1, "ours_twin", **place)
        for name, factor in factors.items():
            rows += trace(factor, name, **place)
    return rows


@pytest.mark.parametrize(
    ("factors", "verdict", "closest"),
    [
        ({"a": 1.5, "b": 1.2, "c": 3.0}, "better", "b"),
        ({"a": 1.5, "b": 0.9, "c": 3.0}, "worse", "b"),
        ({"a": 1.5, "b": 1.0, "c": 3.0}, "no difference", "b"),
        ({"a": 1.5, "b": 1.01, "c": 3.0}, "undecided", "b"),
    ],
)
def test_the_best_rival_decides_over_all_cells(factors, verdict, closest):
    row = best_of(rivals(factors))
    assert (row["against"], row["verdict"], row["baseline"]) == ("best", verdict, closest)
    assert (row["rivals"], row["cells"], row["of"]) == (3, 12, 12)
    assert row["ci_lo"] < factors[closest] < row["ci_hi"]
    each = claims_of(rivals(factors))
    assert row["ratio"] == each[closest]["ratio"]
    # Ours is better than the best only if better than each, and never surer than of the closest.
    if verdict == "better":
        assert row["p"] == pytest.approx(max(one["p"] for one in each.values()), rel=1e-3) or (
            row["p"] > max(one["p"] for one in each.values())
        )


def test_a_rival_without_a_known_difference_leaves_the_best_undecided():
    rows = rivals({"a": 1.5})
    few = [row for row in rivals({"b": 1.9}, cells=1) if row["impl"] == "b" and row["block"] < 3]
    row = best_of([*rows, *few])
    assert (row["verdict"], row["baseline"]) == ("undecided", "a")
    assert math.isnan(row["p"])


def test_the_best_of_many_equal_rivals_is_seldom_called_worse():
    """The smallest of twenty ratios is below one by chance; their number is corrected for."""
    verdicts = [
        best_of(rivals({f"r{n}": 1.0 for n in range(20)}, cells=3, op=f"op{seed}"))["verdict"]
        for seed in range(8)
    ]
    assert "worse" not in verdicts and "better" not in verdicts


def test_claims_against_the_best_are_a_family_of_their_own():
    one = rivals({"a": 1.016}, cells=2)
    two = [row | {"op": "mul"} for row in rivals({"a": 1.3, "b": 1.5}, cells=2)]
    found = comparisons.best_rows(study_of(*one, *two), timings.group([*one, *two]))
    assert [row["op"] for row in found] == ["add", "mul"]
    worst = max(found, key=lambda row: row["p"])
    least = min(found, key=lambda row: row["p"])
    assert least["p_holm"] == pytest.approx(2 * least["p"])
    assert worst["p_holm"] == worst["p"]


def test_cells_that_events_timed_are_claims_of_their_own_and_no_best_rival():
    rows = rivals({"a": 1.5, "b": 1.3})
    for row in rows:
        if row["impl"] == "b" and row["case"] in ("N1", "N2"):
            row["reason"] = "events: throttled too"
    found = comparisons.claim_rows(study_of(*rows), timings.group(rows))
    clocks = {(row["baseline"], row["timed_by"]): row["cells"] for row in found}
    assert clocks == {("a", "graph"): 12, ("b", "graph"): 10, ("b", "events"): 2}
    said = comparisons.verdict_rows(study_of(*rows))
    by_events = {row["case"] for row in said if row["timed_by"] == "events"}
    assert by_events == {"N1", "N2"}
    assert (best_of(rows)["baseline"], best_of(rows)["cells"]) == ("b", 10)
    every = [row | {"reason": "events:"} if row["impl"] == "b" else row for row in rows]
    assert (best_of(every)["baseline"], best_of(every)["rivals"]) == ("a", 1)


def test_drawn_shapes_make_no_claim_and_are_a_family_of_their_own():
    grid, drawn = rivals({"a": 1.013}, cells=4), rivals({"a": 1.5}, cells=2)
    drawn = [row | {"set": "drawn", "case": f"{row['case']}7"} for row in drawn]
    both = study_of(*grid, *drawn)
    said = comparisons.verdict_rows(both)
    assert {row["set"] for row in said} == {"grid", "drawn"}
    alone = {row["case"]: row["p_holm"] for row in comparisons.verdict_rows(study_of(*drawn))}
    least = {row["case"]: row["p_holm"] / row["p"] for row in said if row["set"] == "drawn"}
    assert set(least) == set(alone) and max(least.values()) <= 2
    (row,) = comparisons.claim_rows(both, timings.group(grid))
    assert (row["cells"], row["of"]) == (4, 4)
    assert row["ratio"] == pytest.approx(1.013, rel=0.002)


def test_processes_that_differ_in_every_cell_leave_a_difference_undecided():
    """Each process has an offset of 2 %; its blocks agree to 0.1 %, which must not count."""
    rng = np.random.default_rng(4)
    rows = []
    for number in range(30):
        for impl in ("ours", "ours_twin", "torch_eager"):
            offset = float(np.exp(rng.normal(0, 0.02)))
            rows += trace(offset, impl, case=f"N{number + 1}", seed=number)
    found = comparisons.verdict_rows(study_of(*rows))
    assert sum(abs(math.log(row["ratio"])) > 0.02 for row in found) > 5
    assert {row["verdict"] for row in found} == {"undecided"}
    assert all(0.01 < row["offset"] < 0.06 for row in found)


def test_a_failed_cell_is_missing_from_the_mean_and_told():
    rows = study(1.5)
    lost = [
        row
        for row in rows
        if (row["case"], row["impl"]) not in {("N3", "torch_eager"), ("N4", "ours")}
    ]
    oom = dict.fromkeys(raw.HEADER) | rows[0]
    lost.append(oom | {"case": "N3", "impl": "torch_eager", "device_us": None, "status": "oom"})
    lost.append(oom | {"case": "N4", "impl": "ours", "device_us": None, "status": "hung"})
    row = claim_of(lost)
    assert (row["cells"], row["of"]) == (10, 12)
    assert row["ratio"] == pytest.approx(1.5, rel=0.01)
    summary = [one for found in timings.group(lost).values() for one in timings.summary(found, {})]
    statuses = {(one["case"], one["impl"]): one["status"] for one in summary}
    assert statuses["N3", "torch_eager"] == "oom"
    assert statuses["N4", "ours"] == "hung"
    assert len(summary) == 36


def test_an_impossible_time_is_compared_with_nothing():
    rows = study(1.5, cells=2)
    swift = [row for row in rows if row["impl"] == "torch_eager" and row["case"] == "N1"]
    for row in rows:
        row["bytes_read"] = row["bytes_written"] = 8 * 10**9 if row in swift else 8000
    found = timings.group(rows)
    limits = {"read": 4400.0, "write": 4000.0}
    counted = {key: timings.counted(rivals, limits) for key, rivals in found.items()}
    assert "torch_eager" not in counted["add", "N1", "float32", "forward"]
    (only,) = comparisons.comparisons(counted)
    assert only.key[1] == "N2"
    ours = timings.summary(found["add", "N1", "float32", "forward"], limits)[0]
    assert "speedup_vs_torch_eager" not in ours


def test_a_ratio_beyond_ten_is_flagged():
    (far,) = comparisons.verdict_rows(study_of(*study(12.0, cells=1)))
    (near,) = comparisons.verdict_rows(study_of(*study(9.0, cells=1)))
    assert "see whether both do the same work" in far["note"]
    assert near["note"] == ""

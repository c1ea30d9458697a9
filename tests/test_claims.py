"""What is claimed of made-up blocks whose answer is known."""

import math
import zlib

import numpy as np
import pytest
from synthetic import block

from harness import cells, claims, raw, statistics


def study_of(*rows):
    return claims.comparisons(
        {key: cells.counted(rivals, {}) for key, rivals in cells.group(rows).items()}
    )


def trace(factor, impl, blocks=10, seed=0, **other):
    """Blocks of around 100 us times a factor, with a scatter of 0.1 %."""
    rng = np.random.default_rng([seed, zlib.crc32(impl.encode())])
    times = 100 * factor * np.exp(rng.normal(0, 0.001, blocks))
    return [block(number, impl, time, **other) for number, time in enumerate(times)]


def study(factor, cells=12, **other):
    """Ours, its twin and a baseline `factor` as slow, in as many cells."""
    rows = []
    for number in range(cells):
        place = {"case": f"N{number + 1}", "seed": number}
        rows += trace(1, "ours", **place, **other) + trace(1, "ours_twin", **place, **other)
        rows += trace(factor, "torch_eager", **place, **other)
    return rows


def claim_of(rows):
    (row,) = claims.claim_rows(study_of(*rows), cells.group(rows))
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
    assert {row["verdict"] for row in claims.verdict_rows(study_of(*rows))} == {"better"}
    alone = [row for row in rows if row["impl"] != "ours_twin"]
    short = study(1.5, cells=3, blocks=statistics.FEWEST_BLOCKS - 1)
    for lacking in (alone, short):
        for row in [*claims.verdict_rows(study_of(*lacking)), claim_of(lacking)]:
            assert row["verdict"] == "undecided"
            assert row["ratio"] == pytest.approx(1.5, rel=0.01)
            assert math.isnan(row["p"])


def test_the_family_of_a_cell_is_its_op_and_that_of_a_claim_the_study():
    rows = study(1.013, cells=4)
    other = [row | {"op": "mul"} for row in study(1.013, cells=4)]
    alone, both = study_of(*rows), study_of(*rows, *other)
    one, two = claims.verdict_rows(alone), claims.verdict_rows(both)
    assert [row["p_holm"] for row in one] != [row["p"] for row in one]
    worst = max(one, key=lambda row: row["p"])
    assert worst["p_holm"] >= worst["p"]
    assert len(two) == 8
    first, second = claims.claim_rows(both, [one.key for one in both])
    assert max(first["p_holm"], second["p_holm"]) > min(first["p"], second["p"])
    assert min(first["p_holm"], second["p_holm"]) == pytest.approx(2 * min(first["p"], second["p"]))


def test_processes_that_differ_in_every_cell_leave_a_difference_undecided():
    """Each process has an offset of 2 %, its blocks agree to 0.1 %: blocks are not the evidence."""
    rng = np.random.default_rng(4)
    rows = []
    for number in range(30):
        for impl in ("ours", "ours_twin", "torch_eager"):
            offset = float(np.exp(rng.normal(0, 0.02)))
            rows += trace(offset, impl, case=f"N{number + 1}", seed=number)
    found = claims.verdict_rows(study_of(*rows))
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
    summary = [one for found in cells.group(lost).values() for one in cells.summary(found, {})]
    statuses = {(one["case"], one["impl"]): one["status"] for one in summary}
    assert statuses["N3", "torch_eager"] == "oom"
    assert statuses["N4", "ours"] == "hung"
    assert len(summary) == 36


def test_an_impossible_time_is_compared_with_nothing():
    rows = study(1.5, cells=2)
    swift = [row for row in rows if row["impl"] == "torch_eager" and row["case"] == "N1"]
    for row in rows:
        row["bytes_read"] = row["bytes_written"] = 8 * 10**9 if row in swift else 8000
    found = cells.group(rows)
    limits = {"read": 4400.0, "write": 4000.0}
    counted = {key: cells.counted(rivals, limits) for key, rivals in found.items()}
    assert "torch_eager" not in counted["add", "N1", "float32", "forward"]
    (only,) = claims.comparisons(counted)
    assert only.key[1] == "N2"
    ours = cells.summary(found["add", "N1", "float32", "forward"], limits)[0]
    assert "speedup_vs_torch_eager" not in ours


def test_a_ratio_beyond_ten_is_flagged():
    (far,) = claims.verdict_rows(study_of(*study(12.0, cells=1)))
    (near,) = claims.verdict_rows(study_of(*study(9.0, cells=1)))
    assert "see whether both do the same work" in far["note"]
    assert near["note"] == ""

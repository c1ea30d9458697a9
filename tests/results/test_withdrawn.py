"""Check that exactly the verdicts that rest on a mended fault of the rules are withdrawn."""

import json
from pathlib import Path

import pytest

from harness.results import reports, withdrawn
from harness.summarize import capabilities, tables

RECORDED = Path(__file__).parents[2] / "results/recorded/hopper/verify"
MISCOUNT = "writes past the end of an output of 2 bytes"
BAND = "writes past the end of an output or a workspace of 2 bytes"
FAR = "dx has inf or NaN where the oracle has none, or none where it has"


def cell(status="ok", reason="", case="M0-V64", tensors=()):
    same = {"case": case, "dtype": "float16", "pass": "both", "kind": "edge"}
    return same | {"status": status, "reason": reason, "tensors": list(tensors)}


def report(*cells, op="cross_entropy", **more):
    found = {"op": op, "impl": "lib", "impl_version": "1", "mode": "gpu"}
    return found | {"status": "inaccurate", "reason": "as it was", "cells": list(cells), **more}


@pytest.mark.parametrize(
    ("op", "reason", "version", "status"),
    [
        ("cross_entropy", MISCOUNT, {}, "withdrawn"),
        ("cross_entropy", MISCOUNT, {"guard": 0}, "withdrawn"),
        ("cross_entropy", MISCOUNT, {"guard": 1}, "inaccurate"),
        ("matmul", BAND, {}, "inaccurate"),
        ("linear_cross_entropy", FAR, {}, "withdrawn"),
        ("linear_cross_entropy", FAR, {"guard": 1}, "inaccurate"),
        ("cross_entropy", FAR, {}, "inaccurate"),
    ],
)
def test_a_verdict_that_rests_on_a_mended_fault_is_withdrawn(op, reason, version, status):
    given = report(cell(), cell("inaccurate", reason, tensors=[{"ratio": None}]), op=op, **version)
    before = json.dumps(given)
    found = withdrawn.standing(given)
    assert json.dumps(given) == before
    assert [one["status"] for one in found["cells"]] == ["ok", status]
    if status == "withdrawn":
        shown = found["cells"][1]
        assert shown["reason"].endswith(f"the recorded verdict was: {reason}")
        assert shown["tensors"] == []
        assert (found["status"], found["reason"]) == ("ok", "")
    else:
        assert (found["status"], found["reason"]) == ("inaccurate", "as it was")


GRADIENT = "M4096-H2048-V32000"


@pytest.mark.parametrize(
    ("place", "version", "status"),
    [
        ({"case": GRADIENT}, {}, "withdrawn"),
        ({"case": GRADIENT}, {"guard": 1}, "ok"),
        ({"case": GRADIENT, "pass": "forward"}, {}, "ok"),
        ({"case": "M9-H25-V200-padded"}, {}, "ok"),
        ({"case": "M9-H26-V200-padded"}, {}, "withdrawn"),
        ({"case": "M4096-V32000"}, {}, "ok"),
        ({"case": GRADIENT, "op": "cross_entropy"}, {}, "ok"),
        ({"case": GRADIENT, "status": "unsupported", "reason": "no bias"}, {}, "unsupported"),
    ],
)
@pytest.mark.parametrize("impl", ["ours", "lib"])
def test_an_ok_within_bounds_that_were_too_wide_is_withdrawn(impl, place, version, status):
    op = place.get("op", "linear_cross_entropy")
    changed = {key: value for key, value in place.items() if key != "op"}
    given = report(cell(case="M1-H1-V1"), cell() | changed, op=op, impl=impl, **version)
    found = withdrawn.standing(given)
    assert [one["status"] for one in found["cells"]] == ["ok", status]
    if status == "withdrawn":
        assert found["cells"][1]["reason"].endswith("the recorded verdict was: ok")
        [counted] = tables.verification([found], {})
        assert (counted["cells"], counted["passed"]) == (1, 1)
        [row] = capabilities.rows([found], {})
        assert capabilities.state(row) == "unreached"


def test_no_recorded_verdict_rests_on_bounds_that_were_too_wide():
    """Such bounds let an ordinary result pass that is off by a tenth of its largest entry.

    If a rectifier's input is zero but for rounding, either slope is right, and a product with it
    moves some entries that far. The other norm then allows no more than one entry in 10,000 so.
    """
    blind = [
        (one["op"], one["impl"], each["case"])
        for one in reports.verified(RECORDED.iterdir())
        for each in one["cells"]
        if each["status"] == "ok" and not each["hostile"]
        if any(
            (tensor["bound_max"] or 0) > 0.1
            and not ("relu" in each["case"] and tensor["bound_rms"] < 0.003)
            for tensor in each["tensors"]
        )
    ]
    assert not blind


def test_the_next_fault_of_a_report_is_its_status():
    found = withdrawn.standing(report(cell("inaccurate", MISCOUNT), cell("crashed", "signal")))
    assert (found["status"], found["reason"]) == ("crashed", "M0-V64 float16 both: signal")


def test_no_fault_is_mended_by_rules_that_are_still_to_come():
    assert max(fault.mended for fault in withdrawn.FAULTS) == withdrawn.GUARD


def test_no_recorded_verdict_rests_on_a_miscount():
    found = reports.verified(RECORDED.iterdir())
    for one in found:
        for each in one["cells"]:
            assert "hostile" in each
            if one.get("guard", 0) < 1 and each["reason"].startswith(MISCOUNT[:37]):
                assert each["status"] == "withdrawn"
    eager = next(r for r in found if (r["op"], r["impl"]) == ("cross_entropy", "torch_eager"))
    assert not any(
        each["reason"].startswith("writes past") and each["status"] != "withdrawn"
        for each in eager["cells"]
    )

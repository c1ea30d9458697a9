"""Verdicts that rest on a mended fault of the rules are withdrawn, and no other."""

import json
from pathlib import Path

import pytest

from harness import guard, reports

RECORDED = Path(__file__).parents[1] / "results/recorded/h200/verify"
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
def test_what_rests_on_a_mended_fault_is_withdrawn(op, reason, version, status):
    given = report(cell(), cell("inaccurate", reason, tensors=[{"ratio": None}]), op=op, **version)
    before = json.dumps(given)
    found = guard.standing(given)
    assert json.dumps(given) == before
    assert [one["status"] for one in found["cells"]] == ["ok", status]
    if status == "withdrawn":
        shown = found["cells"][1]
        assert shown["reason"].endswith(f"the recorded verdict was: {reason}")
        assert shown["tensors"] == []
        assert (found["status"], found["reason"]) == ("ok", "")
    else:
        assert (found["status"], found["reason"]) == ("inaccurate", "as it was")


def test_of_a_report_with_other_faults_the_next_speaks():
    found = guard.standing(report(cell("inaccurate", MISCOUNT), cell("crashed", "signal")))
    assert (found["status"], found["reason"]) == ("crashed", "M0-V64 float16 both: signal")


def test_no_fault_is_mended_by_rules_that_are_still_to_come():
    assert max(fault.mended for fault in guard.FAULTS) == guard.GUARD


def test_the_recorded_run_accuses_nobody_by_a_miscount():
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

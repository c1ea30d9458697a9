"""Check which reports let a cell be timed, and the words of each refusal."""

import json

import pytest

from harness.calls.cell import Cell
from harness.cli import UserError
from harness.measure.gate import Gate, Verdict
from harness.results import parts
from ops._spec import make_case

CELL = Cell(make_case(M=4, N=8), "float16", "backward")
CODES = {"rival": "code", "ours": "code", "ours_twin": "code"}
OTHERS = (
    Cell(make_case(M=4, N=9), "float16", "backward"),
    Cell(make_case(M=4, N=8), "float32", "backward"),
    Cell(make_case(M=4, N=8), "float16", "forward"),
)
FOUND = {"case": "M4-N8", "dtype": "float16", "pass": "backward", "status": "ok", "reason": ""}
REPORT = {
    "op": "softmax", "impl": "rival",
    "status": "ok", "reason": "", "mode": "gpu", "impl_version": "1.2", "code_sha256": "code",
    "cells": [FOUND],
}  # fmt: skip


def gate(tmp_path, impls=("rival",), name="rival", **changed):
    path = tmp_path / "softmax" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(REPORT | changed))
    return Gate(tmp_path, "softmax", list(impls), CODES.get)


def test_a_verified_cell_passes(tmp_path):
    assert gate(tmp_path).verdict("rival", CELL) == Verdict("ok", "", "1.2")


@pytest.mark.parametrize("cell", OTHERS, ids=str)
def test_a_cell_passes_for_itself_alone(tmp_path, cell):
    found = gate(tmp_path).verdict("rival", cell)
    assert found == Verdict("inaccurate", "never verified", "1.2")


def test_the_twin_stands_on_the_report_of_ours(tmp_path):
    found = gate(tmp_path, ("ours", "ours_twin"), "ours")
    assert (
        found.verdict("ours_twin", CELL) == found.verdict("ours", CELL) == Verdict("ok", "", "1.2")
    )


@pytest.mark.parametrize("status", ["inaccurate", "unsupported", "oom", "crashed"])
def test_a_cell_that_is_not_right_keeps_its_status_and_reason(tmp_path, status):
    cell = FOUND | {"status": status, "reason": "why"}
    report = gate(tmp_path, status=status, reason="M4-N8: why", cells=[cell])
    assert report.verdict("rival", CELL) == Verdict(status, "why", "1.2")
    assert report.verdict("rival", OTHERS[0]) == Verdict(status, "M4-N8: why", "1.2")


def test_a_cell_beyond_the_time_limit_hangs(tmp_path):
    cell = FOUND | {"status": "unreached", "reason": "time limit of 45 s"}
    report = gate(tmp_path, status="unreached", cells=[cell])
    said = "not verified within the time limit of 45 s"
    assert report.verdict("rival", CELL) == Verdict("hung", said, "1.2")
    assert report.verdict("rival", OTHERS[0]) == Verdict("inaccurate", "never verified", "1.2")


def test_a_cell_of_another_part_does_not_hang_and_is_not_timed(tmp_path):
    left = FOUND | {"status": "unreached", "reason": parts.ELSEWHERE}
    late = FOUND | {"case": "M4-N9", "status": "unreached", "reason": "time limit of 45 s"}
    report = gate(tmp_path, cells=[left, late])
    assert report.verdict("rival", CELL) == Verdict("unreached", parts.ELSEWHERE, "1.2")
    report.refuse_elsewhere(OTHERS)
    with pytest.raises(UserError, match=r"rival\.json: leaves M4-N8 float16 backward, which"):
        report.refuse_elsewhere([*OTHERS, CELL])


def test_absent_words_are_empty(tmp_path):
    cell = FOUND | {"reason": None}
    assert gate(tmp_path, impl_version=None, cells=[cell]).verdict("rival", CELL).reason == ""
    assert gate(tmp_path, impl_version=None).verdict("rival", CELL).impl_version == ""


def test_an_absent_library_needs_no_gpu(tmp_path):
    absent = {"status": "unavailable", "reason": "not installed", "mode": "cpu", "cells": []}
    found = gate(tmp_path, **absent).verdict("rival", CELL)
    assert found == Verdict("unavailable", "not installed", "1.2")


REMEDY = "python -m harness.verify --op softmax"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mode": "interpreter"}, f"made without a GPU; make it with {REMEDY} on the machine"),
        ({"mode": "cpu", "status": "inaccurate"}, "made without a GPU"),
        ({"code_sha256": "old"}, f"is of other code or another version .*{REMEDY} --impl rival"),
        ({"code_sha256": "old", "status": "unavailable"}, "is of other code"),
    ],
)
def test_a_report_that_proves_nothing_here_is_refused(tmp_path, changed, words):
    with pytest.raises(UserError, match=f"softmax/rival.json: .*{words}"):
        gate(tmp_path, **changed)


def test_the_refused_report_of_the_twin_is_that_of_ours(tmp_path):
    with pytest.raises(UserError, match=r"--impl ours --out .*ours\.json"):
        gate(tmp_path, ("ours_twin",), "ours", code_sha256="old")


def test_a_missing_report_is_named_with_its_remedy(tmp_path):
    with pytest.raises(UserError, match=rf"rival\.json.*{REMEDY}"):
        Gate(tmp_path, "softmax", ["rival"], str)


@pytest.mark.parametrize("key", REPORT)
def test_a_report_without_a_field_is_refused(tmp_path, key):
    path = tmp_path / "softmax" / "rival.json"
    path.parent.mkdir()
    path.write_text(json.dumps({name: value for name, value in REPORT.items() if name != key}))
    with pytest.raises(UserError, match=rf"rival\.json.*{REMEDY}"):
        Gate(tmp_path, "softmax", ["rival"], CODES.get)

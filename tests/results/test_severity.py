"""Check which cell of a report speaks for it; `make mutants` runs these tests."""

import pytest

from harness.results import severity
from harness.results.severity import SEVERITY
from harness.status import SILENT


def cell(status, *ratios, case="N1", reason=""):
    tensors = [{"ratio": ratio} for ratio in ratios]
    found = {"case": case, "dtype": "float32", "pass": "forward", "status": status}
    return found | {"reason": reason} | ({"tensors": tensors} if ratios else {})


@pytest.mark.parametrize("status", [each for each in SEVERITY if each not in SILENT])
def test_the_worst_status_that_tells_something_speaks(status):
    here = SEVERITY.index(status)
    better = [cell(each, 9.0) for each in SEVERITY[:here]]
    silent = [cell(each, 9.0) for each in SILENT]
    found = cell(status, 0.5)
    for cells in ([found, *better, *silent], [*silent, *better, found]):
        assert severity.worst(cells) is found


def test_a_silent_cell_speaks_if_no_other_one_does():
    cells = [cell(each) for each in SEVERITY if each in SILENT]
    assert severity.worst(cells[::-1]) is cells[-1]


def test_the_largest_ratio_of_the_worst_status_speaks_and_null_is_infinite():
    small, large = cell("ok", 0.1, 0.4), cell("ok", 0.5, 0.2)
    assert severity.worst([small, large]) is large
    assert severity.worst([large, small]) is large
    endless = cell("ok", 0.1, None)
    assert severity.worst([large, endless, small]) is endless
    assert severity.worst([cell("ok"), small]) is small
    first = cell("ok", 0.0, case="N2")
    assert severity.worst([first, cell("ok")]) is first
    assert severity.worst([cell("ok", 1.0), first, cell("ok", 2.0)])["tensors"] == [{"ratio": 2.0}]


def test_a_cell_without_tensors_has_no_error():
    bare, negative = cell("ok", case="N3"), cell("ok", -0.1)
    assert severity.worst([negative, bare]) is bare
    assert severity.worst([bare, cell("ok", 0.5)])["case"] == "N1"


def test_a_report_has_the_status_and_reason_of_its_worst_cell():
    assert severity.overall([]) == {
        "status": "unsupported",
        "reason": "no case in these dtypes and passes",
    }
    fine = cell("ok", reason="not said")
    assert severity.overall([fine]) == {"status": "ok", "reason": ""}
    wrong = cell("inaccurate", 2.0, case="N7", reason="dx is NaN")
    assert severity.overall([fine, wrong]) == {
        "status": "inaccurate",
        "reason": "N7 float32 forward: dx is NaN",
    }

"""Check that a fault in verification becomes a status, and that the next cell is verified."""

import re

import pytest

from tests.support import faults
from tests.support.patience import PATIENCE_S
from tests.support.verifying import verify

# For each size: status and reason of a baseline, then of ours if they differ.
EXPECTED = {
    100: ("ok", ""),
    101: ("unsupported", "not this size", "crashed"),
    102: ("inaccurate", "out is .* times as far"),
    103: ("inaccurate", "out has inf or NaN"),
    104: ("inaccurate", "out has inf or NaN"),
    105: ("inaccurate", "writes past the end of an output or a workspace of 420 bytes"),
    106: ("inaccurate", "in a later call out is|out differs between two calls"),
    107: ("inaccurate", "out is .* times as far"),
    108: ("inaccurate", "out lies in the memory of the input x"),
    109: ("inaccurate", "changes its inputs"),
    110: ("inaccurate", "out is .* times as far"),
    111: ("inaccurate", "out "),
    112: ("ok", ""),
    113: ("oom", ".*can't allocate memory"),
    114: ("oom", ".*can't allocate memory"),
    115: ("crashed", "exited with code 3"),
    116: ("crashed", "exited with code 0"),
    117: ("crashed", "died by SIGSEGV"),
    118: ("crashed", "died by SIGKILL"),
    120: ("ok", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["suspect", "ours"])
def test_every_fault_is_named_and_the_others_go_on(tree, impl):
    limit = ("--cell-timeout-s", str(PATIENCE_S))
    done, report = verify(tree, "faulty", impl, "--dtypes", "float32", *limit)
    assert done.returncode == (impl == "ours"), done.stderr
    cells = {int(cell["case"][1:]): cell for cell in report["cells"]}
    assert list(cells) == list(EXPECTED) == [n for n in faults.FAULTS if n != faults.HANGS]
    for size, (status, reason, *status_of_ours) in EXPECTED.items():
        cell = cells[size]
        expected = status_of_ours[0] if impl == "ours" and status_of_ours else status
        assert (cell["status"], size) == (expected, size)
        assert re.match(reason, cell["reason"]), cell
        repeated = {"ok": True, "inaccurate": False if size == 106 else None}
        assert cell["deterministic"] is repeated.get(status)
    assert len(done.stderr) < faults.MEGABYTES * 2**20


@pytest.mark.slow
def test_a_hanging_worker_is_given_up_and_the_next_cell_goes_on(tree):
    limit = ("--cell-timeout-s", "20")
    done, report = verify(tree, "stuck", "suspect", "--dtypes", "float32", *limit)
    assert done.returncode == 0, done.stderr
    cells = [(cell["status"], cell["reason"]) for cell in report["cells"]]
    assert cells == [("hung", "no answer within 20 s"), ("ok", "")]
    case = report["cells"][0]["case"]
    assert f"verify stuck suspect: {case} float32: hung: no answer within 20 s" in done.stderr

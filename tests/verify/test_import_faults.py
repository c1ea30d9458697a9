"""Check that a file or library that fails at import costs its own rows and no others."""

import json
import subprocess
import sys

import pytest

from harness.cli import UserError
from harness.measure.gate import Gate
from harness.project.source_tree import ops
from tests.support.verifying import verify

BASELINE = '\nLIBRARY = "torch"\n\n\ndef double(x):\n    return x + x\n'
# For each module: its behaviour at import, then the status and reason of its report.
AT_IMPORT = {
    "segfaults": ("import os\nos.kill(os.getpid(), 11)", "crashed", "died by SIGSEGV"),
    "exits": ("import sys\nsys.exit(3)", "crashed", "exited with code 3"),
    "leaves": ("import os\nos._exit(0)", "crashed", "exited with code 0"),
    "interrupts": ("raise KeyboardInterrupt", "crashed", "died by SIGINT"),
}


@pytest.mark.parametrize("name", AT_IMPORT)
def test_a_library_that_ends_its_process_as_it_is_imported_is_a_row(tree, name):
    text, status, reason = AT_IMPORT[name]
    (tree / f"baselines/{name}.py").write_text(text + BASELINE)
    done, report = verify(tree, "double", name, "--dtypes", "float32")
    assert done.returncode == 0, done.stderr
    assert (report["status"], report["cells"]) == (status, [])
    assert report["reason"].startswith(f"at import: {reason}")
    assert report["impl_version"]
    assert f"{status}: at import: {reason}" in done.stdout


def test_a_library_that_hangs_at_import_is_a_row(tree):
    (tree / "baselines/sleeps.py").write_text("import time\ntime.sleep(3600)" + BASELINE)
    source = tree / "harness/workers/pool.py"
    before = source.read_text()
    assert "START_S = 300.0" in before
    try:
        source.write_text(before.replace("START_S = 300.0", "START_S = 10.0"))
        done, report = verify(tree, "double", "sleeps", "--dtypes", "float32")
    finally:
        source.write_text(before)
    assert done.returncode == 0, done.stderr
    assert (report["status"], report["reason"]) == ("hung", "at import: no answer within 10 s")


def test_the_gate_gives_such_a_library_rows_and_no_time(tmp_path):
    report = {"status": "crashed", "reason": "at import: died by SIGSEGV", "mode": "gpu"}
    report |= {"op": "double", "impl": "bad", "impl_version": "1", "code_sha256": "c", "cells": []}
    path = tmp_path / "double" / "bad.json"
    path.parent.mkdir()
    path.write_text(json.dumps(report))
    cell = type("Cell", (), {"case": type("C", (), {"name": "N1"}), "dtype": "", "pass_": ""})
    verdict = Gate(tmp_path, "double", ["bad"], lambda impl: "c").verdict("bad", cell)
    assert (verdict.status, verdict.reason) == ("crashed", report["reason"])


def test_a_fault_of_our_own_file_is_an_error_and_no_row(tree):
    (tree / "baselines/faulty.py").write_text("raise ValueError('mine')" + BASELINE)
    done, report = verify(tree, "double", "faulty", "--dtypes", "float32")
    assert (done.returncode, report) == (2, None)
    assert "tilewright: verify double faulty: ValueError: mine" in done.stderr


LATER = """
from ops._spec import Cost, Op, Tensor, make_case

INPUTS = {"x": Tensor("N")}
LATER = Op("later", lambda x: x * 2, INPUTS, lambda *a: Cost(0, 0, 0), (make_case(N=100),), ())
"""


@pytest.fixture
def broken(tree):
    """Return the tree with a file of ops, first in the alphabet, that cannot be imported."""
    path = tree / "ops/aaa.py"
    path.write_text('import nonexistent_thing\nfrom ops._spec import Op\n\nOp("aaa")\n')
    yield
    path.unlink()


def test_a_broken_file_costs_no_op_of_another(tree, broken):
    done, report = verify(tree, "double", "ours", "--dtypes", "float32")
    assert (done.returncode, report["status"]) == (0, "ok"), done.stderr


def test_the_message_names_the_broken_file(tree, broken):
    line = "ops/aaa.py: ModuleNotFoundError: No module named 'nonexistent_thing'; mend the file"
    done, _ = verify(tree, "aaa", "ours", "--dtypes", "float32")
    assert done.returncode == 2
    [said] = [row for row in done.stderr.splitlines() if row.startswith("tilewright: ")]
    assert line in said
    script = "from harness import cli; from harness.project import registry;"
    script += " cli.run(lambda: registry.declared('aaa'))"
    call = [sys.executable, "-c", script]
    done = subprocess.run(call, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"tilewright: {line}")


def test_a_kernel_that_is_still_to_be_written_is_named_and_holds_no_baseline_up(tree):
    (tree / "ops/later.py").write_text(LATER)
    (tree / "baselines/early.py").write_text(
        'LIBRARY = "torch"\n\ndef later(x):\n    return x * 2\n'
    )
    done, report = verify(tree, "later", "early", "--dtypes", "float32")
    assert (done.returncode, report["status"]) == (0, "ok"), done.stderr
    for text, lack in (
        (None, "kernels/later.py: no such file; write it beside ops/later.py"),
        ("", "kernels.later: has no function later; write it"),
    ):
        if text is not None:
            (tree / "kernels/later.py").write_text(text)
        done, report = verify(tree, "later", "ours", "--dtypes", "float32")
        assert (done.returncode, report) == (2, None)
        assert f"tilewright: verify later ours: {lack}" in done.stderr.splitlines()


def test_a_kernel_file_without_its_problem_is_named(tree):
    (tree / "kernels/orphan.py").write_text("def orphan(x):\n    return x\n")
    script = "from harness import cli; from harness.project import registry;"
    script += " cli.run(lambda: registry.declared('orphan'))"
    done = subprocess.run([sys.executable, "-c", script], cwd=tree, capture_output=True, text=True)
    line = "tilewright: ops/orphan.py: no such file; write it beside kernels/orphan.py"
    assert (done.returncode, done.stderr.splitlines()) == (2, [line])


@pytest.mark.parametrize(
    ("name", "shown"),
    [('"squared" + "_relu"', "'squared' \\+ '_relu'"), ('"squared relu"', "'squared relu'")],
)
def test_a_name_that_no_tree_can_tell_is_named(tmp_path, name, shown):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops/odd.py").write_text(f"\nSQUARED = Op({name}, None)\n")
    with pytest.raises(UserError) as caught:
        ops(tmp_path)
    assert str(caught.value).startswith("ops/odd.py:2: the name of an Op is ")
    assert caught.match(shown)


def test_a_pass_that_no_one_knows_is_named_and_one_that_an_op_lacks_is_left_out(tree):
    done, report = verify(tree, "double", "ours", "--passes", "sideways")
    assert (done.returncode, report) == (2, None)
    assert "--passes: 'sideways' is none of forward, backward, both" in done.stderr
    for impl in ("ours", "slow"):
        done, report = verify(tree, "double", impl, "--passes", "backward")
        assert done.returncode == 0, done.stderr
        assert report["status"] == "unsupported" and report["cells"] == []
        assert report["reason"] == "no case in these dtypes and passes"

"""The command: an implementation in a process of its own, whatever it does there."""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import verify as verification

ROOT = Path(__file__).resolve().parents[1]

KERNELS = """
import torch, triton, triton.language as tl
from kernels._contract import Cost, Op, Tensor, case


def double_reference(x):
    return x * 2


EDGE = (case(N=100), case(N=1000))
DOUBLE = Op("double", double_reference, {"x": Tensor("N")}, lambda *a: Cost(0, 0, 0), EDGE, ())
BROKEN = Op("broken", double_reference, {"x": Tensor("N")}, lambda *a: Cost(0, 0, 0), EDGE, ())


@triton.jit
def _double_kernel(x_ptr, out_ptr, N, BLOCK_N: tl.constexpr):
    offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < N) * 2, mask=offs < N)


def double(x):
    out = torch.empty_like(x)
    _double_kernel[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), BLOCK_N=128)
    return out


def broken(x):
    out = torch.empty_like(x)
    _double_kernel[(x.numel() // 128,)](x, out, x.numel(), BLOCK_N=128)
    return out
"""
PICKY = """
import os
LIBRARY = "torch"

def double(x):
    if x.numel() == 100:
        if x.element_size() == 4:
            os.abort()
        raise MemoryError("no room")
    if x.element_size() == 4:
        raise ValueError("only halves\\nand other words")
    return x + x
"""
ABSENT = (
    "import a_library_that_is_not_here\n\nLIBRARY = 'nothing'\n\ndef double(x):\n    return x\n"
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A small project: this harness, two ops, one of them broken, and baselines with faults."""
    root = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "harness", root / "harness", ignore=ignore)
    for path, text in {
        "kernels/__init__.py": "",
        "kernels/_contract.py": (ROOT / "kernels/_contract.py").read_text(),
        "kernels/toy.py": KERNELS,
        "baselines/__init__.py": "",
        "baselines/picky.py": PICKY,
        "baselines/absent.py": ABSENT,
    }.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text)
    return root


def verify(tree, op, impl, *more):
    report = tree / f"{op}-{impl}.json"
    report.unlink(missing_ok=True)
    call = [sys.executable, "-m", "harness.verify", "--op", op, "--impl", impl, *more]
    done = subprocess.run(
        [*call, "--out", report.name],
        cwd=tree,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    return done, json.loads(report.read_text()) if report.exists() else None


def test_a_right_kernel_is_verified_in_the_interpreter(tree):
    done, report = verify(tree, "double", "ours", "--dtypes", "bfloat16", "float32,float16")
    assert done.returncode == 0, done.stderr
    assert (report["mode"], report["status"]) == ("interpreter", "ok")
    cells = [(cell["case"], cell["dtype"]) for cell in report["cells"]]
    assert cells == [(n, d) for n in ("N100", "N1000") for d in ("float32", "float16")]
    seed = report["seed"]
    assert done.stdout == f"verify double ours (interpreter): seed {seed}: 4 of 4 cells ok; ok\n"


def test_a_wrong_kernel_fails_and_names_its_worst_cell(tree):
    done, report = verify(tree, "broken", "ours", "--dtypes", "float32", "--max-cases", "1")
    assert done.returncode == 1
    assert report["status"] == report["cells"][0]["status"] == "inaccurate"
    assert len(report["cells"]) == 1 and report["cells"][0]["tensors"][0]["ratio"] is None
    last = done.stdout.splitlines()[-1]
    assert "0 of 1 cells ok; inaccurate: N100 float32 forward: out has inf or NaN" in last


def test_a_baseline_may_die_refuse_or_run_out_of_memory(tree):
    done, report = verify(tree, "double", "picky")
    assert done.returncode == 0, done.stderr
    cells = [(cell["status"], cell["reason"]) for cell in report["cells"]]
    assert cells == [
        ("crashed", "died by SIGABRT"),
        ("oom", "no room"),
        ("unsupported", "only halves"),
        ("ok", ""),
    ]
    assert (report["status"], report["mode"]) == ("crashed", "cpu")
    assert report["impl_version"]


def test_an_absent_library_is_a_status(tree):
    done, report = verify(tree, "double", "absent")
    assert done.returncode == 0, done.stderr
    assert report["status"] == "unavailable" and report["cells"] == []
    assert "a_library_that_is_not_here" in report["reason"]


@pytest.mark.parametrize("remedied", [True, False])
def test_memory_that_runs_out_in_company_is_asked_for_alone(monkeypatch, remedied):
    leases = []

    @contextlib.contextmanager
    def lease(mode, alone):
        leases.append(alone)
        yield

    def run(arguments, mode, units):
        fine = {"case": "N1", "dtype": "float32", "pass": "forward", "tensors": []}
        assert set(units) == ({0} if leases[-1] else set())
        status = "ok" if leases[-1] and remedied else "oom"
        cells = {1: [fine | {"status": status, "reason": ""}], 0: [fine | {"status": "ok"}]}
        return {"device": "a GPU"}, cells

    monkeypatch.setattr(verification, "_surroundings", lease)
    monkeypatch.setattr(verification, "_run", run)
    arguments = argparse.Namespace(op="double", impl="ours", seed=0)
    report = verification.verify(arguments, "gpu")
    assert leases == [False, True]
    assert report["status"] == ("ok" if remedied else "oom")
    assert [cell["status"] for cell in report["cells"]] == ["ok", report["status"]]
    leases.clear()
    assert verification.verify(arguments, "cpu")["status"] == "oom" and leases == [False]


@pytest.mark.parametrize(
    ("op", "impl", "dtype"),
    [
        ("triple", "ours", "float32"),
        ("double", "nobody", "float32"),
        ("double", "ours", "flot32"),
    ],
)
def test_unknown_names_are_one_line(tree, op, impl, dtype):
    done, report = verify(tree, op, impl, "--dtypes", dtype)
    assert (done.returncode, report) == (2, None)
    assert done.stderr.startswith("tilewright: ") and len(done.stderr.splitlines()) == 1

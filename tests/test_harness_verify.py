"""The gate: implementations whose fault is known are rejected, right ones accepted."""

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness import oracle
from harness import verify as verification
from kernels._contract import DTYPES, Cost, Op, Tensor, case

ROOT = Path(__file__).resolve().parents[1]


def weighted_softmax(x, weight):
    return torch.softmax(x, dim=-1) * weight


def no_cost(a_case, direction, itemsize):
    return Cost(0, 0, 0)


OP = Op(
    "weighted_softmax",
    weighted_softmax,
    {"x": Tensor("M N"), "weight": Tensor("N")},
    no_cost,
    edge=(),
    sweep=(),
    passes=("forward", "backward"),
)
CASE = case(M=17, N=129)


def judged(function, direction="forward", dtype="float32", a_case=CASE, op=OP):
    """What the gate says of a function: "" or the reason of a rejection."""
    problem = oracle.problem(op, a_case, dtype, 0, "cpu", op.reference)
    reason, rows = oracle.check(function, problem, direction, ours=True)
    json.dumps(rows, allow_nan=False)
    return reason


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * 1.03


def by_rows(x, weight):
    return torch.stack([torch.softmax(row, dim=-1) * weight for row in x])


def in_float32(x, weight):
    return weighted_softmax(x.float(), weight.float()).to(x.dtype)


def zeros(x, weight):
    return torch.zeros_like(x)


def not_a_number(x, weight):
    return torch.full_like(x, math.nan)


def unwritten_tail(x, weight):
    out = torch.empty_like(x)
    out[:-1] = weighted_softmax(x[:-1], weight)
    return out


def shuffled_rows(x, weight):
    return weighted_softmax(x, weight).flip(0)


def three_percent_wrong(x, weight):
    return weighted_softmax(x, weight) * 1.03


def one_entry_wrong(x, weight):
    out = weighted_softmax(x, weight)
    out[0, 0] += 0.1 * out.abs().max()
    return out


def wrong_gradient(x, weight):
    return weighted_softmax(WrongGradient.apply(x), weight)


def changes_an_input(x, weight):
    out = weighted_softmax(x, weight)
    with torch.no_grad():
        x[0, 0] += 1
    return out


def wrong_dtype(x, weight):
    return weighted_softmax(x, weight).double()


def wrong_shape(x, weight):
    return weighted_softmax(x, weight).T


def nothing(x, weight):
    return None


def two_tensors(x, weight):
    return weighted_softmax(x, weight), x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", OP.passes)
@pytest.mark.parametrize("function", [weighted_softmax, by_rows, in_float32])
def test_right_ones_pass(function, direction, dtype):
    assert judged(function, direction, dtype) == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (zeros, "times as far"),
        (not_a_number, "inf or NaN"),
        (unwritten_tail, "inf or NaN"),
        (shuffled_rows, "times as far"),
        (three_percent_wrong, "times as far"),
        (one_entry_wrong, "times as far"),
        (changes_an_input, "changes its inputs"),
        (wrong_dtype, "torch.float64, expected"),
        (wrong_shape, "(129, 17) torch."),
        (nothing, "NoneType"),
        (two_tensors, "returns out0, out1; expected out"),
    ],
)
def test_wrong_ones_do_not(function, reason, dtype):
    assert reason in judged(function, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_can_be_the_only_fault(dtype):
    assert judged(wrong_gradient, "forward", dtype) == ""
    assert judged(wrong_gradient, "backward", dtype).startswith("dx is")


def test_inputs_are_restored_after_a_change():
    problem = oracle.problem(OP, CASE, "float32", 0, "cpu", OP.reference)
    assert oracle.check(changes_an_input, problem, "forward", ours=True)[0]
    assert oracle.check(weighted_softmax, problem, "forward", ours=True)[0] == ""


def test_a_write_between_the_rows_is_a_change():
    def spills(x, weight):
        out = weighted_softmax(x, weight)
        x.as_strided((1,), (1,), x.storage_offset() + x.shape[1]).zero_()
        return out

    padded = case(M=3, N=20, layout="padded")
    assert judged(spills, a_case=padded) == "changes its inputs"
    assert judged(weighted_softmax, a_case=padded) == ""


def test_an_output_must_have_memory_of_its_own():
    same = Op("same", lambda x: x * 1, {"x": Tensor("N")}, no_cost, edge=(), sweep=())
    assert judged(lambda x: x, a_case=case(N=9), op=same) == "out lies in the memory of the input x"
    assert judged(torch.clone, a_case=case(N=9), op=same) == ""


@pytest.mark.parametrize("deterministic", [True, False])
def test_two_calls_must_agree_where_declared(deterministic):
    calls = []

    def drifts(x, weight):
        calls.append(0)
        out = weighted_softmax(x, weight)
        return out * (1 + len(calls) * torch.finfo(x.dtype).eps)

    op = Op(
        "drifts",
        weighted_softmax,
        OP.inputs,
        no_cost,
        edge=(),
        sweep=(),
        deterministic=deterministic,
    )
    expected = "out differs between two calls" if deterministic else ""
    assert judged(drifts, op=op) == expected


def test_poison_is_lifted_again():
    with oracle.poisoned():
        assert torch.empty(3).isnan().all()
        assert torch.ones(2).new_empty(2, 2).isnan().all()
        assert (torch.empty_like(torch.ones(2, dtype=torch.int8)) == oracle.SENTINEL).all()
    assert torch.empty is oracle.FACTORIES[0][0].empty
    assert "poison" not in torch.empty.__name__ + torch.Tensor.new_empty.__name__


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
    assert done.stdout == "verify double ours (interpreter): 4 of 4 cells ok; ok\n"


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

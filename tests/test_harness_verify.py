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
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import inputs, oracle, tolerance
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


values = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40)
halves = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@given(values, values, st.integers(-20, 20))
def test_distance_does_not_depend_on_the_scale(some, others, exponent):
    n = min(len(some), len(others))
    x, truth = torch.tensor(some[:n]), torch.tensor(others[:n], dtype=torch.float64)
    if truth.abs().max() < 1e-3:
        truth[0] = 1.0
    scaled = tolerance.distance(x * 2.0**exponent, truth * 2.0**exponent)
    plain = tolerance.distance(x, truth)
    assert scaled.max == pytest.approx(plain.max, rel=1e-6, abs=1e-12)
    assert scaled.rms == pytest.approx(plain.rms, rel=1e-6, abs=1e-12)


@given(values, halves, st.randoms(use_true_random=False))
def test_distance_does_not_depend_on_order_or_chunks(some, dtype, random):
    truth = torch.tensor(some, dtype=torch.float64)
    x = (truth * 1.01).to(dtype)
    order = list(range(len(some)))
    random.shuffle(order)
    whole = tolerance.distance(x, truth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tolerance, "CHUNK", 3)
        parts = tolerance.distance(x[order], truth[order])
    assert parts.max == pytest.approx(whole.max) and parts.rms == pytest.approx(whole.rms)


@given(values, halves)
def test_a_rounded_oracle_passes_even_where_eager_is_exact(some, dtype):
    truth = torch.tensor(some, dtype=torch.float64).to(dtype).double() * (1 + 2**-30)
    error = tolerance.distance(truth.to(dtype), truth)
    assert tolerance.judge(error, tolerance.Distance(0.0, 0.0), dtype).ratio <= 1


@given(halves, st.floats(0, 1e-2), st.floats(1.001, 50))
def test_the_bound_is_twice_eager_and_a_floor(dtype, eager, excess):
    floor = tolerance.FLOOR[dtype]
    allowed = 2 * eager + floor
    known = tolerance.Distance(eager, eager)
    assert tolerance.judge(tolerance.Distance(allowed, allowed), known, dtype).ratio == 1
    for worse in ((allowed * excess, 0.0), (0.0, allowed * excess)):
        assert tolerance.judge(tolerance.Distance(*worse), known, dtype).ratio > 1


def test_misplaced_infinities_are_infinitely_far():
    truth = torch.tensor([1.0, -math.inf, math.nan, 1e6], dtype=torch.float64)
    right = torch.tensor([1.0, -math.inf, math.nan, math.inf], dtype=torch.float16)
    assert tolerance.distance(right, truth) == tolerance.Distance(0.0, 0.0)
    for place, value in ((0, math.nan), (0, math.inf), (1, math.inf), (2, 0.0), (3, 65504.0)):
        wrong = right.clone()
        wrong[place] = value
        assert tolerance.distance(wrong, truth).max == math.inf


def test_an_eager_overflow_allows_nothing():
    error = tolerance.Distance(0.5, 0.5)
    lost = tolerance.Distance(math.inf, math.inf)
    assert tolerance.judge(error, lost, torch.float16).ratio > 100
    assert tolerance.judge(error, None, torch.float16).ratio > 100


def test_empty_tensors_and_integers():
    empty = torch.empty(0, 4)
    assert tolerance.distance(empty, empty.double()) == tolerance.Distance(0.0, 0.0)
    with pytest.raises(ValueError, match="shape"):
        tolerance.distance(empty, torch.empty(4, 0))
    ones = torch.ones(3, dtype=torch.int64)
    assert tolerance.judge(tolerance.distance(ones, ones), None, ones.dtype).ratio == 0
    off = tolerance.distance(ones + 1, ones)
    assert tolerance.judge(off, None, ones.dtype).ratio == math.inf


def test_an_oracle_of_zeros_is_compared_absolutely():
    truth = torch.zeros(4, dtype=torch.float64)
    assert tolerance.distance(torch.full((4,), 0.5), truth) == tolerance.Distance(0.5, 0.5)


SPECS = {
    "x": Tensor("M N"),
    "w": Tensor("K N", transposed="nt"),
    "b": Tensor("N", when="bias"),
    "i": Tensor("M", dtype="int64"),
    "s": Tensor(""),
}
MADE = Op("made", None, SPECS, no_cost, edge=(), sweep=())
sizes = st.fixed_dictionaries({letter: st.integers(1, 9) for letter in "MNK"})
layouts = st.sampled_from(["", "padded", "offset"])
kinds = st.sampled_from(["", "large", "equal", "spike", "inf"])
flags = st.lists(st.sampled_from(["nt", "bias"]), unique=True).map(tuple)


@settings(deadline=None)
@given(sizes, flags, layouts, kinds, st.sampled_from(DTYPES), st.integers(0, 2**40))
def test_a_cell_always_has_the_same_inputs(sizes, flags, layout, kind, dtype, seed):
    a_case = case(*flags, layout=layout, values=kind, **sizes)
    torch.manual_seed(seed)
    first = inputs.make(MADE, a_case, dtype, seed, "cpu")
    torch.rand(3)
    again = inputs.make(MADE, a_case, dtype, seed, "cpu")
    assert list(first) == list(SPECS)
    assert (first["b"] is None) == ("bias" not in flags)
    for name, tensor in first.items():
        spec = SPECS[name]
        if tensor is None:
            continue
        assert list(tensor.shape) == [sizes[letter] for letter in spec.shape.split()]
        assert tensor.dtype == getattr(torch, spec.dtype or dtype)
        assert torch.equal(tensor, again[name])
        assert not tensor.requires_grad
    assert first["i"].min() >= 0 and first["i"].max() < min(sizes.values())
    if "nt" in flags and not layout and sizes["K"] > 1 < sizes["N"]:
        assert first["w"].stride() == (1, sizes["K"])


def test_inputs_differ_by_name_case_dtype_and_seed():
    op = Op("pair", None, {"x": Tensor("N"), "y": Tensor("N")}, no_cost, edge=(), sweep=())

    def made(seed=0, dtype="float32", **kwargs):
        return inputs.make(op, case(N=64, **kwargs), dtype, seed, "cpu")

    base = made()
    others = [base["y"], made(seed=1)["x"], made(dtype="float16")["x"].float()]
    others += [made(layout="offset")["x"], made(values="large")["x"] / inputs.LARGE]
    for other in others:
        assert not torch.allclose(base["x"], other, atol=1e-3)


def test_layouts():
    padded = inputs.make(MADE, case(M=3, N=4, K=2, layout="padded"), "float32", 0, "cpu")["x"]
    assert padded.stride() == (4 + inputs.PADDING, 1)
    memory = torch.empty(0).set_(padded.untyped_storage())
    assert memory.isnan().sum() == 3 * inputs.PADDING
    offset = inputs.make(MADE, case(M=3, N=4, K=2, layout="offset"), "float32", 0, "cpu")["x"]
    assert offset.is_contiguous() and offset.data_ptr() % 16 == 4
    assert not offset.isnan().any()


def test_kinds_of_values():
    def x(kind):
        return inputs.make(MADE, case(M=50, N=40, K=1, values=kind), "float16", 0, "cpu")["x"]

    assert x("").std() == pytest.approx(1, abs=0.1)
    assert x("large").std() == pytest.approx(inputs.LARGE, rel=0.1)
    assert x("equal").unique().numel() == 1 and x("equal")[0, 0] != 0
    assert ((x("spike") == inputs.SPIKE).sum(1) == 1).all()
    hidden = x("inf") == -math.inf
    assert hidden.any(1).sum() > 40 and not hidden.all(1).any()
    one_column = inputs.make(MADE, case(M=9, N=1, K=1, values="inf"), "float16", 0, "cpu")["x"]
    assert one_column.isfinite().all()


def test_gradients_follow_the_outputs():
    outputs = (torch.zeros(3, 4).mT, torch.zeros(2, dtype=torch.float16))
    first, again = inputs.gradients(outputs, 5), inputs.gradients(outputs, 5)
    assert [g.dtype for g in first] == [torch.float32, torch.float16]
    assert first[0].shape == (4, 3) and first[0].is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], inputs.gradients(outputs, 6)[0])


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
    call = [sys.executable, "-m", "harness.verify", "--op", op, "--impl", impl, *more]
    done = subprocess.run(
        [*call, "--out", f"{op}-{impl}.json", "--run-id", "R"],
        cwd=tree,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    report = tree / f"{op}-{impl}.json"
    return done, json.loads(report.read_text()) if report.exists() else None


def test_a_right_kernel_is_verified_in_the_interpreter(tree):
    done, report = verify(tree, "double", "ours", "--dtypes", "bfloat16", "float32,float16")
    assert done.returncode == 0, done.stderr
    assert (report["mode"], report["status"], report["run_id"]) == ("interpreter", "ok", "R")
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
    arguments = argparse.Namespace(op="double", impl="ours", run_id="", seed=0)
    report = verification.verify(arguments, "gpu")
    assert leases == [False, True]
    assert report["status"] == ("ok" if remedied else "oom")
    assert [cell["status"] for cell in report["cells"]] == ["ok", report["status"]]
    leases.clear()
    assert verification.verify(arguments, "cpu")["status"] == "oom" and leases == [False]


@pytest.mark.parametrize(("op", "impl"), [("triple", "ours"), ("double", "nobody")])
def test_unknown_names_are_one_line(tree, op, impl):
    done, report = verify(tree, op, impl)
    assert (done.returncode, report) == (2, None)
    assert done.stderr.startswith("tilewright: ") and len(done.stderr.splitlines()) == 1

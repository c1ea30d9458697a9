"""Run each baseline that can be imported here and compare its results with the op's reference."""

import ast
import importlib
import re
import sys
import types
from pathlib import Path

import pytest

from harness.machine import nvml
from harness.project import registry, source_tree
from harness.project.implementations import OURS
from harness.study import jobs
from harness.verify import worker
from harness.verify.messages import CheckUnit
from harness.workers import pool
from harness.workers.messages import Failure
from ops._spec import PASSES
from tests.support.many_ops_worker import ChooseOp

ROOT = Path(__file__).parents[2]
OPS = jobs.ops(ROOT)
OFFERS = {
    stem: sorted(source_tree.public_names(ROOT, f"baselines/{stem}.py") & set(OPS))
    for stem in jobs.stems(ROOT, "baselines")
}
EVERY = [(stem, op) for stem, offered in OFFERS.items() for op in offered]
# A first compilation by CuTe or by a library's autotuner.
LIMIT_S = 600.0
# Python's messages if a file calls a library by names that this version does not have.
FAULT = re.compile("unexpected keyword|positional argument|is not defined|has no attribute")


def tame(unit):
    """Return whether a case is plain: no tiny size, no special layout and no special values."""
    sizes = [int(size) for size in re.findall(r"(?<![A-Z])[A-Z](\d+)", unit["case"])]
    plain = re.fullmatch(r"[A-Z]\d+(-[A-Z]\d+)*", unit["case"])
    return plain and min(sizes) > 0 and max(sizes) >= 64


@pytest.fixture(scope="module")
def started():
    """Return a function that gives the worker of an implementation and its hello message."""
    workers = {}

    def start(impl, op):
        if impl not in workers:
            worker = pool.WorkerHandle(op, impl, 1, "tests.support.many_ops_worker:ManyOpsWorker")
            workers[impl] = worker, worker.answer(LIMIT_S)
        return workers[impl]

    def drop(impl):
        workers.pop(impl)[0].kill()

    with pytest.MonkeyPatch.context() as patch:
        # Starting a pool of compiler processes takes longer than compiling one small program.
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        yield start, drop
        for impl in list(workers):
            drop(impl)


@pytest.mark.parametrize(("impl", "op"), EVERY, ids=lambda name: name)
def test_an_installed_baseline_computes_its_op(impl, op, started):
    start, drop = started
    gpu = bool(nvml.gpus())
    dtypes = ["bfloat16" if gpu else "float32"]
    worker, hello = start(impl, op)
    if isinstance(hello, Failure) and hello.status == "unavailable":
        pytest.skip(f"the library cannot be imported here: {hello.reason}")
    answer = None
    try:
        assert not isinstance(hello, Failure), hello.reason
        worker.send(ChooseOp(gpu, dtypes, list(PASSES), ["edge"], op=op))
        chosen = worker.answer(LIMIT_S)
        assert not isinstance(chosen, Failure), f"{chosen.reason}\n{worker.log_tail()}"
        number = next(n for n, cells in enumerate(chosen.units) if tame(cells[0]))
        worker.send(CheckUnit(number))
        answer = worker.answer(LIMIT_S)
        assert not isinstance(answer, Failure), f"{answer.reason}\n{worker.log_tail()}"
    finally:
        # A broken worker must not affect the next op.
        if not getattr(answer, "alive", False):
            drop(impl)
    found = {(cell["status"], cell["reason"]) for cell in answer.cells}
    if {status for status, _ in found} == {"unsupported"}:
        # A case that the library declines on this machine is no fault of the baseline's file.
        reasons = "; ".join(sorted(reason for _, reason in found))
        assert not FAULT.search(reasons), reasons
        pytest.skip(f"the library declines the case here: {reasons}")
    assert found == {("ok", "")}


# Triton interprets either all kernels of a process or none.
@pytest.mark.no_gpu
@pytest.mark.parametrize("op", OFFERS["triton_tutorial"])
def test_the_tutorial_kernels_in_the_interpreter(op, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "baselines.triton_tutorial", raising=False)
    module = importlib.import_module("baselines.triton_tutorial")
    monkeypatch.delitem(sys.modules, "baselines.triton_tutorial")
    made = worker.VerifyWorker(op, OURS, 1)
    made.function, made.ours = getattr(module, op), False
    passes = ["forward", "backward"] if op in ("mul", "scale", "softmax") else ["forward"]
    made.choose(gpu=False, dtypes=["float32"], passes=passes, kinds=["edge"], most=None)
    cells = [cell for n in range(len(made.units)) for cell in made.check(n).cells]
    offered = [cell for cell in cells if cell["status"] != "unsupported"]
    assert {cell["status"] for cell in offered} == {"ok"}
    refused = {cell["reason"] for cell in cells if cell not in offered}
    assert all(reason.startswith("the tutorial form has no ") for reason in refused)


def test_every_recorded_op_has_the_reference_impl_and_both_modes_of_the_compiler():
    recorded = {path.stem for path in (ROOT / "results/recorded").glob("*/raw/*.csv")}
    recorded -= source_tree.network_ops(ROOT).keys()  # their implementations are stacks
    assert recorded and recorded <= set(OFFERS["torch_eager"])
    # A new op may have no PyTorch formula yet. If it has one, the compiler must have it too.
    for stem in ("torch_compile", "torch_compile_max"):
        assert OFFERS[stem] == OFFERS["torch_eager"], stem


def test_a_baseline_offers_ops_of_the_study_and_nothing_else():
    for stem in OFFERS:
        names = source_tree.public_names(ROOT, f"baselines/{stem}.py")
        public = {name for name in names if not name.startswith("_") and not name.isupper()}
        assert public and public <= set(OPS), stem
        assert "LIBRARY" in names, stem


def test_a_baseline_says_how_it_sums_of_ops_that_it_offers():
    told = {}
    for stem, offered in OFFERS.items():
        for node in source_tree.parsed(ROOT, f"baselines/{stem}.py").body:
            if isinstance(node, ast.Assign) and node.targets[0].id == "ACCUMULATES":
                told[stem] = ast.literal_eval(node.value)
                assert set(told[stem]) <= set(offered), stem
    assert len(told) > 1 and all(told.values())


def test_a_baseline_tunes_itself_for_ops_that_it_offers():
    told = {s: source_tree.literal(ROOT, f"baselines/{s}.py", "AUTOTUNES", ()) for s in OFFERS}
    assert any(told.values())
    named = {stem: ops for stem, ops in told.items() if ops != source_tree.EVERY}
    assert all(set(named[stem]) <= set(OFFERS[stem]) for stem in named)


@pytest.mark.parametrize("name", ["WIDE", "SETTINGS", "PREPARES"])
def test_a_baseline_declares_how_it_is_called_of_ops_that_it_offers(name):
    told = {s: source_tree.literal(ROOT, f"baselines/{s}.py", name, {}) for s in OFFERS}
    assert any(told.values())
    assert all(set(told[stem]) <= set(OFFERS[stem]) for stem in OFFERS)
    if name == "PREPARES":
        for stem, op, inputs in ((s, *pair) for s, one in told.items() for pair in one.items()):
            made = source_tree.parsed(ROOT, f"baselines/{stem}.py")
            assert set(inputs) <= set(registry.op(op)[0].prepared), stem
            assert all(maker in ast.unparse(made) for maker in inputs.values()), stem
    if name == "WIDE":
        for op, names in [pair for one in told.values() for pair in one.items()]:
            assert set(names) <= {*registry.op(op)[0].inputs, "out"}, op


def test_a_baseline_computes_in_place_ops_that_it_offers():
    told = {s: source_tree.literal(ROOT, f"baselines/{s}.py", "IN_PLACE", ()) for s in OFFERS}
    assert any(told.values())
    assert all(set(told[stem]) <= set(OFFERS[stem]) for stem in OFFERS)


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        ("raise RuntimeError('no driver\\nand more')", "RuntimeError: no driver"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named"),
        ("import math\nmath.gone", "AttributeError: module 'math' has no attribute 'gone'"),
        ("def f(:", "SyntaxError: "),
    ],
)
@pytest.mark.parametrize("ours", [False, True])
def test_a_library_that_cannot_be_imported_is_unavailable(
    library, reason, ours, tmp_path, monkeypatch
):
    """So is one that another version of a third breaks; a fault of our own file is an error."""
    name = f"rival_{ours}_{reason[:6].lower().strip(':')}"
    folder = tmp_path / "baselines"
    folder.mkdir()
    (tmp_path / f"{name}_library.py").write_text(library)
    (folder / f"{name}.py").write_text(library if ours else f"import {name}_library")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "FOLDER", folder)
    monkeypatch.setattr(registry.baselines, "__path__", [str(folder)])
    if ours and not reason.startswith("Module"):
        with pytest.raises((RuntimeError, AttributeError, SyntaxError)):
            registry.function("softmax", name)
    else:
        with pytest.raises(registry.Unavailable, match=f"^{reason}"):
            registry.function("softmax", name)


REFUSAL = """No operator found for `memory_efficient_attention_forward` with inputs:
     query       : shape=(1, 64, 2, 64) (torch.float32)
     p           : 0.0
`fa3F@pip_pkg` is not supported because:
    dtype=torch.float32 (supported: {torch.bfloat16, torch.float16})
    device=cpu (supported: {'cuda'})
`cutlassF-pt` is not supported because:
    device=cpu (supported: {'cuda'})"""


def test_a_refusal_of_xformers_gives_the_reason_of_each_operator(monkeypatch):
    ops = types.ModuleType("xformers.ops")
    ops.LowerTriangularMask = ops.memory_efficient_attention = None
    masks = types.ModuleType("xformers.ops.fmha.attn_bias")
    masks.LocalAttentionFromBottomRightMask = masks.LowerTriangularFromBottomRightMask = None
    masks.BlockDiagonalMask = None
    packages = [types.ModuleType(name) for name in ("xformers", "xformers.ops.fmha")]
    for module in (ops, masks, *packages):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "baselines._xformers", raising=False)
    why = importlib.import_module("baselines._xformers")._why
    monkeypatch.delitem(sys.modules, "baselines._xformers")
    assert why(REFUSAL) == (
        "fa3F@pip_pkg: dtype=torch.float32 (supported: {torch.bfloat16, torch.float16}),"
        " device=cpu (supported: {'cuda'}); cutlassF-pt: device=cpu (supported: {'cuda'})"
    )
    assert why("anything else") == "anything else"

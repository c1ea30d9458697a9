"""Check tensors that a library takes in float32: widened before the clock, verified with casts."""

import weakref

import pytest
import torch

from harness.calls import invoke, wide
from harness.measure.worker import COPIES
from harness.project import registry
from harness.verify import call_profile, worker
from harness.verify import problem as oracle
from ops._spec import Cost, Op, Tensor, make_case

OP = Op(
    "scaled",
    lambda x, weight: x * weight,
    {"x": Tensor("M N"), "weight": Tensor("N")},
    lambda *_: Cost(0, 0, 0),
    edge=(),
    sweep=(make_case(M=8, N=16),),
    passes=("forward", "backward"),
)
CASE = OP.sweep[0]


class _Scaled(torch.autograd.Function):
    """Take a float32 weight only and return its gradient in float32, as QuACK's layer norm does."""

    @staticmethod
    def forward(ctx, x, weight):
        if weight.dtype != torch.float32:
            raise ValueError("Weight must be float32")
        ctx.save_for_backward(x, weight)
        return (x * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return (dy * weight).to(x.dtype), (dy * x).sum(0, dtype=torch.float32)


def scaled(x, weight):
    return _Scaled.apply(x, weight)


def test_tensors_of_these_names_are_float32_and_the_others_as_they_were():
    x, absent = torch.ones(2, dtype=torch.bfloat16), None
    found = wide.given({"x": x, "weight": x, "bias": absent, "i": torch.arange(2)}, ["weight", "i"])
    assert found["x"] is x and found["bias"] is None
    assert (found["weight"].dtype, found["i"].dtype) == (torch.float32, torch.int64)
    assert torch.equal(found["weight"].bfloat16(), x)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_call_with_wide_inputs_is_judged_as_a_function_of_one_dtype(pass_):
    problem = oracle.problem(OP, CASE, "bfloat16", 0, "cpu", OP.reference)
    seeds = problem.seeds if pass_ == "backward" else None
    function = wide.judged(scaled, ["weight"])
    results = invoke.run(OP, function, CASE, problem.tensors, seeds)
    assert {tensor.dtype for tensor in results.values()} == {torch.bfloat16}
    assert all(verdict.ratio <= 1 for verdict in problem.judge(results).values())
    with pytest.raises(ValueError, match="must be float32"):
        invoke.run(OP, scaled, CASE, problem.tensors, seeds)


def test_a_float32_result_is_judged_in_the_dtype_of_the_call():
    x = torch.ones(3, dtype=torch.float16)
    assert wide.judged(lambda x: x.float(), ["out"])(x=x).dtype == torch.float16
    several = wide.judged(lambda x: (x.float(), x.argmax()), ["out"])(x=x)
    assert [tensor.dtype for tensor in several] == [torch.float16, torch.int64]
    assert wide.judged(lambda x: x.float(), ["x"])(x=x).dtype == torch.float32
    assert wide.judged(scaled, []) is scaled


def test_the_timed_call_gets_what_was_widened_before_it(make, monkeypatch):
    seen = []

    def function(x, bias):
        seen.append((x.dtype, x.data_ptr()))
        return x + 1

    made = make(function, wide=("x",))
    monkeypatch.setitem(CELL, "dtype", "bfloat16")
    prepared = made.prepare(**CELL, pass_="forward")
    assert prepared.remark == ""
    # Each copy of the inputs was widened once, and no timed call widened one again.
    made.block(3 * COPIES)
    assert {dtype for dtype, _ in seen} == {torch.float32}
    assert len({address for _, address in seen}) == COPIES
    assert made.check().leaked_bytes == 0


CELL = {"case": "M64", "dtype": "float32"}


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_the_ledger_sees_no_cast_of_what_the_user_keeps_wide(pass_):
    def casting(x, weight):
        return scaled(x, weight.float())

    where = OP, scaled, CASE, "bfloat16", pass_, 0, "cpu"
    widened = call_profile.observe(*where, ["weight"])
    cast = call_profile.observe(*where[:1], casting, *where[2:])
    assert cast["casts"] == widened["casts"] + 1


def test_the_verifier_judges_with_casts_and_fills_the_ledger_without(monkeypatch):
    fake = {"op": lambda name: (OP, "family"), "function": lambda op, impl: scaled}
    fake |= {"version": lambda impl: "1", "accumulates": lambda op, impl: "float32"}
    fake |= {"in_place": lambda op, impl: False, "wide": lambda op, impl: ("weight",)}
    fake |= {"settings": lambda op, impl: "loudly"}
    for name, value in fake.items():
        monkeypatch.setattr(registry, name, value)
    made = worker.VerifyWorker("scaled", "rival", 0)
    chosen = made.choose(False, ["bfloat16"], list(OP.passes), ["sweep"], None)
    assert chosen.declared == {"accumulates": "float32", "settings": "loudly", "wide": "weight"}
    assert [(c["status"], c["reason"]) for c in made.check(0).cells] == [("ok", "")] * 2
    # The function refuses a narrow weight, so an entry of the ledger proves that it got a wide one.
    assert set(made.profile(0).entries) == set(OP.passes)


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_a_worker_keeps_the_oracle_off_the_gpu_if_memory_runs_out(monkeypatch, spare, full):
    """It may do so if nothing else helps, and does it only for want of memory."""
    moved = []

    def crowded(**given):
        if full and not moved:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return scaled(**given)

    monkeypatch.setattr(registry, "op", lambda name: (OP, "family"))
    fake = {"in_place": False, "wide": (), "settings": "", "accumulates": "", "function": crowded}
    for name, value in fake.items():
        monkeypatch.setattr(registry, name, lambda op, impl, value=value: value)
    monkeypatch.setattr(registry, "version", lambda impl: "1")
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: moved.append(tensor) or tensor)
    made = worker.VerifyWorker("scaled", "ours", 0)
    made.choose(False, ["float32"], ["forward"], ["sweep"], spare=spare)
    found = made.check(0)
    assert [cell["status"] for cell in found.cells] == ["oom" if full and not spare else "ok"]
    assert found.alive == (spare or not full)
    assert [tensor.dtype for tensor in moved] == [torch.float64] * len(moved)
    assert bool(moved) == (spare and full)


class Network:
    """Keep what a call was given, as a network keeps its weights, until it is told to forget it.

    As long as nothing has moved, results are wrong and a backward pass finds no memory.
    """

    def __init__(self, moved, given):
        self.moved, self.given, self.kept = moved, given, []

    def __call__(self, x, weight):
        self.given.append(weakref.ref(x))
        self.kept += [x, self.kept]
        if torch.is_grad_enabled() and not self.moved:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return scaled(x, weight) * (1 if self.moved else 2)

    def forget(self):
        self.kept = []


def test_passes_without_memory_run_again_as_in_a_new_process(monkeypatch):
    """A verdict on another pass stays. Nothing of the first run is in the way of the second."""
    moved, given, left, problem = [], [], [], oracle.problem

    def noting(*about):
        left.append(sum(each() is not None for each in given))
        return problem(*about)

    monkeypatch.setattr(oracle, "problem", noting)
    monkeypatch.setattr(registry, "op", lambda name: (OP, "family"))
    for name, value in {"in_place": False, "wide": (), "settings": "", "accumulates": ""}.items():
        monkeypatch.setattr(registry, name, lambda op, impl, value=value: value)
    monkeypatch.setattr(registry, "function", lambda op, impl: Network(moved, given))
    monkeypatch.setattr(registry, "version", lambda impl: "1")
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: moved.append(tensor) or tensor)
    made = worker.VerifyWorker("scaled", "ours", 0)
    made.choose(False, ["float32"], ["forward", "backward"], ["sweep"], spare=True)
    found = made.check(0)
    assert [cell["status"] for cell in found.cells] == ["inaccurate", "ok"]
    assert found.alive and given and left == [0, 0]


def test_a_network_holds_no_memory_between_two_cases(monkeypatch):
    """Other verifications share the GPU."""
    given = []
    monkeypatch.setattr(registry, "op", lambda name: (OP, "family"))
    for name, value in {"in_place": False, "wide": (), "settings": "", "accumulates": ""}.items():
        monkeypatch.setattr(registry, name, lambda op, impl, value=value: value)
    monkeypatch.setattr(registry, "function", lambda op, impl: Network([1], given))
    monkeypatch.setattr(registry, "version", lambda impl: "1")
    made = worker.VerifyWorker("scaled", "ours", 0)
    made.choose(False, ["float32"], ["forward"], ["sweep"])
    assert [cell["status"] for cell in made.check(0).cells] == ["ok"]
    assert given and all(each() is None for each in given)


def test_ours_declares_no_wide_inputs(monkeypatch):
    assert (
        registry.wide("layer_norm", "ours") == () and registry.settings("layer_norm", "ours") == ""
    )
    module = __import__("baselines.torch_eager", fromlist=["x"])
    monkeypatch.setattr(module, "WIDE", {"dot": ("out",)}, raising=False)
    monkeypatch.setattr(module, "SETTINGS", {"dot": "slowly"}, raising=False)
    assert registry.wide("dot", "torch_eager") == ("out",)
    assert (registry.settings("dot", "torch_eager"), registry.settings("add", "torch_eager")) == (
        "slowly",
        "",
    )

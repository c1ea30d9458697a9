"""Check tensors that a library takes in float32: widened before the clock, verified with casts."""

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

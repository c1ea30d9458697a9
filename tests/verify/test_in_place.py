"""Check functions that compute in place: judged, timed and checked on restored inputs."""

import importlib
import sys
import types
from types import SimpleNamespace

import pytest
import torch

import baselines
from harness import status
from harness.calls.snapshot import InputSnapshot
from harness.measure import worker
from harness.measure.messages import Energy
from harness.project import registry
from harness.project.implementations import OURS
from harness.verify import call_profile, check
from harness.verify import problem as oracle
from ops._spec import Cost, Op, Tensor, make_case
from tests.support.cpu_worker import CELL, Overwriting, Timer, Turned, cell

PASSES = ("forward", "backward", "both")
OP = Op(
    "squared",
    lambda x: x * x,
    {"x": Tensor("N")},
    lambda *_: Cost(0, 0, 0),
    edge=(),
    sweep=(make_case(N=9),),
    passes=PASSES,
)


class Clamped(torch.autograd.Function):
    """Clamp x in place on the way forward; a second call would write the same values."""

    @staticmethod
    def forward(ctx, x):
        return x.detach().clamp_(0, 1).sum()

    @staticmethod
    def backward(ctx, dy):
        return dy.expand(9)


def given(change):
    tensors = torch.arange(6.0), torch.arange(4.0)
    kept = InputSnapshot([*tensors, tensors[0][2:]])
    change(tensors)
    return tensors, kept


def test_overwritten_inputs_are_put_back_and_nothing_else_is_kept():
    tensors, kept = given(lambda tensors: tensors[0].zero_())
    assert kept.changed and kept.nbytes == 10 * 4
    kept.drop_unchanged()
    assert kept.nbytes == 6 * 4
    assert kept.covers(tensors[0][1:]) and not kept.covers(tensors[1])
    kept.restore()
    assert torch.equal(tensors[0], torch.arange(6.0)) and not kept.changed


def test_without_a_change_nothing_is_kept():
    _, kept = given(lambda tensors: None)
    assert not kept.changed
    kept.drop_unchanged()
    assert kept.nbytes == 0


NORM = Op(
    "rms_norm",
    lambda x, weight, residual: ((x + residual).sum(0) * weight, x + residual),
    {name: Tensor("N") for name in ("x", "weight", "residual")},
    lambda *_: Cost(0, 0, 0),
    edge=(),
    sweep=(make_case(N=9),),
    passes=("forward",),
)


def test_xformers_writes_its_sum_over_x_as_its_user_has_it(monkeypatch):
    """The norm gets x itself and no copy."""

    def norm_add(x, y, weight, eps):
        x += y
        return x.sum(0) * weight

    names = {
        "xformers": {},
        "xformers.ops": {"LowerTriangularMask": None, "memory_efficient_attention": None},
        "xformers.ops.fmha": {},
        "xformers.ops.fmha.attn_bias": dict.fromkeys(
            (
                "BlockDiagonalMask",
                "LocalAttentionFromBottomRightMask",
                "LowerTriangularFromBottomRightMask",
            )
        ),
        "xformers.ops.rmsnorm": {"rms_norm": None, "rms_norm_add": norm_add},
        "xformers.ops.tiled_matmul": {"tiled_matmul": None},
    }
    for name, values in names.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("baselines._xformers", "baselines.xformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    # A package keeps the modules that other tests imported.
    monkeypatch.delattr(baselines, "_xformers", raising=False)
    rival = importlib.import_module("baselines.xformers")
    for name in ("baselines._xformers", "baselines.xformers"):
        monkeypatch.delitem(sys.modules, name)
    assert "rms_norm" in rival.IN_PLACE

    def function(x, weight, residual):
        found = rival.rms_norm(x, weight, 1e-5, residual)
        assert found[1] is x
        return found

    assert verified(function, "forward", op=NORM).reason == ""
    assert verified(function, "forward", in_place=False, op=NORM).reason == "changes its inputs"


def verified(function, pass_, in_place=True, op=OP):
    problem = oracle.problem(op, make_case(N=9), "float32", 0, "cpu", op.reference)
    before = [tensor.clone() for tensor in problem.given(pass_)]
    finding = check.check(function, problem, pass_, False, in_place)
    assert all(map(torch.equal, problem.given(pass_), before))
    return finding


@pytest.mark.parametrize("pass_", PASSES)
def test_results_in_the_memory_of_inputs_are_judged_where_they_may_lie_there(pass_):
    doubled = Op(**vars(OP) | {"name": "doubled", "reference": lambda x: 2 * x})
    finding = verified(Turned.apply, pass_, op=doubled)
    assert (finding.reason, finding.deterministic) == ("", True)
    assert verified(Turned.apply, pass_, in_place=False, op=doubled).reason
    assert verified(Overwriting.apply, pass_).reason == ""


def test_a_wrong_result_in_place_is_wrong():
    assert "times as far" in verified(lambda x: x.detach().mul_(x).mul_(1.03), "forward").reason


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("function", [Turned.apply, Overwriting.apply])
def test_each_timed_call_has_its_inputs_as_they_were(make, function, pass_):
    made = make(lambda x, bias: function(x), "rival", passes=PASSES, in_place=True)
    cell(made, pass_, calls=7)
    cell(make(lambda x, bias: x.cos(), "rival", passes=PASSES, in_place=True), pass_)


def test_a_call_in_place_has_a_time_and_no_energy(make):
    made = make(lambda x, bias: Turned.apply(x), "rival", in_place=True)
    prepared = made.prepare(**CELL, pass_="forward")
    # The copies that restore inputs do not belong to the call.
    assert prepared.peak_mem_bytes == 20 - 64 * 4
    assert made.block(4).device_us == 1.0
    assert made.energy(200) == Energy(0.0, None, None)


@pytest.mark.parametrize("late", [1, worker.COPIES + 1])
def test_a_replay_in_place_that_goes_wrong_is_found(make, monkeypatch, late):
    def capture(self, call):
        first, count = call(), iter(range(100))

        def replay():
            for output in call() if next(count) < late else first:
                output.data.add_(0)

        return replay, first

    monkeypatch.setattr(Timer, "capture", capture)
    made = make(lambda x, bias: Turned.apply(x), "rival", in_place=True)
    made.prepare(**CELL, pass_="forward")
    with pytest.raises(status.Inaccurate, match="a timed call"):
        made.block(5 * worker.COPIES)
        made.check()


def test_without_a_graph_inputs_are_put_back_as_well(make, monkeypatch):
    monkeypatch.setattr(Timer, "capture", lambda self, call: 1 / 0)
    made = make(lambda x, bias: Turned.apply(x), "rival", in_place=True)
    assert cell(made, calls=7).remark.startswith("events: ")


def test_the_ledger_counts_what_a_call_writes_over():
    def overwritten(function, pass_="forward"):
        entry = call_profile.observe(OP, function, make_case(N=9), "float32", pass_, 1, "cpu")
        return entry["overwritten_bytes"]

    assert overwritten(Turned.apply) == 9 * 4
    assert overwritten(lambda x: x * x) == 0
    # A second call on the result of the first would write the same.
    assert overwritten(Clamped.apply) == overwritten(Clamped.apply, "both") == 9 * 4


def test_memory_behind_results_is_looked_at_where_they_are_allocations_of_the_call(monkeypatch):
    looked = []
    free = SimpleNamespace(overrun=lambda results: looked.append(len(results)) or "")
    monkeypatch.setattr(check.guards, "FreeMemory", lambda: free)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    problem = oracle.problem(OP, make_case(N=9), "float32", 0, "cpu", OP.reference)
    for function in (lambda x: x.detach().mul_(x), lambda x: x * x):
        judged = check._CheckedCalls(function, problem, "forward", False, True)
        judged._gpu = True
        judged.judged()
        judged.close()
    assert looked == [0, 1]


def test_ours_computes_nothing_in_place():
    assert not registry.in_place("swiglu", OURS) and not registry.in_place("swiglu", "torch_eager")


def test_a_tensor_without_elements_lies_in_nobodys_memory():
    kept = InputSnapshot([torch.empty(0, 4), torch.ones(2)])
    assert kept.covers(torch.ones(0)) is False and kept.nbytes == 8

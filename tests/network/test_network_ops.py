"""The ops of a whole network: their oracle, what they judge, and which stacks implement them."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.calls import inputs
from harness.project import registry, source_tree
from harness.study import jobs
from harness.verify import check
from harness.verify import problem as oracle
from network import calls, flat, stack
from network.cache import Keys
from network.config import undropped
from network.ops import model as ops
from network.ops._tensors import config_of
from network.train import TrainStep
from ops._spec import ITEMSIZE

ROOT = Path(__file__).parents[2]
OPS = {op.name: op for op in (ops.FORWARD, ops.TRAIN_STEP, ops.DECODE)}
every_op = pytest.mark.parametrize("name", OPS)
CELLS = [(name, case) for name, op in OPS.items() for case in op.edge]
every_cell = pytest.mark.parametrize(
    ("name", "case"), CELLS, ids=[f"{name}-{case.name}" for name, case in CELLS]
)


def drawn(op, case, dtype="float32", seed=1):
    return inputs.make(op, case, dtype, seed, "cpu")


def in_float64(tensors):
    return {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}


def called(function, op, case, tensors):
    results = function(**tensors, **op.arguments(case))
    return results if isinstance(results, tuple) else (results,)


def apart(found, exact):
    return ((found - exact).abs().max() / exact.abs().max()).item()


@every_op
def test_each_op_is_declared_as_the_house_expects(name):
    op, family = registry.op(name)
    assert op is OPS[name] and family == "model" and registry.of_network(name)
    cases = (*op.edge, *op.sweep)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case["N"] == flat.size(config_of(case)) and case["V"] == config_of(case).vocabulary
        assert set(case.flags) <= set(op.flags) and not config_of(case).dropout
        for tensor in op.inputs.values():
            tensor.letters(case.sizes)
        cost = op.cost(case, "forward", ITEMSIZE["bfloat16"])
        assert min(cost.bytes_read, cost.bytes_written, cost.flops) > 0
    assert max(case["N"] for case in op.sweep) > 1.2e9


@every_cell
def test_shapes_follow_without_numbers(name, case):
    op = OPS[name]
    given = drawn(op, case, "bfloat16")
    blank = inputs.make(op, case, "bfloat16", 1, "meta")
    shapes = [(x.shape, x.dtype) for x in called(op.reference, op, case, blank)]
    assert shapes == [(x.shape, x.dtype) for x in called(op.reference, op, case, given)]


@every_cell
def test_the_oracle_is_what_pytorch_computes_in_float64(name, case):
    """By its own formulas, row by row, it gives the numbers of the model with PyTorch's parts."""
    op, tensors = OPS[name], in_float64(drawn(OPS[name], case))
    exact = called(op.reference, op, case, tensors)
    found = called(calls.function(name, "torch_eager"), op, case, tensors)
    assert len(found) == len(exact) > 0
    for mine, theirs in zip(found, exact, strict=True):
        # The probe of the norm is clipped with 1e-6 beside it, by both.
        assert apart(mine, theirs) < 1e-10


@pytest.mark.parametrize("op", [ops.TRAIN_STEP, ops.DECODE], ids=lambda op: op.name)
def test_an_oracle_in_pieces_is_that_of_all_at_once(op, monkeypatch):
    case = op.edge[0]
    whole = called(op.reference, op, case, in_float64(drawn(op, case)))
    monkeypatch.setattr(ops._oracle, "SCORES", 5)
    monkeypatch.setattr(ops._oracle, "LOGITS", 7)
    monkeypatch.setattr(ops, "SEQUENCES", 1)
    pieces = called(op.reference, op, case, in_float64(drawn(op, case)))
    for one, other in zip(pieces, whole, strict=True):
        assert apart(one, other) < 1e-12


def test_a_network_lies_in_the_flat_tensor():
    config = undropped("tiny-gpt2")
    weights = torch.randn(flat.size(config))
    parts = stack.load("torch_eager").parts
    model = flat.bound(config, parts, weights)
    places = {name: (weight, start) for name, weight, start in flat.places(model)}
    assert sum(weight.numel() for weight, _ in places.values()) <= len(weights)
    for weight, start in places.values():
        assert torch.equal(weight.flatten(), weights[start : start + weight.numel()])
        assert start % flat.ALIGNED == 0 and weight.requires_grad and weight.is_leaf
    head = model.roles["head"].weight
    assert head is model.roles["tokens"].weight
    weights.zero_()
    assert not any(weight.any() for weight in model.parameters())
    with pytest.raises(ValueError, match=f"weights: 3 entries, expected {len(weights)}"):
        flat.bound(config, parts, weights[:3])


def test_drawn_weights_have_the_size_of_a_network_s():
    config = undropped("tiny-gpt2")
    weights = flat.scale_as_drawn(config, torch.randn(flat.size(config)))
    model = flat.bound(config, stack.load("torch_eager").parts, weights)
    first = model.layers[0]
    assert first.norm1.weight.mean().item() == pytest.approx(1, abs=0.05)
    assert first.norm1.bias.std().item() == pytest.approx(0.1, rel=0.3)
    assert first.up[0].weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert first.down.weight.std().item() == pytest.approx(256**-0.5, rel=0.05)


def test_a_second_call_goes_on_with_the_same_network():
    op, case = ops.TRAIN_STEP, ops.TRAIN_STEP.edge[0]
    tensors, function = drawn(op, case), calls.function("model_train_step", "torch_eager")
    called(function, op, case, tensors)
    model = function._kept.model
    again = drawn(op, case)
    for name, tensor in tensors.items():
        tensor.copy_(again[name])
    repeat = called(function, op, case, tensors)
    assert function._kept.model is model
    fresh = called(calls.function(op.name, "torch_eager"), op, case, again)
    assert all(torch.equal(a, b) for a, b in zip(repeat, fresh, strict=True))
    called(function, op, case, drawn(op, case, seed=2))
    assert function._kept.model is not model


def sees_what_comes(q, k, v, *_):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def misses_the_newest(q, k, v, count):
    fewer = Keys(count.lengths - 1, count.queries, count.positions)
    return stack.load("torch_eager").parts.decode_attention(q, k, v, fewer)


def loses_a_gradient(gate, up):
    return torch.nn.functional.silu(gate.detach()) * up


FAULTS = {
    "attention that sees what comes": ("model_forward", {"attention": sees_what_comes}),
    "a cache without its newest token": ("model_decode", {"decode_attention": misses_the_newest}),
    "a gate without its gradient": ("model_train_step", {"swiglu": loses_a_gradient}),
}


def judged(op, function, case=None, dtype="float32"):
    eager = calls.function(op.name, "torch_eager")
    in_place = registry.in_place(op.name, "ours")
    problem = oracle.problem(op, case or op.edge[0], dtype, 1, "cpu", eager, in_place=in_place)
    return check.check(function, problem, "forward", False, in_place)


@every_op
def test_eager_pytorch_passes_and_leaves_the_inputs_as_they_were(name):
    op = OPS[name]
    found = judged(op, calls.function(name, "torch_eager"))
    assert found.reason == "" and found.deterministic


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_in_a_part_is_found(what):
    name, parts = FAULTS[what]
    eager = stack.load("torch_eager")
    faulty = dataclasses.replace(eager, parts=eager.parts.with_parts(**parts))
    assert "times as far from the oracle" in judged(OPS[name], function_of(name, faulty)).reason


def test_a_gradient_in_bfloat16_that_is_five_percent_off_is_found():
    """Rounded moments hide the gradient of a step if they are much larger."""
    op, eager = ops.TRAIN_STEP, stack.load("torch_eager")

    def reason(off):
        def linear(x, weight, bias=None):
            scaled = weight * (1 - off) + weight.detach() * off
            return eager.parts.linear(x, scaled, bias)

        used = dataclasses.replace(eager, parts=eager.parts.with_parts(linear=linear))
        return judged(op, function_of(op.name, used), op.edge[1], "bfloat16").reason

    assert reason(0.0) == "" and "out2 is" in reason(0.05)


def function_of(name, used):
    function = calls.function(name, "torch_eager")
    function.stack = used
    return function


@pytest.mark.parametrize("setting", [{"clip": 1e6}, {"decay": 0.0}, {"rate": 6e-4}])
def test_another_step_is_found(monkeypatch, setting):
    class Other(TrainStep):
        def __init__(self, model, **given):
            super().__init__(model, **(given | setting))

    monkeypatch.setattr(calls, "TrainStep", Other)
    op = ops.TRAIN_STEP
    eager = calls.function(op.name, "torch_eager")
    problem = oracle.problem(op, op.edge[0], "float32", 1, "cpu", op.reference, in_place=True)
    assert check.check(eager, problem, "forward", False, True).reason


def test_the_stacks_are_the_implementations():
    whole = {"torch_eager", "torch_compile", "flash_attn_2", "xformers", "liger", "ours",
             "ours_cublas"}  # fmt: skip
    assert set(source_tree.stacks(ROOT, "model_forward")) == whole == set(stack.names())
    parts = set(source_tree.stacks(ROOT, "model_train_step")) - whole
    assert {f"torch_{kind}_with_rotary" for kind in ("eager", "compile")} < parts
    for name in parts:
        assert len(stack.load(name).taken) == 1 and source_tree.is_stack(ROOT, name)
    assert source_tree.rests_on(ROOT, "ours_cublas") == "triton"
    assert source_tree.rests_on(ROOT, "torch_compile") == "torch"
    assert not source_tree.is_stack(ROOT, "no_such")


def test_a_part_that_a_network_does_not_call_declines():
    case = next(case for case in ops.TRAIN_STEP.edge if "tiny_gpt2" in case.flags)
    function = calls.function("model_train_step", "torch_eager_with_swiglu")
    with pytest.raises(ValueError, match="a network of this kind calls no swiglu"):
        called(function, ops.TRAIN_STEP, case, drawn(ops.TRAIN_STEP, case))


def test_the_study_verifies_a_network_and_builds_none(monkeypatch):
    text = (ROOT / "config/config.yaml").read_text()
    import yaml

    config = yaml.safe_load(text) | {"measure": True, "ops": ["model_decode", "softmax"]}
    study = jobs.Study.load(ROOT, config, ["config/config.yaml"])
    assert study.families == ["softmax"] and study.ops["model_decode"] == "model"
    assert study.rivals["model_decode"] == sorted(set(stack.names()) - {"ours"})
    inputs = study.verify_inputs(Wild(op="model_decode", impl="liger"))
    assert {"network/stacks/liger.py", "network/model.py", "baselines/liger.py"} < set(inputs)
    assert study.library(Wild(op="model_decode", impl="ours_cublas")).startswith("triton ")


class Wild(dict):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("name", ["model_decode", "model_train_step"])
def test_ours_passes_the_verification_through_the_interpreter(name, tmp_path):
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "harness.verify", "--op", name, "--impl", "ours"]
    done = subprocess.run(
        [*command, "--max-cases", "1", "--out", str(out)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 cells ok" in done.stdout


@pytest.mark.gpu
def test_a_hundred_steps_of_ours_repeat_bit_by_bit():
    op = ops.TRAIN_STEP
    case = op.sweep[0]

    def trained():
        tensors = inputs.make(op, case, "bfloat16", 1, "cuda")
        step = calls.function(op.name, "ours")
        losses = [called(step, op, case, tensors)[0].item() for _ in range(100)]
        return losses, tensors["weights"]

    (first, weights), (second, others) = trained(), trained()
    assert first == second and torch.equal(weights, others)
    assert first[-1] < first[0]

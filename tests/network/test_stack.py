"""Stacks: by presence, one part at a time, and honest about what a part cannot do."""

import dataclasses
import itertools

import pytest
import torch

from network import parity, parts, stack, text
from network.config import preset
from network.probe import reasons
from network.train import TrainStep
from tests.support.networks import KINDS, apart, built, loss_and_gradients, plain, tokens

kinds = pytest.mark.parametrize("kind", KINDS)
# Ours may be twice as far from the truth as PyTorch's float32, and this of the greatest number.
SLACK = 2e-6


def test_the_files_are_the_stacks():
    found = stack.names()
    assert {"torch_eager", "torch_compile", "ours", "ours_cublas", "liger"} <= set(found)
    assert not any(name.startswith("_") for name in found)


def test_an_unknown_stack_and_an_absent_library_are_told():
    with pytest.raises(ValueError, match="stack 'theirs': no such file in network/stacks/"):
        stack.load("theirs")
    for name in ("flash_attn_2", "liger", "xformers"):
        try:
            loaded = stack.load(name)
        except stack.Unavailable as error:
            assert str(error).startswith(f"stack {name}: ") and "install its library" in str(error)
        else:
            assert loaded.own


def test_a_stack_takes_pytorchs_parts_for_those_that_it_has_not():
    eager, ours = stack.load("torch_eager"), stack.load("ours")
    assert eager.own == ()
    for name in parts.NAMES:
        assert (getattr(ours.parts, name) is getattr(eager.parts, name)) == (name not in ours.own)
    cublas = stack.load("ours_cublas")
    assert set(ours.own) - set(cublas.own) == {"linear", "linear_gelu", "swiglu_mlp"}


def test_one_part_is_put_in():
    found = stack.one_part("rms_norm")
    eager, ours = stack.load("torch_eager"), stack.load("ours")
    assert found.name == "torch_eager+ours.rms_norm" and found.own == ("rms_norm",)
    changed = [n for n in parts.NAMES if getattr(found.parts, n) is not getattr(eager.parts, n)]
    assert changed == ["rms_norm"]
    assert found.parts.rms_norm is ours.parts.rms_norm
    assert stack.one_part("swiglu", over="torch_compile").compiled
    with pytest.raises(ValueError, match="stack torch_eager: has no embedding of its own"):
        ours.with_parts_of(eager, "embedding")
    with pytest.raises(ValueError, match=r"parts \['gate'\]: not known"):
        eager.parts.with_parts(gate=None)


def test_the_product_that_is_put_in_is_not_hidden_by_a_fused_one():
    eager, ours = stack.load("torch_eager"), stack.load("ours")
    found = ours.with_parts_of(dataclasses.replace(eager, own=("linear",)), "linear")
    assert found.parts.linear_gelu is found.parts.swiglu_mlp is None
    assert found.parts.linear is eager.parts.linear
    found = ours.with_parts_of(dataclasses.replace(eager, own=("swiglu",)), "swiglu")
    assert found.parts.swiglu_mlp is None and found.parts.linear_gelu is ours.parts.linear_gelu


@kinds
def test_eager_can_all_that_a_network_asks(kind):
    eager = stack.load("torch_eager")
    for training in (True, False):
        assert not reasons(eager.parts, parts.NAMES, preset(kind), training)


def test_parts_are_tried_on_the_device_that_is_asked_for():
    with torch.device("meta"):
        assert stack.load("ours").lacks(preset("tiny"), True, device="cpu") == {}


def _detached(gate, up):
    return torch.nn.functional.silu(gate.detach()) * up.detach()


def _of_up_alone(gate, up):
    return torch.nn.functional.silu(gate.detach()) * up


def _refuses(gate, up):
    raise RuntimeError("no gate today\nand more")


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (_detached, "returns a result without a gradient"),
        (_of_up_alone, "returns no gradient of an input"),
        (_refuses, "no gate today"),
    ],
)
def test_a_part_that_cannot_is_named_with_its_reason(part, why):
    eager, config = stack.load("torch_eager"), preset("tiny")
    faulty = stack.Stack("faulty", eager.parts.with_parts(swiglu=part), ("swiglu",))
    assert faulty.lacks(config, training=True) == {"swiglu": why}
    with pytest.raises(stack.Unavailable) as told:
        faulty.require(config, training=True)
    assert str(told.value) == f"stack faulty: swiglu cannot ({why})"
    assert stack.able(faulty, config, training=True).own == ()
    # A network that has no such part does not care.
    assert faulty.lacks(preset("tiny-gpt2"), training=True) == {}
    if part is not _refuses:
        assert faulty.lacks(config, training=False) == {}


@kinds
def test_our_parts_with_gradients_give_those_of_pytorch(kind):
    """Through Triton's interpreter; the truth is eager PyTorch in float64."""
    config = plain(kind)
    ours = stack.able(stack.load("ours"), config, training=True)
    wanted = {"rms_norm", "rotary", "swiglu", "loss"}
    wanted = wanted if kind == "tiny" else {"layer_norm", "gelu", "loss"}
    assert wanted <= set(ours.own)
    exact_loss, exact = loss_and_gradients(built(config).double(), *tokens())
    near_loss, near = loss_and_gradients(built(config), *tokens())
    loss, found = loss_and_gradients(built(config, ours), *tokens())
    assert apart(loss, exact_loss) <= 2 * apart(near_loss, exact_loss) + SLACK
    for name in exact:
        bound = 2 * apart(near[name], exact[name]) + SLACK
        assert apart(found[name], exact[name]) <= bound, name


@kinds
def test_all_our_parts_without_gradients_give_the_logits_of_pytorch(kind):
    config = plain(kind)
    ours = stack.able(stack.load("ours"), config, training=False)
    assert "linear" in ours.own
    ids, _ = tokens(length=5)
    with torch.no_grad():
        exact, near = built(config).double()(ids), built(config)(ids)
        found = built(config, ours)(ids)
    assert apart(found, exact) <= 2 * apart(near, exact) + SLACK


def test_the_tiny_network_trains_on_our_parts_as_on_pytorchs():
    batches = text.Batches(text.as_bytes(text.english()[:20000]), batch=1, length=12)
    config, settings = plain("tiny"), {"rate": 1e-2}
    ours = stack.able(stack.load("ours"), config, training=True)
    band = parity.eager_band(config, batches, 4, 2, **settings)
    assert band.misses(parity.losses(ours, config, batches, 4, **settings)) == []


def test_our_dropout_repeats_with_its_seed_and_changes_with_the_step():
    """At every site, that within attention included: nothing is drawn from PyTorch's generator."""
    config = preset("tiny-gpt2")
    ours = stack.able(stack.load("ours"), config, training=True)
    assert {"attention", "dropout"} <= set(ours.own)
    model, (ids, targets) = built(config, ours), tokens(batch=1, length=5)
    first = model(ids, targets)
    assert torch.equal(first, model(ids, targets))
    step = TrainStep(model, rate=0.0)
    step(ids, targets)
    assert not torch.equal(first, model(ids, targets))


@kinds
def test_the_network_is_traced_whole(kind):
    """torch.compile takes it without a break, and what it traced gives the same numbers."""
    eager = stack.load("torch_compile")
    assert eager.compiled
    model = stack.load("torch_eager").build(plain(kind))
    traced = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    ids, targets = tokens()
    assert torch.equal(traced(ids, targets), model(ids, targets))


def test_a_compiled_stack_keeps_the_names_of_the_weights():
    model = stack.load("torch_compile").build(preset("tiny"))
    assert "model.layers.0.self_attn.q_proj.weight" in model.state_dict()
    assert model._compiled_call_impl is not None


@kinds
def test_a_ladder_puts_in_one_part_more_on_each_rung(kind):
    config, ours = preset(kind), stack.load("ours")
    for training in (True, False):
        rungs = stack.ladder(ours, config, training)
        assert rungs[0].own == () and len(rungs) > 4
        for below, above in itertools.pairwise(rungs):
            assert len(set(above.taken) - set(below.taken)) == 1
        assert (rungs[-1].optimizer is ours.optimizer) == training
        # A fused product comes after the plain one, which would take it out again.
        assert set(rungs[-1].own) == set(stack.able(ours, config, training).own)
        for joined in parts.JOINED:
            mine = getattr(ours.parts, joined) if joined in rungs[-1].own else None
            assert getattr(rungs[-1].parts, joined) is mine
        # A joined part gains over parts of ours, and the optimizer stands for itself.
        added = [rung.name.rpartition(".")[2] for rung in rungs]
        first = next((added.index(name) for name in parts.JOINED if name in added), len(added))
        assert set(added[first:]) <= set(parts.JOINED)

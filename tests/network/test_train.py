"""Training: it learns, repeats itself bit by bit, clips, and stops at a loss that is not finite."""

import copy
import dataclasses
import math

import pytest
import torch

from network import parity, stack, text
from network.config import preset
from network.train import TrainStep
from tests.support.networks import KINDS, built, loss_and_gradients, plain, tokens

kinds = pytest.mark.parametrize("kind", KINDS)
BATCHES = text.Batches(text.as_bytes(text.english()[:20000]), batch=4, length=32)


@kinds
def test_the_loss_falls(kind):
    eager = stack.load(stack.EAGER)
    curve = parity.losses(eager, preset(kind), BATCHES, 60, rate=3e-3, warmup=5)
    assert curve[0] == pytest.approx(math.log(256), abs=0.3)
    assert sum(curve[-5:]) / 5 < curve[0] - 2


@kinds
def test_ten_steps_repeat_bit_by_bit(kind):
    def after_ten_steps():
        torch.manual_seed(1)
        model = stack.load(stack.EAGER).build(preset(kind), seed=1)
        step = TrainStep(model)
        return [step(*BATCHES[number]).item() for number in range(10)], model.state_dict()

    (first, weights), (second, others) = after_ten_steps(), after_ten_steps()
    assert first == second and len(set(first)) == 10
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_step_is_that_of_the_formula():
    """Clipping and AdamW as their papers have them, of one weight and its first step."""
    model, (ids, targets) = built(plain("tiny"), dtype=torch.float64), tokens()
    before = copy.deepcopy(model)
    _, gradients = loss_and_gradients(copy.deepcopy(model), ids, targets)
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
    TrainStep(model, rate=0.01, decay=0.1, clip=norm / 2)(ids, targets)
    for name, decay in (("model.layers.0.mlp.up_proj.weight", 0.1), ("model.norm.weight", 0.0)):
        old, g = before.state_dict()[name], gradients[name] / 2
        # The first moments, freed of their bias, are the gradient and its square.
        expected = old * (1 - 0.01 * decay) - 0.01 * g / (g.abs() + 1e-8)
        assert torch.allclose(model.state_dict()[name], expected, rtol=0, atol=1e-6)


def test_gradients_below_the_clip_stay():
    weights = []
    for clip in (1e6, 1e7):
        model = built(plain("tiny"))
        TrainStep(model, clip=clip)(*tokens())
        weights.append(model.state_dict()["model.norm.weight"])
    assert torch.equal(*weights)


def test_the_rate_rises_through_the_warmup():
    step = TrainStep(built(plain("tiny")), rate=0.4, warmup=4)
    rates = []
    for number in range(6):
        step(*BATCHES[number])
        rates.append(step.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_step(value):
    model = built(plain("tiny"))
    step = TrainStep(model)
    step(*BATCHES[0])
    with torch.no_grad():
        model.roles["norm"].weight[0] = value
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FloatingPointError, match="step 1: the loss is nan; lower the learning"):
        step(*BATCHES[1])
    after = model.state_dict()
    assert all(torch.equal(after[name].nan_to_num(), before[name].nan_to_num()) for name in after)
    step.check = False
    assert not math.isfinite(step(*BATCHES[1]).item())


def test_each_step_draws_dropout_anew():
    model = stack.load(stack.EAGER).build(preset("tiny-gpt2"))
    TrainStep(model.eval())(*tokens())
    assert model.dropout_seed.item() == 1
    assert model.training


def test_the_band_holds_eager_pytorch_and_not_a_stack_with_a_fault():
    settings = {"rate": 3e-3}
    band = parity.eager_band(plain("tiny"), BATCHES, 20, 5, **settings)
    eager = stack.load(stack.EAGER)
    curve = parity.losses(eager, plain("tiny"), BATCHES, 20, **settings)
    assert band.misses(curve) == []
    assert all(width > 0 for width in band.half_width)

    def half(gate, up):
        return torch.nn.functional.silu(gate) * up.detach()

    faulty = stack.Stack("faulty", eager.parts.with_parts(swiglu=half), ("swiglu",))
    told = band.misses(parity.losses(faulty, plain("tiny"), BATCHES, 20, **settings))
    assert told and told[-1].startswith("steps 15 to 19: mean loss ")


def test_a_band_wants_three_seeds_and_whole_windows():
    with pytest.raises(ValueError, match="curves: 2, expected those of three seeds"):
        parity.band([[1.0], [2.0]], 1)
    with pytest.raises(ValueError, match="curve: 3 steps, expected a multiple of 2"):
        parity.means([1.0, 2.0, 3.0], 2)
    band = parity.band([[1.0, 2.0], [1.5, 2.0], [0.5, 2.0]], 1)
    assert (band.centre, band.half_width) == ((1.0, 2.0), (1.0, 0.0))
    assert len(band.misses([2.1, 2.0])) == len(band.misses([math.nan, 2.0])) == 1
    with pytest.raises(ValueError, match="curve: 1 windows, and the band has 2"):
        band.misses([1.0])


class OwnUpdate(torch.optim.SGD):
    """Clips by itself: halves each gradient, so that its call shows."""

    clip = None

    def __init__(self, model, rate, decay):
        super().__init__(model.parameters(), lr=rate, weight_decay=decay)


def test_a_stack_may_have_an_optimizer_of_its_own(monkeypatch):
    clipped = []
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *given: clipped.append(given))
    step = TrainStep(built(plain("tiny")), clip=0.5, optimizer=OwnUpdate)
    step(*tokens())
    assert isinstance(step.optimizer, OwnUpdate) and step.optimizer.clip == 0.5 and not clipped
    TrainStep(built(plain("tiny")))(*tokens())
    assert len(clipped) == 1


def test_an_optimizer_is_put_in_as_a_part_is():
    eager = stack.load(stack.EAGER)
    mine = dataclasses.replace(eager, name="mine", own=("swiglu",), optimizer=OwnUpdate)
    mixed = eager.with_parts_of(mine, "optimizer")
    assert mixed.optimizer is OwnUpdate and mixed.taken == ("optimizer",) and mixed.own == ()
    assert mixed.name == "torch_eager+mine.optimizer"
    config = plain("tiny")
    assert stack.able(mine, config, training=True).taken == ("optimizer", "swiglu")
    assert stack.able(mine, config, training=False).optimizer is None
    names = [rung.name for rung in stack.ladder(mine, config, training=True)]
    assert names[-1] == "torch_eager+mine.swiglu+mine.optimizer" and len(names) == 3
    with pytest.raises(ValueError, match=r"torch_eager: has no optimizer of its own, .* \[\]"):
        mine.with_parts_of(eager, "optimizer")
    curve = parity.losses(mixed, config, BATCHES, 2)
    assert curve[1] != parity.losses(eager, config, BATCHES, 2)[1]


@kinds
def test_our_optimizer_gives_the_weights_of_pytorchs(kind):
    """Three steps with clipping, in which a weight moves by up to 0.03.

    A bias of keys has a gradient of roundings alone, of which AdamW makes steps of some size.
    """
    models = []
    for optimizer in (None, stack.load("ours").optimizer):
        models.append(built(plain(kind)))
        step = TrainStep(models[-1], rate=1e-2, clip=0.1, optimizer=optimizer)
        for number in range(3):
            step(*BATCHES[number])
    assert step.clips_itself and step.optimizer.norm.item() > 0.1
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=5e-4)

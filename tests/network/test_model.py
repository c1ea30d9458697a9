"""The network: what it computes, what it refuses, and that its parts decide nothing else."""

import copy
import dataclasses
import math
from pathlib import Path

import pytest
import torch

from network import model as model_file
from network import stack
from network.angles import frequencies, table
from network.cache import Cache
from network.config import LLAMA, PRESETS, Config, Stretch, preset
from network.parts import NAMES, used
from tests.support.networks import KINDS, apart, built, loss_and_gradients, plain, tokens

kinds = pytest.mark.parametrize("kind", KINDS)


def test_the_model_code_is_short():
    assert len(Path(model_file.__file__).read_text().splitlines()) <= 300


def test_llama_1b_has_the_sizes_of_the_published_one():
    with torch.device("meta"):
        model = model_file.Transformer(
            dataclasses.replace(preset("llama-1b"), length=8), stack.load(stack.EAGER).parts
        )
    assert sum(w.numel() for w in model.parameters()) == 1_235_814_400


def test_gpt2_has_the_weights_of_the_published_one():
    with torch.device("meta"):
        parts = stack.load(stack.EAGER).parts
        model = model_file.Transformer(preset("gpt2-124m"), parts)
    assert sum(w.numel() for w in model.parameters()) == 124_439_808


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_each_preset_calls_only_parts_that_there_are(name):
    for training in (True, False):
        assert set(used(preset(name), training)) < set(NAMES)


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match=r"preset 'huge': not known, expected one of \['gpt2"):
        preset("huge")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_heads": 3}, "heads: 4, expected a multiple of kv_heads 3"),
        ({"head_dim": 15}, "head_dim: 15, expected an even number"),
        ({"dropout": 1.0}, "dropout: 1.0, expected a number from 0 to below 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(preset("tiny"), **change)


@kinds
def test_the_parts_do_not_decide_the_weights(kind):
    eager, ours = (stack.load(name).build(preset(kind), seed=3) for name in ("torch_eager", "ours"))
    for (name, a), (other, b) in zip(
        eager.state_dict().items(), ours.state_dict().items(), strict=True
    ):
        assert name == other and torch.equal(a, b)
    other = stack.load("torch_eager").build(preset(kind), seed=4)
    assert not torch.equal(eager.roles["head"].weight, other.roles["head"].weight)


@kinds
def test_fresh_weights_have_the_deviations_of_gpt2(kind):
    model = stack.load(stack.EAGER).build(preset(kind))
    layer = model.layers[0]
    for weights, expected in ((layer.up[0], 0.02), (layer.out, 0.01), (layer.down, 0.01)):
        assert weights.weight.std().item() == pytest.approx(expected, rel=0.05)
    assert torch.equal(layer.norm1.weight, torch.ones(64))


@kinds
def test_each_weight_counts(kind):
    config = plain(kind)
    _, gradients = loss_and_gradients(built(config, dtype=torch.float64), *tokens())
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


@kinds
def test_no_token_sees_a_later_one(kind):
    model, (ids, _) = built(plain(kind)).eval(), tokens()
    before = model(ids)
    ids[:, 7:] += 1
    after = model(ids % 256)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


@kinds
def test_a_token_sees_where_the_others_stand(kind):
    model, (ids, _) = built(plain(kind)).eval(), tokens()
    before = model(ids)[:, -1]
    ids[:, :2] = ids[:, :2].flip(1)
    assert not torch.allclose(before, model(ids)[:, -1])


def test_rotary_scores_depend_on_the_distance_alone():
    cos, sin = table(preset("tiny"), 40)
    q, k = torch.randn(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rotary = stack.load(stack.EAGER).parts.rotary

    def score(i, j):
        places = torch.tensor([i, j])
        both = torch.stack((q, k)).view(1, 2, 1, 16)
        turned, _ = rotary(both, both, cos[places], sin[places])
        return (turned[0, 0, 0] @ turned[0, 1, 0]).item()

    assert score(3, 1) == pytest.approx(score(30, 28), rel=1e-12)
    assert score(3, 1) != pytest.approx(score(30, 27), rel=1e-3)


def test_a_stretch_leaves_short_waves_and_lengthens_long_ones():
    base = preset("llama-1b")
    plain_ones = frequencies(dataclasses.replace(base, stretch=None))
    stretched = frequencies(base)
    wave = 2 * math.pi / plain_ones
    long, short = wave > 8192 / 1.0, wave < 8192 / 4.0
    assert torch.allclose(stretched[long], plain_ones[long] / 32, rtol=1e-14) and long.sum() > 3
    assert torch.allclose(stretched[short], plain_ones[short], rtol=1e-14) and short.sum() > 3
    between = ~(long | short)
    assert between.any()
    assert (stretched[between] < plain_ones[between]).all()
    assert (stretched[between] > plain_ones[between] / 32).all()


@kinds
def test_targets_of_minus_100_do_not_count(kind):
    model, (ids, targets) = built(plain(kind)), tokens()
    targets[:, 5:] = -100
    short = model(ids[:, :5], targets[:, :5])
    assert model(ids, targets).item() == pytest.approx(short.item(), rel=1e-5)


@kinds
def test_the_loss_is_that_of_the_logits(kind):
    model, (ids, targets) = built(plain(kind), dtype=torch.float64), tokens()
    expected = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    assert model(ids, targets).item() == pytest.approx(expected.item(), rel=1e-12)


def test_dropout_drops_while_training_only():
    model, (ids, _) = built(preset("tiny-gpt2")), tokens()
    first, second = model(ids), model(ids)
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(ids), model(ids))


@kinds
def test_a_copy_stands_alone(kind):
    model, (ids, _) = built(plain(kind)).eval(), tokens()
    before = model(ids)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.5)
    assert torch.equal(model(ids), before)
    assert not torch.allclose(other(ids), before)


def test_more_tokens_than_positions_are_refused():
    model, (ids, _) = built(plain("tiny")), tokens(length=65)
    with pytest.raises(ValueError, match="65 tokens after 0, and the model has 64 positions"):
        model(ids)
    model(ids[:, :64])


def test_an_untied_head_is_a_weight_of_its_own():
    config = dataclasses.replace(preset("tiny"), tied=False)
    model = stack.load(stack.EAGER).build(config)
    assert model.roles["head"].weight is not model.roles["tokens"].weight
    assert "lm_head.weight" in dict(model.named_parameters())


def test_wider_heads_than_the_stream_and_one_key_head_work():
    config = Config(LLAMA, 1, 48, 6, 1, 16, 40, 50, 32, stretch=Stretch(2.0, 1.0, 4.0, 8))
    model, (ids, targets) = built(config, dtype=torch.float64), tokens(vocabulary=50)
    assert model(ids).shape == (2, 12, 50)
    cache = Cache(config, 2, 12, torch.float64)
    assert apart(model(ids, cache=cache), model(ids)[:, -1]) < 1e-12
    assert math.isfinite(model(ids, targets).item())

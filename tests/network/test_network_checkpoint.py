"""Checkpoints: Hugging Face's names and layouts, there and back, and errors that name weights."""

import dataclasses
import json

import pytest
import torch

from network import checkpoint
from network.config import Stretch, preset
from tests.support.networks import KINDS, built, plain, tokens

kinds = pytest.mark.parametrize("kind", KINDS)

LLAMA_FIELDS = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
}
GPT2_FIELDS = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "layer_norm_epsilon": 1e-5,
}


@kinds
def test_weights_return_from_safetensors(kind, tmp_path):
    pytest.importorskip("safetensors", reason="needs the libraries of requirements/network.txt")
    first, other = built(plain(kind), seed=1), built(plain(kind), seed=2)
    checkpoint.save(first, tmp_path)
    checkpoint.load(other, tmp_path)
    ids, _ = tokens()
    assert torch.equal(first(ids), other(ids))


def test_a_checkpoint_in_parts_is_whole(tmp_path):
    safetensors = pytest.importorskip(
        "safetensors.torch", reason="needs the libraries of requirements/network.txt"
    )
    first, other = built(plain("tiny"), seed=1), built(plain("tiny"), seed=2)
    weights = {
        name: w.clone() for name, w in first.state_dict().items() if name != "lm_head.weight"
    }
    place = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(weights)}
    for file in set(place.values()):
        part = {name: weights[name] for name in weights if place[name] == file}
        safetensors.save_file(part, tmp_path / file)
    index = {"weight_map": place}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint.load(other, tmp_path)
    assert torch.equal(first(tokens()[0]), other(tokens()[0]))
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-1\.safetensors: no such file"):
        checkpoint.load(other, tmp_path)


@kinds
def test_short_names_buffers_and_another_dtype_are_taken(kind):
    first, other = built(plain(kind), seed=1), built(plain(kind), seed=2)
    weights = {name.split(".", 1)[1]: w.double() for name, w in first.state_dict().items()}
    del weights["weight"]  # of the tied head
    weights["h.0.attn.bias"] = weights["h.0.attn.masked_bias"] = torch.ones(1)
    weights["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(1)
    checkpoint.load_weights(other, weights)
    assert torch.equal(first(tokens()[0]), other(tokens()[0]))


def test_a_table_with_nan_is_tied_to_itself():
    weights = built(plain("tiny"), seed=2).state_dict()
    weights["model.embed_tokens.weight"] = torch.full((256, 64), torch.nan)
    del weights["lm_head.weight"]
    model = built(plain("tiny"))
    checkpoint.load_weights(model, weights)
    assert model.state_dict()["lm_head.weight"].isnan().all()


def _without(weights, name):
    return {key: value for key, value in weights.items() if key != name}


NORM = "model.norm.weight"
FAULTS = {
    "missing": (lambda w: _without(w, NORM), f"^checkpoint: 1 missing: {NORM}; is it of this conf"),
    "unexpected": (lambda w: w | {"model.extra": w[NORM]}, "1 unexpected: model.extra; is it"),
    "both": (
        lambda w: {f"x{name}": tensor for name, tensor in w.items()},
        r"21 missing: lm_head.weight, .* and 17 more; 21 unexpected: xlm_head.weight, .* 17 more;",
    ),
    "a shape": (lambda w: w | {NORM: torch.ones(65)}, rf"{NORM} has the shape \(65,\), expected"),
    "a head of its own": (
        lambda w: w | {"lm_head.weight": w["lm_head.weight"] + 1},
        "lm_head.weight differs from model.embed_tokens.weight, and the model ties them",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_checkpoint_that_does_not_fit_changes_nothing(what):
    change, words = FAULTS[what]
    model, given = built(plain("tiny"), seed=1), built(plain("tiny"), seed=2).state_dict()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(ValueError, match=words) as told:
        checkpoint.load_weights(model, change(given))
    assert str(told.value).count("\n") < 2
    assert all(torch.equal(before[name], w) for name, w in model.state_dict().items())


def test_the_published_configurations_are_the_presets(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_FIELDS))
    assert checkpoint.config(tmp_path) == preset("llama-1b")
    assert checkpoint.described(GPT2_FIELDS) == preset("gpt2-124m")


def test_rotary_fields_in_one_of_their_own_are_read():
    fields = {k: v for k, v in LLAMA_FIELDS.items() if k not in ("rope_theta", "rope_scaling")}
    rope = LLAMA_FIELDS["rope_scaling"] | {"rope_theta": 500000.0}
    assert checkpoint.described(fields | {"rope_parameters": rope}) == preset("llama-1b")
    rope = {"rope_theta": 10.0, "rope_type": "default"}
    plain_one = checkpoint.described(fields | {"rope_parameters": rope})
    assert (plain_one.theta, plain_one.stretch) == (10.0, None)
    given = {"rope_parameters": {"rope_type": "default"}, "rope_theta": 20.0}
    assert checkpoint.described(fields | given).theta == 20.0
    older = dict(LLAMA_FIELDS["rope_scaling"])
    older["type"] = older.pop("rope_type")
    assert checkpoint.described(LLAMA_FIELDS | {"rope_scaling": older}) == preset("llama-1b")
    assert isinstance(preset("llama-1b").stretch, Stretch)


@pytest.mark.parametrize(
    ("fields", "change", "words"),
    [
        (LLAMA_FIELDS, {"model_type": "mamba"}, "model_type: 'mamba', expected 'llama' or 'gpt2'"),
        (LLAMA_FIELDS, {"hidden_act": "gelu"}, "hidden_act: 'gelu', expected 'silu'"),
        (LLAMA_FIELDS, {"attention_bias": True}, "attention_bias: True, expected False"),
        (LLAMA_FIELDS, {"rope_scaling": {"rope_type": "yarn"}}, "rope_type: 'yarn', expected"),
        (LLAMA_FIELDS, {"rope_scaling": {"type": "linear"}}, "rope_type: 'linear', expected"),
        (GPT2_FIELDS, {"activation_function": "relu"}, "activation_function: 'relu', expected"),
        (GPT2_FIELDS, {"attn_pdrop": 0.2}, "expected one value for all"),
    ],
)
def test_a_network_that_this_code_is_not_is_refused(fields, change, words):
    with pytest.raises(ValueError, match=words):
        checkpoint.described(fields | change)


def test_a_head_of_its_own_returns_too(tmp_path):
    pytest.importorskip("safetensors", reason="needs the libraries of requirements/network.txt")
    config = dataclasses.replace(plain("tiny"), tied=False)
    first, other = built(config, seed=1), built(config, seed=2)
    checkpoint.save(first, tmp_path)
    checkpoint.load(other, tmp_path)
    assert torch.equal(first(tokens()[0]), other(tokens()[0]))

"""Checkpoints in the form of Hugging Face: a configuration in JSON, and weights in safetensors.

A folder holds `config.json` and `model.safetensors`, or the parts that
`model.safetensors.index.json` names. Reading and writing weights needs the distribution
`safetensors`.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from network.config import GPT2, LLAMA, Config, Stretch
from network.model import Transformer

# Buffers that older checkpoints hold: masks of GPT-2, frequencies of Llama. Both are computed here.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
SHOWN = 4


def load_weights(model: Transformer, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy weights by their names into a model, in its dtype and on its device.

    Names may lack the prefix `model.` or `transformer.`, as in the published GPT-2, and a tied head
    may be absent. ValueError if weights are missing, unexpected or of another shape, or if a tied
    head differs from the embedding; the model then is as it was.
    """
    own = model.state_dict()
    names = model.config.family.names
    prefix = names.tokens.split(".")[0]
    head, tokens = f"{names.head}.weight", f"{names.tokens}.weight"
    given = {}
    for name, tensor in weights.items():
        if not f".{name}".endswith(BUFFERS):
            longer = f"{prefix}.{name}"
            given[longer if longer in own else name] = tensor
    if model.config.tied and tokens in given:
        own_head = given.setdefault(head, given[tokens])
        # NaN equals nothing, so a head that is the embedding is not compared with it.
        if own_head is not given[tokens] and not torch.equal(own_head, given[tokens]):
            raise ValueError(f"checkpoint: {head} differs from {tokens}, and the model ties them")
    missing, unexpected = sorted(set(own) - set(given)), sorted(set(given) - set(own))
    if missing or unexpected:
        raise ValueError(
            f"checkpoint: {_listed('missing', missing)}{_listed('unexpected', unexpected)}"
            "is it of this configuration?"
        )
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            shapes = f"{tuple(tensor.shape)}, expected {tuple(own[name].shape)}"
            raise ValueError(f"checkpoint: {name} has the shape {shapes}")
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


def _listed(what, found):
    if not found:
        return ""
    more = "" if len(found) <= SHOWN else f" and {len(found) - SHOWN} more"
    return f"{len(found)} {what}: {', '.join(found[:SHOWN])}{more}; "


def load(model: Transformer, folder: Path | str) -> None:
    """Load the weights of a checkpoint's folder; errors of `load_weights`, FileNotFoundError."""
    from safetensors.torch import load_file

    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    weights = {}
    for file in sorted(files):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / file}: no such file; a checkpoint holds it")
        weights |= load_file(folder / file)
    load_weights(model, weights)


def save(model: Transformer, folder: Path | str) -> None:
    """Write the weights of a model into a folder; a tied head is left out, as is usual."""
    from safetensors.torch import save_file

    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tied:
        del weights[f"{model.config.family.names.head}.weight"]
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def config(folder: Path | str) -> Config:
    """Return what a checkpoint's `config.json` describes; errors of `described`."""
    return described(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))


def described(fields: Mapping[str, object]) -> Config:
    """Return the configuration that the fields of Hugging Face's describe.

    ValueError for a model type other than llama and gpt2, and for a field of a network that this
    model code is not, such as a bias in Llama's projections.
    """
    kind = fields.get("model_type")
    if kind not in ("llama", "gpt2"):
        raise ValueError(f"model_type: {kind!r}, expected 'llama' or 'gpt2'")
    return _llama(fields) if kind == "llama" else _gpt2(fields)


def _expect(fields, **expected):
    for name, value in expected.items():
        if fields.get(name, value) != value:
            raise ValueError(f"{name}: {fields[name]!r}, expected {value!r}")


def _llama(fields):
    _expect(fields, hidden_act="silu", attention_bias=False, mlp_bias=False, attention_dropout=0.0)
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    # Since transformers 5 the rotary fields lie in one of their own.
    rope = {
        "rope_theta": fields.get("rope_theta", 10000.0),
        **(fields.get("rope_parameters") or fields.get("rope_scaling") or {}),
    }
    return Config(
        LLAMA,
        layers=fields["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or width // heads,
        mlp=fields["intermediate_size"],
        vocabulary=fields["vocab_size"],
        length=fields["max_position_embeddings"],
        eps=fields["rms_norm_eps"],
        theta=rope["rope_theta"],
        stretch=_stretch(rope),
        tied=fields.get("tie_word_embeddings", False),
    )


def _stretch(rope):
    # The older name of the field. Passed over, it would give a network without the scaling.
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_type: {kind!r}, expected 'default' or 'llama3'")
    return Stretch(
        factor=rope["factor"],
        low=rope["low_freq_factor"],
        high=rope["high_freq_factor"],
        length=rope["original_max_position_embeddings"],
    )


def _gpt2(fields):
    _expect(
        fields,
        activation_function="gelu_new",
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    sites = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    dropout = {fields.get(name, 0.1) for name in sites}
    if len(dropout) > 1:
        raise ValueError(f"{', '.join(sites)}: {sorted(dropout)}, expected one value for all")
    width, heads = fields["n_embd"], fields["n_head"]
    return Config(
        GPT2,
        layers=fields["n_layer"],
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        mlp=fields.get("n_inner") or 4 * width,
        vocabulary=fields["vocab_size"],
        length=fields["n_positions"],
        eps=fields["layer_norm_epsilon"],
        dropout=dropout.pop(),
        tied=fields.get("tie_word_embeddings", True),
    )

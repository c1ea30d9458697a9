"""The network against Hugging Face's: the same weights give the same logits and gradients.

Random models are made from configurations; nothing is downloaded. Hugging Face's Llama computes its
norms and angles in float32 whatever the weights are, so its float64 is that of float32 in part.
"""

import pytest
import torch

from network import checkpoint, stack
from network.decode import decode
from tests.support.networks import apart, tokens

transformers = pytest.importorskip(
    "transformers", reason="needs the libraries of requirements/network.txt"
)

# No token ends a text, and none is without a gradient.
SMALL = {"vocab_size": 96, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def llama(**changes):
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    config = transformers.LlamaConfig(**SMALL | sizes | changes)
    return transformers.LlamaForCausalLM(config)


def gpt2(**changes):
    sizes = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL | sizes | off | changes))


STRETCH = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "llama": lambda: llama(),
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-stretched": lambda: llama(rope_parameters=STRETCH),
    "gpt2": lambda: gpt2(),
    "gpt2-untied": lambda: gpt2(tie_word_embeddings=False),
}
models = pytest.mark.parametrize("kind", MODELS)
# float32 within their Llama, and float64 throughout; of float32, its rounding in three layers.
BOUNDS = {
    torch.float64: {"llama": 3e-6, "gpt2": 1e-12},
    torch.float32: {"llama": 1e-5, "gpt2": 1e-5},
}


def both(kind, dtype):
    """Their model and ours, with the same weights, none of them at its fresh value."""
    torch.manual_seed(7)
    theirs = MODELS[kind]().to(dtype).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    config = checkpoint.described(theirs.config.to_dict())
    ours = stack.load("torch_eager").build(config, dtype=dtype).eval()
    checkpoint.load_weights(ours, theirs.state_dict())
    return theirs, ours


@models
def test_the_names_are_theirs(kind):
    theirs, ours = both(kind, torch.float32)
    found = {name: tuple(weight.shape) for name, weight in ours.state_dict().items()}
    assert found == {name: tuple(weight.shape) for name, weight in theirs.state_dict().items()}


@models
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_logits_and_gradients_are_theirs(kind, dtype):
    theirs, ours = both(kind, dtype)
    ids, targets = tokens(length=40, vocabulary=96)
    bound = BOUNDS[dtype][kind.split("-")[0]]
    assert apart(ours(ids), theirs(ids).logits) < bound
    ours(ids, targets).backward()
    logits = theirs(ids).logits.flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, targets.flatten()).backward()
    expected = {name: weight.grad for name, weight in theirs.named_parameters()}
    for name, weight in ours.named_parameters():
        assert apart(weight.grad, expected[name]) < 3 * bound, name


@models
def test_greedy_tokens_are_theirs(kind):
    theirs, ours = both(kind, torch.float64)
    ids, _ = tokens(length=9, vocabulary=96)
    mask = torch.ones_like(ids)
    expected = theirs.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(decode(ours, ids, 12), expected[:, 9:])


@models
def test_their_saved_checkpoint_loads(kind, tmp_path):
    theirs, ours = both(kind, torch.float32)
    theirs.save_pretrained(tmp_path)
    fresh = stack.load("torch_eager").build(checkpoint.config(tmp_path), seed=9).eval()
    ids, _ = tokens(vocabulary=96)
    assert not torch.equal(fresh(ids), ours(ids))
    checkpoint.load(fresh, tmp_path)
    assert torch.equal(fresh(ids), ours(ids))


def test_their_model_loads_what_is_saved_here(tmp_path):
    theirs, ours = both("llama", torch.float32)
    theirs.config.save_pretrained(tmp_path)
    checkpoint.save(ours, tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    ids, _ = tokens(vocabulary=96)
    assert torch.equal(again(ids).logits, theirs(ids).logits)

"""Decoding: the cache changes no number, and one that is full says so."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from network import stack
from network.cache import Cache
from network.config import preset
from network.decode import decode
from tests.support.networks import KINDS, apart, built, plain, tokens

kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("pieces", [(12,), (1,) * 12, (5, 1, 1, 4, 1), (11, 1)])
def test_logits_with_a_cache_are_those_without(kind, pieces):
    config = plain(kind)
    model, (ids, _) = built(config, dtype=torch.float64).eval(), tokens()
    whole, cache, read = model(ids), Cache(config, 2, 16, torch.float64), 0
    for piece in pieces:
        logits = model(ids[:, read : read + piece], cache=cache)
        read += piece
        assert apart(logits, whole[:, read - 1]) < 1e-12
        assert cache.used == cache.position.item() == read


@kinds
def test_decoded_tokens_are_the_most_likely_ones(kind):
    model, (ids, _) = built(plain(kind), dtype=torch.float64).eval(), tokens()
    found = decode(model, ids, 6)
    for step in range(6):
        read = torch.cat((ids, found[:, :step]), 1)
        assert torch.equal(found[:, step], model(read)[:, -1].argmax(-1))
    assert len(set(found.flatten().tolist())) > 2


def test_a_cache_serves_again_once_it_is_cleared():
    config = plain("tiny")
    model, (ids, _) = built(config).eval(), tokens()
    cache = Cache(config, 2, 20)
    first = decode(model, ids, 6, cache)
    cache.clear()
    assert torch.equal(first, decode(model, ids, 6, cache))


def test_a_full_cache_says_so():
    config = plain("tiny")
    model, (ids, _) = built(config).eval(), tokens()
    cache = Cache(config, 2, 13)
    with torch.no_grad():
        model(ids, cache=cache)
        model(ids[:, :1], cache=cache)
        with pytest.raises(ValueError, match="full, 13 of 13 positions hold tokens and 1 more"):
            model(ids[:, :1], cache=cache)
    assert cache.used == cache.position.item() == 13


def test_a_decoding_that_will_not_fit_is_refused_before_it_begins():
    config = plain("tiny")
    model, (ids, _) = built(config).eval(), tokens()
    cache = Cache(config, 2, 14)
    with pytest.raises(ValueError, match="0 of 14 positions hold tokens and 15 more"):
        decode(model, ids, 4, cache)
    assert cache.used == 0
    assert decode(model, ids, 3, cache).shape == (2, 3)


REFUSALS = {
    "a cache longer than the model": (
        lambda model, ids: Cache(model.config, 2, 65),
        "65 positions, and the model has 64",
    ),
    "another batch": (
        lambda model, ids: model(ids, cache=Cache(model.config, 3, 20)),
        "2 sequences, and the cache is for 3",
    ),
    "no token": (lambda model, ids: decode(model, ids, 0), "tokens: 0, expected 1 or more"),
    "more tokens than the model has positions": (
        lambda model, ids: decode(model, ids, 54),
        "65 positions, and the model has 64",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refuses(what):
    model, (ids, _) = built(plain("tiny")), tokens()
    call, words = REFUSALS[what]
    with pytest.raises(ValueError, match=words):
        call(model, ids)


def test_dropout_is_off_while_decoding():
    model, (ids, _) = built(preset("tiny-gpt2")), tokens()
    assert torch.equal(decode(model.train(), ids, 5), decode(model.train(), ids, 5))


def test_the_mask_of_a_token_is_made_once_for_all_layers(monkeypatch):
    """A user of PyTorch makes it before the layers; one for each would be timed as PyTorch's."""
    model, (ids, _) = built(plain("tiny")).eval(), tokens()
    seen, attend = [], torch.nn.functional.scaled_dot_product_attention

    def noting(q, k, v, attn_mask=None, **more):
        seen.append(attn_mask)
        return attend(q, k, v, attn_mask=attn_mask, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    cache = Cache(model.config, 2, 20)
    with torch.no_grad():
        model(ids, cache=cache)
        seen.clear()
        model(ids[:, :1], cache=cache)
    assert len(seen) == model.config.layers > 1
    assert seen[0].shape == (2, 1, 1, 20) and all(mask is seen[0] for mask in seen)


@kinds
def test_our_parts_decode_as_pytorch_does(kind):
    config, (ids, _) = plain(kind), tokens()
    ours = stack.able(stack.load("ours"), config, False, dtype=torch.float32, device="cpu")
    assert "decode_token" in ours.taken
    models = [built(config).eval(), built(config, ours).eval()]
    caches = [Cache(config, 2, 20) for _ in models]
    with torch.no_grad():
        for piece in (ids, ids[:, :1], ids[:, 1:4], ids[:, 4:5]):
            expected, logits = (m(piece, cache=c) for m, c in zip(models, caches, strict=True))
            assert apart(logits, expected) < 1e-5
    for one, other in zip(*(c.keys + c.values for c in caches), strict=True):
        assert apart(one, other) < 1e-5


def test_a_compiled_network_decodes_with_one_program_for_all_tokens(monkeypatch):
    plain_model, (ids, _) = built(plain("tiny")), tokens()
    graphs, whole = [], torch.compile

    def counted(graph, given):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda *a, **k: whole(*a, **k, backend=counted))
    compiled = stack.load("torch_compile").build(plain("tiny"))
    compiled.load_state_dict(plain_model.state_dict())
    torch._dynamo.reset()
    assert torch.equal(decode(compiled, ids, 14), decode(plain_model, ids, 14))
    assert len(graphs) == 2, "one for the prompt, one for the tokens after it"


def test_a_compiled_network_copies_no_cache_for_a_token():
    """A rival that copies all keys for each layer would be timed at what nobody runs."""
    config = plain("tiny")
    compiled, (ids, _) = stack.load("torch_compile").build(config), tokens()
    cache = Cache(config, 2, 23)
    torch._dynamo.reset()
    with torch.no_grad():
        _, programs = run_and_get_code(decode, compiled, ids, 4, cache)
    size = ", ".join(map(str, cache.keys[0].shape))
    assert len(programs) == 2 and all(f"(({size})" in each for each in programs)
    assert not [each for each in programs if f"empty_strided_cpu(({size})" in each]

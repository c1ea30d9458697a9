"""How the stack of flash-attn decodes, by a stand-in that does what the library's page says."""

import importlib
import sys
import types

import pytest
import torch

from network import stack
from network.cache import Cache
from tests.support.networks import KINDS, apart, built, plain, tokens

PAGES = ("network.stacks.flash_attn_2", "baselines.flash_attn_2")


def with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    causal=False, rotary_interleaved=True,
):  # fmt: skip
    """Tensors are [batch, position, head, dimension]; lengths are those before k and v."""
    assert cache_seqlens.dtype == torch.int32
    assert rotary_cos is None or not rotary_interleaved
    out = []
    for b, held in enumerate(cache_seqlens.tolist()):
        mine = q[b : b + 1]
        if k is not None:
            new = k[b : b + 1]
            if rotary_cos is not None:
                assert len(rotary_cos) >= k_cache.shape[1]
                places = slice(held, held + len(new[0]))
                turn = stack.load("torch_eager").parts.rotary
                mine, new = turn(mine, new, rotary_cos[places], rotary_sin[places])
            k_cache[b, held : held + new.shape[1]] = new[0]
            v_cache[b, held : held + new.shape[1]] = v[b]
            held += new.shape[1]
        seen = (x[b : b + 1, :held].transpose(1, 2) for x in (k_cache, v_cache))
        grouped = q.shape[2] != k_cache.shape[2]
        mask = torch.ones(mine.shape[1], held, dtype=torch.bool).tril(held - mine.shape[1])
        out.append(
            torch.nn.functional.scaled_dot_product_attention(
                mine.transpose(1, 2), *seen, attn_mask=mask, enable_gqa=grouped
            ).transpose(1, 2)
        )
    return torch.cat(out)


@pytest.fixture
def parts(monkeypatch):
    """The parts of the stack, on a stand-in for the library."""
    library = types.ModuleType("flash_attn")
    library.flash_attn_with_kvcache = with_kvcache
    library.flash_attn_func = library.flash_attn_varlen_func = None
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    for page in PAGES:
        monkeypatch.delitem(sys.modules, page, raising=False)
    found = importlib.import_module(PAGES[0]).PARTS
    yield {name: found[name] for name in ("decode_attention", "decode_token")}
    for page in PAGES:
        sys.modules.pop(page, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [("decode_attention",), ("decode_attention", "decode_token")])
def test_it_decodes_as_pytorch_does(parts, kind, names):
    config, (ids, _) = plain(kind), tokens()
    expected, model = built(config).eval(), built(config).eval()
    model.parts = model.parts.with_parts(**{name: parts[name] for name in names})
    for layer in model.layers:
        layer.parts = model.parts
    caches = [Cache(config, 2, 20) for _ in range(2)]
    with torch.no_grad():
        for piece in (ids, ids[:, :1], ids[:, 1:4], ids[:, 4:5]):
            logits = [m(piece, cache=c) for m, c in zip((expected, model), caches, strict=True)]
            assert apart(logits[1], logits[0]) < 1e-5
    for one, other in zip(*(c.keys + c.values for c in caches), strict=True):
        assert apart(one, other) < 1e-5


@pytest.mark.parametrize("name", ["decode_attention", "decode_token"])
def test_a_gradient_that_the_library_does_not_give_is_refused(parts, name):
    q = torch.ones(1, 2, 1, 16, requires_grad=True)
    tensors, others = (2, 1) if name == "decode_attention" else (4, 3)
    with pytest.raises(ValueError, match="flash-attn has no gradient"):
        parts[name](q, *[torch.ones(1, 2, 1, 16)] * tensors, *[None] * others)

"""flash-attn 2 (Dao, 2024): its attention, norms, rotary embedding and SwiGLU.

It decodes by `flash_attn_with_kvcache`, which turns and writes the new key too.
"""

from flash_attn import flash_attn_with_kvcache

from baselines import flash_attn_2 as library
from network.stacks._gradients import wanted
from network.stacks._norms import with_stream


def _attention(q, k, v, dropout=0.0, seed=None):
    if dropout:
        raise ValueError("attention: its file in baselines/ has no dropout; expected dropout=0")
    return library.attention(q, k, v, causal=True)


def _refuse_gradient(*tensors):
    """The library returns a result without one."""
    if wanted(*tensors):
        raise ValueError("decoding: flash-attn has no gradient of it; decode under torch.no_grad")


def _decode_attention(q, k, v, count):
    _refuse_gradient(q, k, v)
    return library.decode_attention(q, k, v, count.ends())


def _decode_token(q, k, v, keys, values, count, cos, sin):
    _refuse_gradient(q, k, v)
    # The library wants [batch, position, head, dimension]: views, nothing is copied.
    q, k, v, keys, values = (x.transpose(1, 2) for x in (q, k, v, keys, values))
    new = {"k": k, "v": v, "rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
    # Its lengths are those before the new key.
    out = flash_attn_with_kvcache(q, keys, values, cache_seqlens=count.held(), causal=True, **new)
    return out.transpose(1, 2)


PARTS = {
    "rms_norm": with_stream(library.rms_norm),
    "layer_norm": with_stream(library.layer_norm),
    "rotary": library.rotary,
    "attention": _attention,
    "decode_attention": _decode_attention,
    "decode_token": _decode_token,
    "swiglu": library.swiglu,
}

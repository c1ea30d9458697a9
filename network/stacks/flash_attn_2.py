"""flash-attn 2 (Dao, 2024): its attention, norms, rotary embedding and SwiGLU."""

from baselines import flash_attn_2 as library
from network.stacks._norms import with_stream


def _attention(q, k, v, dropout=0.0, seed=None):
    if dropout:
        raise ValueError("attention: its file in baselines/ has no dropout; expected dropout=0")
    return library.attention(q, k, v, causal=True)


PARTS = {
    "rms_norm": with_stream(library.rms_norm),
    "layer_norm": with_stream(library.layer_norm),
    "rotary": library.rotary,
    "attention": _attention,
    "swiglu": library.swiglu,
}

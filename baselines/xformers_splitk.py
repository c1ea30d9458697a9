"""xFormers: memory-efficient attention pinned to its Triton operator, which splits the keys."""

from xformers.ops.fmha import triton_splitk

from baselines import _xformers

LIBRARY = "xformers"


def attention(q, k, v, mask=None, causal=False, window=None):
    return _xformers.attention(q, k, v, mask, causal, window, (triton_splitk.FwOp, None))


def decode_attention(q, k, v, lengths=None):
    return _xformers.decode_attention(q, k, v, lengths, (triton_splitk.FwOp, None))

"""xFormers: memory-efficient attention pinned to FlashAttention-2, the package's or PyTorch's."""

from xformers.ops.fmha import flash

from baselines import _xformers

LIBRARY = "xformers"


def attention(q, k, v, mask=None, causal=False, window=None):
    return _xformers.attention(q, k, v, mask, causal, window, (flash.FwOp, flash.BwOp))


def decode_attention(q, k, v, lengths=None):
    return _xformers.decode_attention(q, k, v, lengths, (flash.FwOp, None))

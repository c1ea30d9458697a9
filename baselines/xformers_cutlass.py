"""xFormers: memory-efficient attention pinned to its CUTLASS operator."""

from xformers.ops.fmha import cutlass

from baselines import _xformers

LIBRARY = "xformers"


def attention(q, k, v, mask=None, causal=False, window=None):
    return _xformers.attention(q, k, v, mask, causal, window, (cutlass.FwOp, cutlass.BwOp))


def attention_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    causal=False,
    window=None,
    softcap=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
):
    options = causal, window, softcap, (cutlass.FwOp, cutlass.BwOp)
    return _xformers.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)


def decode_attention(q, k, v, lengths=None):
    return _xformers.decode_attention(q, k, v, lengths, (cutlass.FwOp, None))

"""FlashAttention-3 (Shah et al., 2024): its extension for Hopper, called through xFormers.

The package flash_attn_3 is the extension alone and bears no version; xFormers has the bindings.
"""

import flash_attn_3._C  # noqa: F401, registers what xFormers calls, or says why it cannot
from xformers.ops.fmha import flash3

from baselines import _xformers

LIBRARY = "xformers"


def attention(q, k, v, mask=None, causal=False, window=None):
    return _xformers.attention(q, k, v, mask, causal, window, (flash3.FwOp, flash3.BwOp))


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
    options = causal, window, softcap, (flash3.FwOp, flash3.BwOp)
    return _xformers.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)


def decode_attention(q, k, v, lengths=None):
    return _xformers.decode_attention(q, k, v, lengths, (flash3.FwOp, None))

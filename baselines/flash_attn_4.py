"""FlashAttention-4: the CuTe DSL kernels of flash-attn, compiled at their first call."""

from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

LIBRARY = "flash-attn-4"


def attention(q, k, v, mask=None, causal=False, window=None, softcap=None):
    if mask is not None:
        raise ValueError("a mask is not offered")
    # The library wants [batch, position, head, dimension]: views, nothing is copied.
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # A window overrides its flag `causal`, so the right size says it.
    bounds = (None, None) if window is None else (window, 0)
    cap = softcap or 0.0
    out, _ = flash_attn_func(q, k, v, causal=causal, window_size=bounds, softcap=cap)
    return out.transpose(1, 2)


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
    # By name: its fourth argument is another one than in FlashAttention-2 and 3.
    out, _ = flash_attn_varlen_func(
        *(q, k, v),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
        # As in `attention`.
        window_size=(None, None) if window is None else (window, 0),
        softcap=softcap or 0.0,
    )
    return out

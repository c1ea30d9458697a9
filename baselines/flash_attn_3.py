"""FlashAttention-3 (Shah et al., 2024): the operators of its extension for Hopper.

They are called as its own interface does, hopper/flash_attn_interface.py of its repository. The
package flash_attn_3 is the extension alone and bears no version; xFormers ships it. The bindings of
xFormers offer no gradients if heads share keys, and no lengths in a cache.
"""

import flash_attn_3._C  # noqa: F401, registers the operators, or says why it cannot
import torch

LIBRARY = "xformers"
_operators = torch.ops.flash_attn_3


def attention(q, k, v, mask=None, causal=False, window=None, softcap=None):
    if mask is not None:
        raise ValueError("a mask is not offered")
    # The library wants [batch, position, head, dimension]: views, nothing is copied.
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _Attention.apply(q, k, v, _options(q, causal, window, softcap)).transpose(1, 2)


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
    packed = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    return _Attention.apply(q, k, v, packed | _options(q, causal, window, softcap))


def decode_attention(q, k, v, lengths=None):
    q, k, v = (_rows_contiguous(x.transpose(1, 2)) for x in (q, k, v))
    ends = None if lengths is None else lengths.int()
    # No number of splits: the library finds one.
    options = _options(q, causal=True, window=None, softcap=None) | {"num_splits": 0}
    return _operators.fwd(q, k, v, seqused_k=ends, **options)[0].transpose(1, 2)


def _options(q, causal, window, softcap):
    return {
        "softmax_scale": q.shape[-1] ** -0.5,
        "is_causal": causal,
        "window_size_left": -1 if window is None else window,
        "window_size_right": 0 if causal else -1,
        "softcap": softcap or 0.0,
    }


def _rows_contiguous(x):
    return x if x.stride(-1) == 1 else x.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, options):
        q, k, v = map(_rows_contiguous, (q, k, v))
        out, lse, *_ = _operators.fwd(q, k, v, **options, num_splits=1)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = map(torch.empty_like, (q, k, v))
        given = _rows_contiguous(dout), q, k, v, out, lse
        _operators.bwd(*given, dq=dq, dk=dk, dv=dv, **ctx.options)
        return dq, dk, dv, None

"""A call of scaled_dot_product_attention pinned to one backend, shared by the files of these."""

import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from baselines._torch_formulas import seen_by


def attention(q, k, v, mask, causal, window, backend):
    if window is not None:
        raise ValueError("a window is not offered")
    if mask is not None and causal:
        raise ValueError("a mask beside causal is not offered")
    if causal and q.shape[2] != k.shape[2]:
        mask, causal = causal_lower_right(q.shape[2], k.shape[2]), False
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )


def block_sparse_attention(q, k, v, seen, backend):
    """Attention over the pairs that are seen: those of `seen_pairs`."""
    return attention(q, k, v, seen, False, None, backend)


def decode_attention(q, k, v, lengths, backend):
    if lengths is None:
        return attention(q, k, v, None, q.shape[2] > 1, None, backend)
    return attention(q, k, v, seen_by(q, k, lengths), False, None, backend)

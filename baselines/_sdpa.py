"""A call of scaled_dot_product_attention pinned to one backend, shared by the files of these."""

import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel


def attention(q, k, v, causal, backend):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

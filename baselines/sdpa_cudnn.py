"""PyTorch's scaled_dot_product_attention, pinned to the cuDNN kernels."""

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LIBRARY = "torch"


def attention(q, k, v, causal=False):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

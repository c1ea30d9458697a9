"""PyTorch's scaled_dot_product_attention, pinned to the memory-efficient kernels."""

from torch.nn.attention import SDPBackend

from baselines import _sdpa

LIBRARY = "torch"


def attention(q, k, v, causal=False):
    return _sdpa.attention(q, k, v, causal, SDPBackend.EFFICIENT_ATTENTION)

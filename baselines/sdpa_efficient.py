"""PyTorch's scaled_dot_product_attention, pinned to the memory-efficient kernels."""

from torch.nn.attention import SDPBackend

from baselines import _sdpa

LIBRARY = "torch"


def attention(q, k, v, mask=None, causal=False, window=None):
    return _sdpa.attention(q, k, v, mask, causal, window, SDPBackend.EFFICIENT_ATTENTION)


def decode_attention(q, k, v, lengths=None):
    return _sdpa.decode_attention(q, k, v, lengths, SDPBackend.EFFICIENT_ATTENTION)

"""PyTorch's scaled_dot_product_attention, pinned to the cuDNN kernels."""

from torch.nn.attention import SDPBackend

from baselines import _sdpa, _torch_formulas

LIBRARY = "torch"
# A user expands the mask of blocks once.
PREPARES = {"block_sparse_attention": {"block_mask": "_seen_pairs"}}
_seen_pairs = _torch_formulas.seen_pairs


def attention(q, k, v, mask=None, causal=False, window=None):
    return _sdpa.attention(q, k, v, mask, causal, window, SDPBackend.CUDNN_ATTENTION)


def decode_attention(q, k, v, lengths=None):
    return _sdpa.decode_attention(q, k, v, lengths, SDPBackend.CUDNN_ATTENTION)


def block_sparse_attention(q, k, v, block_mask, block_size, causal=False):
    return _sdpa.block_sparse_attention(q, k, v, block_mask, SDPBackend.CUDNN_ATTENTION)

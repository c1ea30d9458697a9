"""PyTorch in eager mode: each part as a user of PyTorch writes it.

Every other stack takes from here what it has not of its own.
"""

import torch.nn.functional as F

from baselines import torch_eager as formulas
from network.stacks._norms import with_stream


def embedding(ids, weight):
    return F.embedding(ids, weight)


def attention(q, k, v, dropout=0.0, seed=None):
    """PyTorch chooses the kernel, and draws from its own generator."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped
    )


def decode_attention(q, k, v, count):
    grouped, mask = q.shape[1] != k.shape[1], count.mask(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def gelu(x):
    return formulas.gelu(x, "tanh")


def linear(x, weight, bias=None):
    return F.linear(x, weight, bias)


PARTS = {
    "embedding": embedding,
    "rms_norm": with_stream(formulas.rms_norm),
    "layer_norm": with_stream(formulas.layer_norm),
    "rotary": formulas.rotary,
    "attention": attention,
    "decode_attention": decode_attention,
    "swiglu": formulas.swiglu,
    "gelu": gelu,
    "linear": linear,
    "dropout": formulas.dropout,
    "loss": formulas.linear_cross_entropy,
}

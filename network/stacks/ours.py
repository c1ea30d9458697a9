"""The kernels of this project: each part that has one."""

from kernels.activation import gelu
from kernels.adamw import AdamW
from kernels.attention import attention
from kernels.decode_attention import decode_attention
from kernels.embedding import embedding
from kernels.gated import swiglu
from kernels.layer_norm import layer_norm
from kernels.linear import linear
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.random import dropout
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from network.stacks._linears import with_product
from network.stacks._norms import with_stream
from network.stacks._padded_rows import with_padded_rows
from network.stacks._swiglu_mlp import swiglu_mlp
from network.train import BETAS, EPS, groups


def _attention(q, k, v, probability=0.0, seed=None):
    dropping = {"dropout": probability, "seed": seed} if probability else {}
    return attention(q, k, v, causal=True, **dropping)


def _decode_attention(q, k, v, count):
    return decode_attention(q, k, v, count.lengths)


def _decode_token(q, k, v, keys, values, count, cos, sin):
    given = {"new_k": k, "new_v": v, "cos": cos, "sin": sin}
    return decode_attention(q, keys, values, count.lengths, **given)


def _gelu(x):
    return gelu(x, "tanh")


def _linear_gelu(x, weight, bias=None):
    return linear(x, weight, bias, "gelu_tanh")


def _adamw(model, rate, decay):
    """Clip within the step; moments have the dtype of their weights, as PyTorch's have."""
    return AdamW(groups(model, decay), lr=rate, betas=BETAS, eps=EPS)


OPTIMIZER = _adamw
PARTS = {
    "embedding": embedding,
    "rms_norm": with_stream(rms_norm),
    "layer_norm": with_stream(layer_norm),
    "rotary": rotary,
    "attention": _attention,
    "decode_attention": _decode_attention,
    "decode_token": _decode_token,
    "swiglu": swiglu,
    "gelu": _gelu,
    "linear": with_padded_rows(linear),
    "dropout": dropout,
    "loss": linear_cross_entropy,
    "linear_gelu": _linear_gelu,
    "swiglu_mlp": swiglu_mlp,
    "linears": with_product(linear),
}

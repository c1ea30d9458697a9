"""The kernels of this project: each part that has one, and PyTorch for embedding and decoding."""

from kernels.activation import gelu
from kernels.attention import attention
from kernels.gated import swiglu
from kernels.layer_norm import layer_norm
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.matmul import matmul
from kernels.random import dropout
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from network.stacks._norms import with_stream


def _attention(q, k, v, probability=0.0, seed=None):
    dropping = {"dropout": probability, "seed": seed} if probability else {}
    return attention(q, k, v, causal=True, **dropping)


def _gelu(x):
    return gelu(x, "tanh")


def _linear(x, weight, bias=None, function="none"):
    out = matmul(x.reshape(-1, x.shape[-1]), weight.T, bias, function)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _linear_gelu(x, weight, bias=None):
    return _linear(x, weight, bias, "gelu_tanh")


PARTS = {
    "rms_norm": with_stream(rms_norm),
    "layer_norm": with_stream(layer_norm),
    "rotary": rotary,
    "attention": _attention,
    "swiglu": swiglu,
    "gelu": _gelu,
    "linear": _linear,
    "dropout": dropout,
    "loss": linear_cross_entropy,
    "linear_gelu": _linear_gelu,
}

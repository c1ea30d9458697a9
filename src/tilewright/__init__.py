"""Triton kernels for the parts of a transformer, as functions of PyTorch tensors.

    from tilewright import softmax, rms_norm, matmul, attention

The wheel holds the folder `kernels/` of the study as `tilewright.kernels`, one family of functions
a module. So this package can stand beside another distribution that is named `kernels`. It depends
on PyTorch and Triton alone.
"""

from .kernels.activation import cosh, gelu, leaky_relu, relu, tanh
from .kernels.adamw import AdamW, adamw
from .kernels.attention import attention
from .kernels.attention_varlen import attention_varlen
from .kernels.block_sparse_attention import BlockMask, block_sparse_attention
from .kernels.cross_entropy import cross_entropy
from .kernels.decode_attention import decode_attention
from .kernels.embedding import embedding
from .kernels.gated import geglu, swiglu
from .kernels.layer_norm import layer_norm
from .kernels.linear import linear
from .kernels.linear_cross_entropy import linear_cross_entropy
from .kernels.matmul import matmul
from .kernels.random import dropout, randint
from .kernels.rms_norm import rms_norm
from .kernels.rotary import rotary
from .kernels.search import bucketize
from .kernels.softmax import softmax
from .kernels.transpose import transpose
from .kernels.vector import add, dot, maximum, minimum, mul, scale

__all__ = [
    "AdamW",
    "BlockMask",
    "adamw",
    "add",
    "attention",
    "attention_varlen",
    "block_sparse_attention",
    "bucketize",
    "cosh",
    "cross_entropy",
    "decode_attention",
    "dot",
    "dropout",
    "embedding",
    "geglu",
    "gelu",
    "layer_norm",
    "leaky_relu",
    "linear",
    "linear_cross_entropy",
    "matmul",
    "maximum",
    "minimum",
    "mul",
    "randint",
    "relu",
    "rms_norm",
    "rotary",
    "scale",
    "softmax",
    "swiglu",
    "tanh",
    "transpose",
]

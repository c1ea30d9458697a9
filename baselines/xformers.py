"""xFormers: memory-efficient attention by the operator that it chooses, and its tiled matmul."""

from xformers.ops.tiled_matmul import tiled_matmul

from baselines import _xformers
from baselines._torch_formulas import activate

LIBRARY = "xformers"


def attention(q, k, v, causal=False):
    return _xformers.attention(q, k, v, causal, None)


def matmul(a, b, bias=None, activation="none"):
    # The library's matmul has no epilogue: bias and activation are PyTorch's, as its user has them.
    out = tiled_matmul([[a]], [[b]])[0][0]
    return activate(out if bias is None else out + bias, activation)

"""The epilogue of a product: all that happens to a float32 tile between accumulator and memory.

pre = scale acc + bias
out = activation(pre) (gated: times scale up_acc + up_bias) + residual
"""

import triton
import triton.language as tl

from .._triton.math import LOG2E, gelu_gate, gelu_of, reciprocal, tanh_of

ACTIVATIONS = ("none", "relu", "leaky_relu", "gelu", "gelu_tanh", "silu", "tanh")
LEAKY_SLOPE = tl.constexpr(0.01)


@triton.jit
def affine(
    acc, bias_ptr, scale, rows_ptr, columns_ptr, stride_rows, stride_columns, offs_m, offs_n, M, N,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Return scale rows columns acc + bias, float32 [BLOCK_M, BLOCK_N].

    rows_ptr: factors of rows; columns_ptr: factors of columns. These and bias_ptr may be None.
    Sums in int32 stay so if there is nothing to do.
    """
    if SCALED:
        acc = acc * scale
    if rows_ptr is not None:
        ptrs = rows_ptr + offs_m.to(tl.int64) * stride_rows
        acc = acc * tl.load(ptrs, mask=offs_m < M, other=0.0)[:, None]
    if columns_ptr is not None:
        ptrs = columns_ptr + offs_n.to(tl.int64) * stride_columns
        acc = acc * tl.load(ptrs, mask=offs_n < N, other=0.0)[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
        acc = acc.to(tl.float32) + bias.to(tl.float32)[None, :]
    return acc


@triton.jit
def activated(x, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, BRIEF: tl.constexpr = False):
    """Return the activation of x, float32. PRECISE, BRIEF: as in `_triton/math.py`."""
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "leaky_relu":
        x = tl.maximum(x, x * LEAKY_SLOPE, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "gelu":
        x = gelu_of(x, PRECISE, BRIEF)
    elif ACTIVATION == "gelu_tanh":
        x = x * gelu_gate(x, PRECISE)
    elif ACTIVATION == "silu":
        x = x * reciprocal(1 + tl.exp2(x * -LOG2E), PRECISE)
    elif ACTIVATION == "tanh":
        x = tanh_of(x, PRECISE)
    return x

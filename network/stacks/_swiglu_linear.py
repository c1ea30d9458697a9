"""A gated activation and the product behind it as one part, which keeps less for its gradient.

    out = (silu(gate) up) weightᵀ

Apart, the product keeps the activation's result and the activation keeps its inputs. Here the
inputs alone are kept. The kernel that computes their gradients reads them anyway, and writes the
result once more for the gradient of the weight. Source: Chen et al., "Training deep nets with
sublinear memory cost" (2016), compute again what is cheap.
"""

import torch
from torch.profiler import record_function

from kernels._runtime.autograd import once
from kernels.gated import gated_bwd, gated_fwd
from kernels.linear import linear
from kernels.matmul import matmul
from network.trace import PREFIX


def swiglu_linear(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the product of swiglu(gate, up) and weightᵀ, `[..., C]`.

    Args:
        gate: `[..., N]`, float32, float16 or bfloat16.
        up: as gate.
        weight: `[C, N]`, of their dtype, any strides.

    Returns:
        What `linear(swiglu(gate, up), weight)` does, with the same bits. It is differentiable once.

    Raises:
        TypeError, ValueError: as `swiglu` and `linear` do.
    """
    return _SwigluLinear.apply(gate, up, weight)


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, weight):
        ctx.save_for_backward(gate, up, weight)
        # A profile tells the two apart, as it does in a network that calls one after the other.
        with record_function(PREFIX + "swiglu"):
            y = gated_fwd(gate, up, "silu")
        with record_function(PREFIX + "linear"):
            return linear(y, weight)

    @staticmethod
    @once
    def backward(ctx, dout):
        gate, up, weight = ctx.saved_tensors
        rows = dout.flatten(0, -2)
        with record_function(PREFIX + "linear"):
            dy = matmul(rows, weight).view(gate.shape)
        with record_function(PREFIX + "swiglu"):
            dgate, dup, y = gated_bwd(gate, up, dy, "silu", ctx.needs_input_grad[2])
        if y is None:
            return dgate, dup, None
        with record_function(PREFIX + "linear"):
            return dgate, dup, matmul(rows.T, y.flatten(0, -2))

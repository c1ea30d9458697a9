"""A gated MLP as one part, which takes fewer passes over memory and keeps less for its gradient.

    z = h gateᵀ,  u = h upᵀ,  y = silu(z) u,  out = y downᵀ

Apart, four calls write z, u and y, read z and u, and keep all three. Here the two products with h
are one, and their epilogue computes y. z and u are kept, and y is not. The kernel that computes
their gradients reads them anyway, and writes y once more for the gradient of down. Source: Chen et
al., "Training deep nets with sublinear memory cost" (2016), compute again what is cheap.
"""

import torch

from kernels._runtime.autograd import needs_grad, once
from kernels.gated import gated_bwd, swiglu
from kernels.linear import linear
from kernels.matmul import matmul
from kernels.matmul_details.tiles import FEW_ROWS
from network.profile_names import operation

# Tokens below which a product is bound by its weights. Then the products stay apart, each with
# programs of its own. If they are so few that the launches count, at most FEW_ROWS, one has both.
FEW = 128


def swiglu_mlp(
    h: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Return y downᵀ, `[..., C]`; the products are accumulated in float32.

    Args:
        h: `[..., C]`, float32, float16 or bfloat16.
        gate: `[N, C]`, of that dtype, any strides.
        up: as gate.
        down: `[C, N]`, of that dtype, any strides.

    Returns:
        A new tensor with the shape of h. It is differentiable once in each argument.

    Raises:
        TypeError, ValueError: as `linear` does.
    """
    if needs_grad(h, gate, up, down):
        return _SwigluMLP.apply(h, gate, up, down)
    if FEW_ROWS * h.shape[-1] < h.numel() < FEW * h.shape[-1]:
        return linear(swiglu(linear(h, gate), linear(h, up)), down)
    return linear(linear(h, gate, activation="silu", up=up), down)


class _SwigluMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, gate, up, down):
        # A profile tells products from the activation, as in a network that calls them apart.
        with operation("linear"):
            products = {"activation": "silu", "up": up.T, "save_preactivation": True}
            y, z, u = matmul(h.flatten(0, -2), gate.T, **products)
            ctx.save_for_backward(h, gate, up, down, z, u)
            return linear(y, down).view(h.shape)

    @staticmethod
    @once
    def backward(ctx, dout):
        h, gate, up, down, z, u = ctx.saved_tensors
        wants_h, wants_gate, wants_up, wants_down = ctx.needs_input_grad
        dout, rows = dout.flatten(0, -2), h.flatten(0, -2)
        dh = dgate = dup = ddown = None
        with operation("linear"):
            dy = matmul(dout, down)
        with operation("swiglu"):
            dz, du, y = gated_bwd(z, u, dy, "silu", wants_down)
        # Each is as large as what is kept.
        del dy
        with operation("linear"):
            if wants_down:
                ddown = matmul(dout.T, y)
            del y
            if wants_h:
                dh = matmul(du, up, residual=matmul(dz, gate)).view(h.shape)
            if wants_gate:
                dgate = matmul(dz.T, rows)
            if wants_up:
                dup = matmul(du.T, rows)
        return dh, dgate, dup, ddown

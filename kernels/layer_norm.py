"""Layer norm over the last dimension, forward and backward, with a fused residual sum if wanted.

forward: y = w (s - mean) r + b with r = 1 / sqrt(var + eps), where s is x, or x + residual, which
is returned too. backward, with h = (s - mean) r and g = w dy: dx = r (g - mean g - h mean(g h)),
to which the gradient of s is added and which is that of the residual too; dw = sum of dy h over
the rows, db = sum of dy. Ba, Kiros and Hinton (2016) proposed it.

Bytes: forward reads x (and the residual) and writes y (and s); backward reads s and dy (and ds)
and writes dx; the weights are small beside them. FLOPs: about 8 and 12 an element, so memory
decides. The kernels, and why they are as they are: `_norm_forward.py` and `_norm_backward.py`.
"""

import torch

from kernels._checks import number
from kernels._contract import PASSES, Op, Tensor, in_turn
from kernels._launch import needs_grad, once
from kernels._norm import NORM_DRAWN, NORM_EDGE, NORM_FLAGS, NORM_SWEEP, norm_cost
from kernels._norm_backward import backward_configs, norm_backward
from kernels._norm_forward import forward_configs, norm_forward


def layer_norm_reference(x, weight, bias, eps, residual=None):
    total = x if residual is None else x + residual
    centred = total - total.mean(dim=-1, keepdim=True)
    variance = (centred * centred).mean(dim=-1, keepdim=True)
    y = centred / torch.sqrt(variance + eps) * weight + bias
    return y if residual is None else (y, total)


def _cost(a_case, direction, itemsize):
    return norm_cost(a_case, direction, itemsize, 2, 8 if direction == "forward" else 12)


LAYER_NORM = Op(
    "layer_norm",
    layer_norm_reference,
    {
        "x": Tensor("M N"),
        "weight": Tensor("N", tame=True),
        "bias": Tensor("N", tame=True),
        "residual": Tensor("M N", when="residual"),
    },
    in_turn(_cost),
    edge=NORM_EDGE,
    sweep=NORM_SWEEP,
    passes=PASSES,
    drawn=NORM_DRAWN,
    params={"eps": 1e-5},
    flags=NORM_FLAGS,
)
ACCUMULATES = {"layer_norm": "float32"}

FORWARD = forward_configs("layer_norm")
FORWARD_LOOP, FORWARD_ROW, FORWARD_SPLIT, _ = FORWARD
BACKWARD = BACKWARD_ROW, BACKWARD_SPLIT, BACKWARD_SUMS, BACKWARD_TILE, SUM_PARTS = backward_configs(
    "layer_norm"
)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, eps):
        y, total, stats = norm_forward(FORWARD, x, residual, weight, bias, eps, True, True)
        ctx.save_for_backward(x if total is None else total, weight, bias, stats)
        return y if total is None else (y, total)

    @staticmethod
    @once
    def backward(ctx, dy, ds=None):
        x, weight, bias, stats = ctx.saved_tensors
        dx, dw, db = norm_backward(BACKWARD, x, weight, bias, stats, dy, ds, True)
        return dx, dw, db, None if ds is None else dx, None


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Layer norm over the last dimension, computed in float32.

    x: [..., N]; weight, bias: [N], or None for ones and zeros; residual: shape and dtype of x, or
    None; float32, float16 or bfloat16. Returns y, of the shape and dtype of x; with a residual
    (y, s): s = x + residual is what was normalized. Differentiable in all tensors given. Raises
    TypeError for another dtype, ValueError for a shape or device that does not fit x.
    """
    eps = number("eps", eps)
    if needs_grad(x, weight, bias, residual):
        return _LayerNorm.apply(x, weight, bias, residual, eps)
    y, total, _ = norm_forward(FORWARD, x, residual, weight, bias, eps, True, False)
    return y if residual is None else (y, total)

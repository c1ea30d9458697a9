"""Layer norm over the last dimension, forward and backward, with a fused residual sum if wanted.

forward: y = w (s - mean) r + b with r = 1 / sqrt(var + eps), where s is x, or x + residual, which
is returned too. backward, with h = (s - mean) r and g = w dy: dx = r (g - mean g - h mean(g h)),
to which the gradient of s is added and which is that of the residual too; dw = sum of dy h over
the rows, db = sum of dy. Ba, Kiros and Hinton (2016) proposed it.

Memory decides: `ops/layer_norm.py` counts bytes and FLOPs. The kernels, and why they are as they
are: `norm_details/forward.py` and `norm_details/backward.py`.
"""

import torch

from ._runtime.autograd import needs_grad, once
from ._runtime.checks import check_number
from .norm_details.backward import backward_configs, norm_backward
from .norm_details.forward import forward_configs, norm_forward

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
    eps = check_number("eps", eps)
    if needs_grad(x, weight, bias, residual):
        return _LayerNorm.apply(x, weight, bias, residual, eps)
    y, total, _ = norm_forward(FORWARD, x, residual, weight, bias, eps, True, False)
    return y if residual is None else (y, total)

"""RMS norm over the last dimension, forward and backward, with a fused residual sum if wanted.

forward: y = w s r with r = 1 / sqrt(mean(s s) + eps), where s is x, or x + residual, which is
returned too. backward, with h = s r and g = w dy: dx = r (g - h mean(g h)), to which the gradient
of s is added and which is that of the residual too; dw = sum of dy h over the rows. Zhang and
Sennrich (2019) proposed it.

Memory decides: `ops/rms_norm.py` counts bytes and FLOPs. The kernels, and why they are as they are:
`norm_details/forward.py` and `norm_details/backward.py`.
"""

import torch

from ._runtime.autograd import needs_grad, once
from ._runtime.checks import check_number
from .norm_details.backward import RMS_PAIR, RMS_SPLIT_FORMS, backward_configs, norm_backward
from .norm_details.backward_two_pass import RMS_TILE
from .norm_details.forward import RMS_TILES, forward_configs, norm_forward

ACCUMULATES = {"rms_norm": "float32"}

FORWARD = forward_configs("rms_norm", RMS_TILES)
FORWARD_LOOP, FORWARD_ROW, FORWARD_SPLIT, _ = FORWARD
BACKWARD = BACKWARD_ROW, BACKWARD_SPLIT, BACKWARD_SUMS, BACKWARD_TILE, SUM_PARTS = backward_configs(
    "rms_norm", RMS_TILE, RMS_SPLIT_FORMS, RMS_PAIR
)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, residual, eps):
        y, total, stats = norm_forward(FORWARD, x, residual, weight, None, eps, False, True)
        ctx.save_for_backward(x if total is None else total, weight, stats)
        return y if total is None else (y, total)

    @staticmethod
    @once
    def backward(ctx, dy, ds=None):
        x, weight, stats = ctx.saved_tensors
        dx, dw, _ = norm_backward(BACKWARD, x, weight, None, stats, dy, ds, False)
        return dx, dw, None if ds is None else dx, None


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMS norm over the last dimension, computed in float32.

    x: [..., N]; weight: [N], or None for ones; residual: shape and dtype of x, or None; float32,
    float16 or bfloat16. Returns y, of the shape and dtype of x; with a residual (y, s):
    s = x + residual is what was normalized. Differentiable in all tensors given. Raises TypeError
    for another dtype, ValueError for a shape or device that does not fit x.
    """
    eps = check_number("eps", eps)
    if needs_grad(x, weight, residual):
        return _RMSNorm.apply(x, weight, residual, eps)
    y, total, _ = norm_forward(FORWARD, x, residual, weight, None, eps, False, False)
    return y if residual is None else (y, total)

"""RMS norm over the last dimension, forward and backward, with a fused residual sum if wanted.

    forward   y = w xhat, with xhat = s rstd and rstd = 1 / sqrt(mean(s s) + eps)
    backward  dx = rstd (g - xhat c1) + ds, with g = w dy and c1 = mean(g xhat)
              dw = sum over rows of dy xhat

The sum s is x, or x + residual, which is returned too and has the gradient ds. The gradient of the
residual is dx. Memory traffic limits both passes; `ops/rms_norm.py` counts bytes and FLOPs. Layer
norm has the same kernels: `norm_details/forward.py` and `norm_details/backward.py`.

Source: Zhang and Sennrich, "Root mean square layer normalization" (2019).
"""

import torch

from ._runtime.autograd import needs_grad, once
from ._runtime.checks import check_number
from .norm_details.backward import norm_backward
from .norm_details.backward_tiles import RMS_PAIR, RMS_SPLIT_FORMS, RMS_TILE, backward_configs
from .norm_details.forward import norm_forward
from .norm_details.forward_tiles import RMS_TILES, forward_configs

ACCUMULATES = {"rms_norm": "float32"}


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the RMS norm of x over the last dimension, computed in float32.

    Args:
        x: `[..., N]`, float32, float16 or bfloat16.
        weight: `[N]`, of any of these dtypes, or None for ones.
        eps: added to the mean of the squares under the square root.
        residual: shape and dtype of x, added to x first; or None.

    Returns:
        y, a new tensor with the shape and dtype of x. With a residual the result is (y, s), where
        s = x + residual is the tensor that was normalized. Both are differentiable in all tensors.

    Raises:
        TypeError: a tensor is no tensor or has another dtype, or eps is no number.
        ValueError: the shape of a tensor does not fit x, or x has no dimension. A tensor is not on
            the device of x, or is neither on a GPU nor in the interpreter. A tensor has a tangent
            of forward-mode differentiation.

    Source:
        Zhang and Sennrich, "Root mean square layer normalization" (2019).

    Example:
        >>> x = torch.randn(4, 100, device="cuda")
        >>> rms_norm(x).shape
        torch.Size([4, 100])
    """
    eps = check_number("eps", eps)
    if needs_grad(x, weight, residual):
        return _RMSNorm.apply(x, weight, residual, eps)
    y, x_plus_residual, _ = norm_forward(FORWARD, x, residual, weight, None, eps, False, False)
    return y if residual is None else (y, x_plus_residual)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, residual, eps):
        y, x_plus_residual, stats = norm_forward(
            FORWARD, x, residual, weight, None, eps, False, True
        )
        ctx.save_for_backward(x if residual is None else x_plus_residual, weight, stats)
        return y if residual is None else (y, x_plus_residual)

    @staticmethod
    @once
    def backward(ctx, dy, ds=None):
        x, weight, stats = ctx.saved_tensors
        dx, dw, _ = norm_backward(BACKWARD, x, weight, None, stats, dy, ds, False)
        return dx, dw, None if ds is None else dx, None


FORWARD = forward_configs("rms_norm", RMS_TILES)
FORWARD_LOOP, FORWARD_ROW, FORWARD_SPLIT, _ = FORWARD
BACKWARD = BACKWARD_ROW, BACKWARD_SPLIT, BACKWARD_SUMS, BACKWARD_TILE, SUM_PARTS = backward_configs(
    "rms_norm", RMS_TILE, RMS_SPLIT_FORMS, RMS_PAIR
)

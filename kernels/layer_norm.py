"""Layer norm over the last dimension, forward and backward, with a fused residual sum if wanted.

    forward   y = w xhat + b, with xhat = (s - mean) rstd and rstd = 1 / sqrt(variance + eps)
    backward  dx = rstd (g - xhat c1 - c2) + ds, with g = w dy, c1 = mean(g xhat), c2 = mean(g)
              dw = sum over rows of dy xhat, db = sum over rows of dy

The sum s is x, or x + residual, which is returned too and has the gradient ds. The gradient of the
residual is dx. A float32 residual may stand beside x of 16 bits; then s and the gradient of the
residual are float32.

Memory traffic limits both passes; `ops/layer_norm.py` counts bytes and FLOPs. RMS norm has the same
kernels: `norm_details/forward.py` and `norm_details/backward.py`.

Source: Ba, Kiros and Hinton, "Layer normalization" (2016).
"""

import torch

from ._runtime.autograd import needs_grad, once
from ._runtime.checks import check_number
from .norm_details.backward import norm_backward
from .norm_details.backward_tiles import backward_configs
from .norm_details.forward import norm_forward
from .norm_details.forward_tiles import forward_configs

ACCUMULATES = {"layer_norm": "float32"}


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the layer norm of x over the last dimension, computed in float32.

    Args:
        x: `[..., N]`, float32, float16 or bfloat16.
        weight: `[N]`, of any of these dtypes, or None for ones.
        bias: `[N]`, of any of these dtypes, or None for zeros.
        eps: added to the variance under the square root.
        residual: shape of x, added to x first; of the dtype of x, or float32; or None.

    Returns:
        y, a new tensor with the shape and dtype of x. With a residual the result is (y, s), where
        s = x + residual is the tensor that was normalized, in the dtype of the residual. Both are
        differentiable in all tensors.

    Raises:
        TypeError: a tensor is no tensor or has another dtype, or eps is no number.
        ValueError: the shape of a tensor does not fit x, or x has no dimension. A tensor is not on
            the device of x, or is neither on a GPU nor in the interpreter. A tensor has a tangent
            of forward-mode differentiation.

    Source:
        Ba, Kiros and Hinton, "Layer normalization" (2016).

    Example:
        >>> x = torch.randn(4, 100, device="cuda")
        >>> layer_norm(x).shape
        torch.Size([4, 100])
    """
    eps = check_number("eps", eps)
    if needs_grad(x, weight, bias, residual):
        return _LayerNorm.apply(x, weight, bias, residual, eps)
    y, x_plus_residual, _ = norm_forward(
        FORWARD, x, residual, weight, bias, eps, True, False, False
    )
    return y if residual is None else (y, x_plus_residual)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, eps):
        y, x_plus_residual, stats = norm_forward(
            FORWARD, x, residual, weight, bias, eps, True, False, True
        )
        ctx.save_for_backward(x if residual is None else x_plus_residual, weight, bias, stats)
        return y if residual is None else (y, x_plus_residual)

    @staticmethod
    @once
    def backward(ctx, dy, ds=None):
        x, weight, bias, stats = ctx.saved_tensors
        dx, dw, db, dr = norm_backward(BACKWARD, x, weight, bias, stats, dy, ds, True, False)
        # Only a sum of another dtype than that of x has a gradient of its own.
        dr = dx if dr is None else dr
        return dx, dw, db, None if ds is None else dr, None


FORWARD = forward_configs("layer_norm")
FORWARD_LOOP, FORWARD_ROW, FORWARD_SPLIT, _ = FORWARD
BACKWARD = BACKWARD_ROW, BACKWARD_SPLIT, BACKWARD_SUMS, BACKWARD_TILE, SUM_PARTS = backward_configs(
    "layer_norm"
)

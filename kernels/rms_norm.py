"""RMS norm over the last dimension, forward and backward, with a fused residual sum if wanted.

    forward   y = w xhat, with xhat = s rstd and rstd = 1 / sqrt(mean(s s) + eps)
    backward  dx = rstd (g - xhat c1) + ds, with g = w dy and c1 = mean(g xhat)
              dw = sum over rows of dy xhat

The sum s is x, or x + residual, which is returned too and has the gradient ds. The gradient of the
residual is dx. A float32 residual may stand beside x of 16 bits; then s and the gradient of the
residual are float32. Gemma's norm has 1 + w in the place of w.

Memory traffic limits both passes; `ops/rms_norm.py` counts bytes and FLOPs. Layer norm has the same
kernels: `norm_details/forward.py` and `norm_details/backward.py`.

Source: Zhang and Sennrich, "Root mean square layer normalization" (2019).
"""

import torch

from ._runtime.autograd import needs_grad, once
from ._runtime.checks import check_flag, check_number
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
    *,
    add_unit_offset: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the RMS norm of x over the last dimension, computed in float32.

    The only rounding to the dtype of x is that of y, after the product with the weight. Gemma's
    implementation casts at the same place, and Liger-Kernel calls this mode "gemma". Llama's casts
    x / rms to the dtype of x before the product; this function has no such mode, whose result
    differs by that rounding.

    Args:
        x: `[..., N]`, float32, float16 or bfloat16.
        weight: `[N]`, of any of these dtypes, or None for ones.
        eps: added to the mean of the squares under the square root.
        residual: shape of x, added to x first; of the dtype of x, or float32; or None.
        add_unit_offset: the factor is 1 + weight, as in Gemma, whose weights lie around zero.

    Returns:
        y, a new tensor with the shape and dtype of x. With a residual the result is (y, s), where
        s = x + residual is the tensor that was normalized, in the dtype of the residual. Both are
        differentiable in all tensors.

    Raises:
        TypeError: a tensor is no tensor or has another dtype, eps is no number, or
            add_unit_offset is no bool.
        ValueError: the shape of a tensor does not fit x, or x has no dimension. A tensor is not on
            the device of x, or is neither on a GPU nor in the interpreter. A tensor has a tangent
            of forward-mode differentiation. add_unit_offset is True without a weight.

    Source:
        Zhang and Sennrich, "Root mean square layer normalization" (2019); the offset: Gemma Team,
        "Gemma: Open models based on Gemini research and technology" (2024).

    Example:
        >>> x = torch.randn(4, 100, device="cuda")
        >>> rms_norm(x).shape
        torch.Size([4, 100])
    """
    eps = check_number("eps", eps)
    if check_flag("add_unit_offset", add_unit_offset) and weight is None:
        raise ValueError("add_unit_offset: True without a weight, expected a weight to add it to")
    if needs_grad(x, weight, residual):
        return _RMSNorm.apply(x, weight, residual, eps, add_unit_offset)
    y, x_plus_residual, _ = norm_forward(
        FORWARD, x, residual, weight, None, eps, False, add_unit_offset, False
    )
    return y if residual is None else (y, x_plus_residual)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, residual, eps, unit_offset):
        y, x_plus_residual, stats = norm_forward(
            FORWARD, x, residual, weight, None, eps, False, unit_offset, True
        )
        ctx.unit_offset = unit_offset
        ctx.save_for_backward(x if residual is None else x_plus_residual, weight, stats)
        return y if residual is None else (y, x_plus_residual)

    @staticmethod
    @once
    def backward(ctx, dy, ds=None):
        x, weight, stats = ctx.saved_tensors
        dx, dw, _, dr = norm_backward(
            BACKWARD, x, weight, None, stats, dy, ds, False, ctx.unit_offset
        )
        # Only a sum of another dtype than that of x has a gradient of its own.
        dr = dx if dr is None else dr
        return dx, dw, None if ds is None else dr, None, None


FORWARD = forward_configs("rms_norm", RMS_TILES)
FORWARD_LOOP, FORWARD_ROW, FORWARD_SPLIT, _ = FORWARD
BACKWARD = BACKWARD_ROW, BACKWARD_SPLIT, BACKWARD_SUMS, BACKWARD_TILE, SUM_PARTS = backward_configs(
    "rms_norm", RMS_TILE, RMS_SPLIT_FORMS, RMS_PAIR
)

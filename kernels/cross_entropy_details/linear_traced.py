"""Tensors like the results of the fused cross entropy, which a traced graph asks for."""

import torch

from .reduction import defers_mean


def like_forward(x, weight, bias, targets, *options):
    """Return tensors as the results of `linear_cross_entropy_fwd` that are there."""
    reduction, dtype, wants_penalty, wanted, wide = options[4:]
    losses = x.new_empty(targets.shape if reduction == "none" else (), dtype=dtype)
    later = any(wanted) and defers_mean(x.dtype, reduction)
    made = [losses, *_gradients_like(x, weight, wanted, wide or later)]
    made += [x.new_empty((), dtype=torch.float32)] * later
    return made + ([torch.empty_like(losses)] if wants_penalty else [])


def like_backward(dlosses, x, weight, bias, targets, *options):
    """Return tensors as the results of `linear_cross_entropy_bwd` that are there."""
    return _gradients_like(x, weight, *options[-2:])


def _gradients_like(x, weight, wanted, wide):
    """Return tensors as the gradients that are wanted, of x, weight and bias; wide: of float32."""
    dtype = torch.float32 if wide else x.dtype
    made = (
        x.new_empty(x.shape),
        x.new_empty(weight.shape, dtype=dtype),
        x.new_empty(weight.shape[:1], dtype=torch.float32),
    )
    return [each for each, there in zip(made, wanted, strict=True) if there]

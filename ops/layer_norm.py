"""Layer norm over the last dimension, with a fused residual sum if wanted.

    forward   y = w (s - mean) r + b, r = 1 / sqrt(var + eps)
    backward  dx = r (g - mean g - h mean(g h)) + ds, h = (s - mean) r, g = w dy
              dw = sum of dy h over the rows, db = sum of dy

The sum s is x, or x + residual, which is returned too and has the gradient ds. The gradient of the
residual is dx. A float32 residual makes s float32, and y has the dtype of x. Without vectors w is
one and b zero. Ba, Kiros and Hinton (2016) proposed the norm.

Bytes: forward reads x (and the residual) and writes y (and s); backward reads s and dy (and ds)
and writes dx; the weights are small beside them. FLOPs: 8 and 12 an element. Cases:
`_norm_cases.py`.
"""

import torch

from ops._norm_cases import NORM_DRAWN, NORM_EDGE, NORM_FLAGS, NORM_SWEEP, norm_cost
from ops._spec import PASSES, Op, Tensor, in_turn


def layer_norm_reference(x, weight, bias, eps, residual=None):
    total = x if residual is None else x + residual
    centred = total - total.mean(dim=-1, keepdim=True)
    variance = (centred * centred).mean(dim=-1, keepdim=True)
    y = centred / torch.sqrt(variance + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    y = y.to(x.dtype)
    return y if residual is None else (y, total)


def _cost(case, pass_, itemsize):
    return norm_cost(case, pass_, itemsize, 2, 8 if pass_ == "forward" else 12)


LAYER_NORM = Op(
    "layer_norm",
    layer_norm_reference,
    {
        "x": Tensor("M N"),
        "weight": Tensor("N", tame=True, unless="bare"),
        "bias": Tensor("N", tame=True, unless="bare"),
        "residual": Tensor("M N", when="residual", wide="wide"),
    },
    in_turn(_cost),
    edge=NORM_EDGE,
    sweep=NORM_SWEEP,
    passes=PASSES,
    drawn=NORM_DRAWN,
    params={"eps": 1e-5},
    flags=NORM_FLAGS,
)

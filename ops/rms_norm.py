"""RMS norm over the last dimension, with a fused residual sum if wanted.

    forward   y = w s r, r = 1 / sqrt(mean(s s) + eps)
    backward  dx = r (g - h mean(g h)) + ds, h = s r, g = w dy
              dw = sum of dy h over the rows

The sum s is x, or x + residual, which is returned too and has the gradient ds. The gradient of the
residual is dx. Zhang and Sennrich (2019) proposed the norm.

Bytes: forward reads x (and the residual) and writes y (and s); backward reads s and dy (and ds)
and writes dx; the weights are small beside them. FLOPs: 4 and 9 an element. Cases:
`_norm_cases.py`.
"""

import torch

from ops._norm_cases import NORM_DRAWN, NORM_EDGE, NORM_FLAGS, NORM_SWEEP, norm_cost
from ops._spec import PASSES, Op, Tensor, in_turn


def rms_norm_reference(x, weight, eps, residual=None):
    total = x if residual is None else x + residual
    square = (total * total).mean(dim=-1, keepdim=True)
    y = total / torch.sqrt(square + eps) * weight
    return y if residual is None else (y, total)


def _cost(a_case, direction, itemsize):
    return norm_cost(a_case, direction, itemsize, 1, 4 if direction == "forward" else 9)


RMS_NORM = Op(
    "rms_norm",
    rms_norm_reference,
    {
        "x": Tensor("M N"),
        "weight": Tensor("N", tame=True),
        "residual": Tensor("M N", when="residual"),
    },
    in_turn(_cost),
    edge=NORM_EDGE,
    sweep=NORM_SWEEP,
    passes=PASSES,
    drawn=NORM_DRAWN,
    params={"eps": 1e-6},
    flags=NORM_FLAGS,
)

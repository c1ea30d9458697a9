"""RMS norm over the last dimension, with a fused residual sum if wanted.

    forward   y = w s r, r = 1 / sqrt(mean(s s) + eps)
    backward  dx = r (g - h mean(g h)) + ds, h = s r, g = w dy
              dw = sum of dy h over the rows

The sum s is x, or x + residual, which is returned too and has the gradient ds. The gradient of the
residual is dx. A float32 residual makes s float32, and y has the dtype of x. Without a weight w is
one. "unit_offset": 1 + w stands in its place, as in Gemma. Zhang and Sennrich (2019) proposed the
norm.

Bytes: forward reads x (and the residual) and writes y (and s); backward reads s and dy (and ds)
and writes dx; the weights are small beside them. FLOPs: 4 and 9 an element. Cases:
`_norm_cases.py`.
"""

import torch

from ops._norm_cases import NORM_DRAWN, NORM_EDGE, NORM_FLAGS, NORM_SWEEP, norm_cost
from ops._spec import PASSES, Op, Tensor, in_turn, make_case


def rms_norm_reference(x, weight, eps, residual=None, add_unit_offset=False):
    total = x if residual is None else x + residual
    square = (total * total).mean(dim=-1, keepdim=True)
    y = total / torch.sqrt(square + eps)
    if weight is not None:
        y = y * (1 + weight if add_unit_offset else weight)
    y = y.to(x.dtype)
    return y if residual is None else (y, total)


def _cost(case, pass_, itemsize):
    return norm_cost(case, pass_, itemsize, 1, 4 if pass_ == "forward" else 9)


RMS_NORM = Op(
    "rms_norm",
    rms_norm_reference,
    {
        "x": Tensor("M N"),
        "weight": Tensor("N", tame=True, unless="bare"),
        "residual": Tensor("M N", when="residual", wide="wide"),
    },
    in_turn(_cost),
    edge=(
        *NORM_EDGE,
        make_case("unit_offset", M=5, N=200),
        make_case("unit_offset", M=2, N=9000, dtypes=("float16",)),
        make_case("unit_offset", M=1, N=66000, dtypes=("bfloat16",)),
        make_case("residual", "unit_offset", M=7, N=129),
        make_case("residual", "wide", "unit_offset", M=3, N=2304),  # Gemma 2 2B
    ),
    sweep=NORM_SWEEP,
    passes=PASSES,
    drawn=NORM_DRAWN,
    params={"eps": 1e-6},
    flags={**NORM_FLAGS, "unit_offset": {"add_unit_offset": True}},
)

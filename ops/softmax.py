"""Softmax over the last dimension: plain, scaled, causal, with a mask.

forward: z = scale x + mask, y = exp(z - max z) / sum exp(z - max z), over the keys that a causal
row sees. backward: dx = scale y (dy - sum y dy).

Bytes: forward reads x and writes y; backward reads y and dy and writes dx, 2 and 3 items an
element. Past the diagonal zeros are written, and nothing is read. FLOPs: 5 an element either way.
Cases: `_row_cases.py`, and attention scores with scale, diagonal and mask.
"""

import math

import torch

from ops._drawn import drawn_rows
from ops._row_cases import ROW_EDGE, ROW_SWEEP
from ops._spec import PASSES, Cost, Op, Tensor, case, in_turn


def softmax_reference(x, scale, causal, mask):
    scores = x * scale if mask is None else x * scale + mask
    if causal:
        future = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device)
        future = future.triu(1 + x.shape[-1] - x.shape[-2])
        scores = scores.masked_fill(future, -math.inf)
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    y = weights / weights.sum(dim=-1, keepdim=True)
    return y.masked_fill(future, 0.0) if causal else y


def _cost(a_case, direction, itemsize):
    m, n = a_case["M"], a_case["N"]
    # A causal row that is j rows above the last one does not see the last j keys.
    hidden = sum(min(j, n) for j in range(m)) if "causal" in a_case.flags else 0
    seen = m * n - hidden
    mask = n if "mask" in a_case.flags and direction == "forward" else 0
    reads = seen + mask if direction == "forward" else 2 * seen
    return Cost(reads * itemsize, m * n * itemsize, 5 * seen)


SOFTMAX = Op(
    "softmax",
    softmax_reference,
    # Scores of heads of 64, whose deviation the scale makes one.
    {
        "x": Tensor("M N", scale=lambda a_case: 8.0 if "scaled" in a_case.flags else 1.0),
        "mask": Tensor("N", grad=False, when="mask"),
    },
    in_turn(_cost),
    edge=(
        *ROW_EDGE,
        case(M=2, N=40000),
        # On a GPU several programs hold such a row, and split it.
        case(M=3, N=50257),
        case(M=2, N=65536, dtypes=("bfloat16",)),
        case(M=1, N=270000, dtypes=("float32",)),
        case(M=5, N=300, values="inf"),
        case("scaled", M=5, N=300, values="large"),
        case("causal", M=65, N=65),
        case("causal", "scaled", M=40, N=129, layout="padded"),
        case("mask", M=5, N=300, values="inf"),
        case("mask", "causal", "scaled", M=7, N=40000),
    ),
    sweep=(
        *ROW_SWEEP,
        case("causal", "scaled", M=16384, N=16384, dtypes=("bfloat16",)),
        case("mask", "scaled", M=32768, N=4096, dtypes=("bfloat16",)),
    ),
    passes=PASSES,
    drawn=drawn_rows(2**18),
    params={"scale": 1.0, "causal": False},
    flags={"scaled": {"scale": 0.125}, "causal": {"causal": True}, "mask": {}},
)

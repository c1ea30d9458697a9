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
from ops._spec import PASSES, Cost, Op, Tensor, in_turn, make_case


def softmax_reference(x, scale, causal, mask):
    scores = x * scale if mask is None else x * scale + mask
    if causal:
        future = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device)
        future = future.triu(1 + x.shape[-1] - x.shape[-2])
        scores = scores.masked_fill(future, -math.inf)
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    y = weights / weights.sum(dim=-1, keepdim=True)
    return y.masked_fill(future, 0.0) if causal else y


def _cost(case, pass_, itemsize):
    m, n = case["M"], case["N"]
    # A causal row that is j rows above the last one does not see the last j keys.
    hidden = sum(min(j, n) for j in range(m)) if "causal" in case.flags else 0
    seen = m * n - hidden
    mask = n if "mask" in case.flags and pass_ == "forward" else 0
    reads = seen + mask if pass_ == "forward" else 2 * seen
    return Cost(reads * itemsize, m * n * itemsize, 5 * seen)


SOFTMAX = Op(
    "softmax",
    softmax_reference,
    # Scores of heads of 64, whose deviation the scale makes one.
    {
        "x": Tensor("M N", scale=lambda case: 8.0 if "scaled" in case.flags else 1.0),
        "mask": Tensor("N", grad=False, when="mask"),
    },
    in_turn(_cost),
    edge=(
        *ROW_EDGE,
        make_case(M=2, N=40000),
        # On a GPU several programs hold such a row, and split it.
        make_case(M=3, N=50257),
        make_case(M=2, N=65536, dtypes=("bfloat16",)),
        make_case(M=1, N=270000, dtypes=("float32",)),
        make_case(M=5, N=300, values="inf"),
        make_case("scaled", M=5, N=300, values="large"),
        make_case("causal", M=65, N=65),
        make_case("causal", "scaled", M=40, N=129, layout="padded"),
        make_case("mask", M=5, N=300, values="inf"),
        make_case("mask", "causal", "scaled", M=7, N=40000),
    ),
    sweep=(
        *ROW_SWEEP,
        make_case("causal", "scaled", M=16384, N=16384, dtypes=("bfloat16",)),
        make_case("mask", "scaled", M=32768, N=4096, dtypes=("bfloat16",)),
    ),
    passes=PASSES,
    drawn=drawn_rows(2**18),
    params={"scale": 1.0, "causal": False},
    flags={"scaled": {"scale": 0.125}, "causal": {"causal": True}, "mask": {}},
)

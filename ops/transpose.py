"""Transpose: out[n, m] = x[m, n].

Bytes: one read and one write of each element, no FLOPs. Cases: squares, an embedding of GPT-2 XL, a
weight of Llama 3 70B and the keys of a head.
"""

import torch

from ops._drawn import drawn_length, log_uniform
from ops._spec import PASSES, Cost, Op, Tensor, case, in_turn


def transpose_reference(x):
    return x.mT.clone(memory_format=torch.contiguous_format)


def _cost(a_case, direction, itemsize):
    moved = a_case["M"] * a_case["N"] * itemsize
    return Cost(moved, moved, 0)


def _drawn(generator):
    m, n = log_uniform(generator, 64, 32768), drawn_length(generator, 64, 32768)
    return case(M=min(m, 2**28 // n), N=n)


TRANSPOSE = Op(
    "transpose",
    transpose_reference,
    {"x": Tensor("M N")},
    in_turn(_cost),
    edge=(
        case(M=1, N=1),
        case(M=1, N=127),
        case(M=129, N=1),
        case(M=127, N=129),
        case(M=200, N=136),
        case(M=259, N=200, dtypes=("float16", "bfloat16")),
        case(M=200, N=195, dtypes=("float16", "bfloat16")),
        case(M=0, N=64),
        case(M=64, N=0),
        case(M=66, N=70, layout="padded"),
        case(M=66, N=70, layout="offset"),
        case(M=66, N=70, layout="strided"),
        case(M=40, N=72, layout="transposed"),
        case(M=36, N=44, layout="expanded"),
        case(M=64, N=64, values="infinities"),
        case(M=64, N=64, values="denormal"),
    ),
    sweep=(
        case(M=4096, N=1024, dtypes=("bfloat16",)),
        case(M=8191, N=8193, dtypes=("bfloat16",)),
        case(M=4096, N=4096, dtypes=("bfloat16", "float32")),
        case(M=50257, N=1600, dtypes=("bfloat16",)),  # GPT-2 XL, embedding
        case(M=16384, N=16384, dtypes=("bfloat16", "float32")),
        case(M=8192, N=28672, dtypes=("float16",)),  # Llama 3 70B, weight of an MLP
        case(M=32768, N=128, dtypes=("bfloat16",)),  # the keys of a head
    ),
    passes=PASSES,
    drawn=_drawn,
)

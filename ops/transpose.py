"""Transpose: out[n, m] = x[m, n].

Bytes: one read and one write of each element, no FLOPs. Cases: squares, an embedding of GPT-2 XL, a
weight of Llama 3 70B and the keys of a head.
"""

import torch

from ops._drawn import drawn_length, log_uniform
from ops._spec import PASSES, Cost, Op, Tensor, in_turn, make_case


def transpose_reference(x):
    return x.mT.clone(memory_format=torch.contiguous_format)


def _cost(case, pass_, itemsize):
    moved = case["M"] * case["N"] * itemsize
    return Cost(moved, moved, 0)


def _drawn(generator):
    m, n = log_uniform(generator, 64, 32768), drawn_length(generator, 64, 32768)
    return make_case(M=min(m, 2**28 // n), N=n)


TRANSPOSE = Op(
    "transpose",
    transpose_reference,
    {"x": Tensor("M N")},
    in_turn(_cost),
    edge=(
        make_case(M=1, N=1),
        make_case(M=1, N=127),
        make_case(M=129, N=1),
        make_case(M=127, N=129),
        make_case(M=200, N=136),
        make_case(M=259, N=200, dtypes=("float16", "bfloat16")),
        make_case(M=200, N=195, dtypes=("float16", "bfloat16")),
        make_case(M=0, N=64),
        make_case(M=64, N=0),
        make_case(M=66, N=70, layout="padded"),
        make_case(M=66, N=70, layout="offset"),
        make_case(M=66, N=70, layout="strided"),
        make_case(M=40, N=72, layout="transposed"),
        make_case(M=36, N=44, layout="expanded"),
        make_case(M=64, N=64, values="infinities"),
        make_case(M=64, N=64, values="denormal"),
    ),
    sweep=(
        make_case(M=4096, N=1024, dtypes=("bfloat16",)),
        make_case(M=8191, N=8193, dtypes=("bfloat16",)),
        make_case(M=4096, N=4096, dtypes=("bfloat16", "float32")),
        make_case(M=50257, N=1600, dtypes=("bfloat16",)),  # GPT-2 XL, embedding
        make_case(M=16384, N=16384, dtypes=("bfloat16", "float32")),
        make_case(M=8192, N=28672, dtypes=("float16",)),  # Llama 3 70B, weight of an MLP
        make_case(M=32768, N=128, dtypes=("bfloat16",)),  # the keys of a head
    ),
    passes=PASSES,
    drawn=_drawn,
)

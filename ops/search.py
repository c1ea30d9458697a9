"""Bucketize: the number of sorted boundaries below x (at most x, to the right), by element.

Bytes: one read of x and one write of the index, the boundaries once; no FLOPs. Cases: from what an
L2 cache holds to what outlasts it, with 100 to 100,000 boundaries.
"""

import torch

from ops._drawn import log_uniform
from ops._spec import Cost, Op, Tensor, case


def bucketize_reference(x, boundaries, right=False, out_int32=False):
    x, boundaries = x.contiguous(), boundaries.contiguous()
    return torch.bucketize(x, boundaries, right=right, out_int32=out_int32)


def _cost(a_case, direction, itemsize):
    n = a_case["N"]
    index_bytes = 4 if "int32" in a_case.flags else 8
    return Cost((n + a_case["B"]) * itemsize, n * index_bytes, 0)


def _drawn(generator):
    return case(N=log_uniform(generator, 2**18, 2**28), B=log_uniform(generator, 8, 2**17))


BUCKETIZE = Op(
    "bucketize",
    bucketize_reference,
    {"x": Tensor("N"), "boundaries": Tensor("B", ascending=True)},
    _cost,
    edge=(
        case(N=1, B=1),
        case(N=127, B=129),
        case(N=5000, B=1024),
        case("right", N=5000, B=1024),
        case("int32", N=5000, B=1023),
        case("right", "int32", N=1000, B=3000),
        case(N=0, B=64),
        case(N=1000, B=0),
        case(N=1000, B=100, layout="offset"),
        case(N=1000, B=100, layout="strided"),
        case(N=1000, B=100, values="infinities"),
        case("right", N=1000, B=100, values="infinities"),
        case(N=1000, B=100, values="denormal"),
        case("right", N=1000, B=100, values="equal"),
    ),
    sweep=(
        case("int32", N=2**22, B=1024, dtypes=("bfloat16",)),
        case(N=2**26, B=1024, dtypes=("bfloat16", "float16", "float32")),
        case(N=2**28, B=1024, dtypes=("bfloat16",)),
        case("int32", N=2**28, B=1024, dtypes=("bfloat16",)),
        case("right", "int32", N=2**26, B=100000, dtypes=("float32",)),
    ),
    drawn=_drawn,
    flags={"right": {"right": True}, "int32": {"out_int32": True}},
)

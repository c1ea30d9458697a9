"""Bucketize: the number of sorted boundaries below x (at most x, to the right), by element.

Bytes: one read of x and one write of the index, the boundaries once; no FLOPs. Cases: from what an
L2 cache holds to what outlasts it, with 100 to 100,000 boundaries.
"""

import torch

from ops._drawn import log_uniform
from ops._spec import Cost, Op, Tensor, make_case


def bucketize_reference(x, boundaries, right=False, out_int32=False):
    x, boundaries = x.contiguous(), boundaries.contiguous()
    return torch.bucketize(x, boundaries, right=right, out_int32=out_int32)


def _cost(case, pass_, itemsize):
    n = case["N"]
    index_bytes = 4 if "int32" in case.flags else 8
    return Cost((n + case["B"]) * itemsize, n * index_bytes, 0)


def _drawn(generator):
    return make_case(N=log_uniform(generator, 2**18, 2**28), B=log_uniform(generator, 8, 2**17))


BUCKETIZE = Op(
    "bucketize",
    bucketize_reference,
    {"x": Tensor("N"), "boundaries": Tensor("B", ascending=True)},
    _cost,
    edge=(
        make_case(N=1, B=1),
        make_case(N=127, B=129),
        make_case(N=5000, B=1024),
        make_case("right", N=5000, B=1024),
        make_case("int32", N=5000, B=1023),
        make_case("right", "int32", N=1000, B=3000),
        make_case(N=0, B=64),
        make_case(N=1000, B=0),
        make_case(N=1000, B=100, layout="offset"),
        make_case(N=1000, B=100, layout="strided"),
        make_case(N=1000, B=100, values="infinities"),
        make_case("right", N=1000, B=100, values="infinities"),
        make_case(N=1000, B=100, values="denormal"),
        make_case("right", N=1000, B=100, values="equal"),
    ),
    sweep=(
        make_case("int32", N=2**22, B=1024, dtypes=("bfloat16",)),
        make_case(N=2**26, B=1024, dtypes=("bfloat16", "float16", "float32")),
        make_case(N=2**28, B=1024, dtypes=("bfloat16",)),
        make_case("int32", N=2**28, B=1024, dtypes=("bfloat16",)),
        make_case("right", "int32", N=2**26, B=100000, dtypes=("float32",)),
    ),
    drawn=_drawn,
    flags={"right": {"right": True}, "int32": {"out_int32": True}},
)

"""Element-wise vector operations and the dot product.

    scale  out = alpha x, dx = alpha g
    add    out = x + y, dx = dy = g
    mul    out = x y, dx = y g, dy = x g
    dot    out = sum of x y, dx = y g, dy = x g with one g for all
    maximum, minimum  g goes to the input that was taken, half of it to each of two equals

Here g is the gradient of the result.

Bytes: each input is read and each output written once. That is forward 2 items an element for scale
and dot, 3 for the others; backward 2 for scale, none for add, 5 for mul, 4 for dot. Two bits an
element say which input maximum and minimum took, so backward they move 3 items and those bits.
FLOPs: one an output, two a pair of dot. Cases: `_vector_cases.py`.
"""

import functools

import torch

from ops._drawn import drawn_vector
from ops._spec import PASSES, Cost, Op, Tensor, in_turn, make_case
from ops._vector_cases import EDGE, SWEEP, bits_bytes


def scale_reference(x, alpha):
    return x * alpha


def add_reference(x, y):
    return x + y


def mul_reference(x, y):
    return x * y


def maximum_reference(x, y):
    return torch.maximum(x, y)


def minimum_reference(x, y):
    return torch.minimum(x, y)


def dot_reference(x, y):
    return (x * y).sum()


def _cost(forward, backward):
    """The cost of tensors read and written, in vectors of N items, by pass."""
    return in_turn(functools.partial(_vectors_cost, forward, backward))


def _vectors_cost(forward, backward, case, pass_, itemsize):
    n = case["N"]
    reads, writes = forward if pass_ == "forward" else backward
    return Cost(reads * n * itemsize, writes * n * itemsize, writes * n)


def _dot_cost(case, pass_, itemsize):
    size = case["N"] * itemsize
    if pass_ == "forward":
        return Cost(2 * size, itemsize, 2 * case["N"])
    return Cost(2 * size + itemsize, 2 * size, 2 * case["N"])


def _extremum_cost(case, pass_, itemsize):
    """Two bits an element, packed, are all that the backward pass reads beside the gradient."""
    n, size = case["N"], case["N"] * itemsize
    if pass_ == "forward":
        return Cost(2 * size, size, n)
    return Cost(size + 2 * bits_bytes(n), 2 * size, 2 * n)


def _flags_cost(case):
    return 2 * bits_bytes(case["N"])


EXTREMUM_COST = in_turn(_extremum_cost, _flags_cost)
VECTOR = Tensor("N")
FACTOR = Tensor("N", tame=True)
PAIR = {"x": VECTOR, "y": VECTOR}
FACTORS = {"x": VECTOR, "y": FACTOR}

SCALE = Op(
    "scale", scale_reference, {"x": VECTOR}, _cost((1, 1), (1, 1)), EDGE, SWEEP, PASSES,
    drawn=drawn_vector, params={"alpha": 1.7},
)  # fmt: skip
# The gradient of a sum is the gradient of its terms: no byte moves, so there is nothing to time.
ADD = Op("add", add_reference, PAIR, _cost((2, 1), (0, 0)), EDGE, SWEEP, drawn=drawn_vector)
MUL = Op(
    "mul", mul_reference, FACTORS, _cost((2, 1), (3, 2)), EDGE, SWEEP, PASSES, drawn=drawn_vector
)
MAXIMUM = Op(
    "maximum", maximum_reference, PAIR, EXTREMUM_COST, EDGE, SWEEP, PASSES, drawn=drawn_vector
)
MINIMUM = Op(
    "minimum", minimum_reference, PAIR, EXTREMUM_COST, EDGE, SWEEP, PASSES, drawn=drawn_vector
)
DOT_SWEEP = (make_case(N=2**20, dtypes=("bfloat16", "float32")), *SWEEP[1:])
DOT = Op(
    "dot", dot_reference, FACTORS, in_turn(_dot_cost), EDGE, DOT_SWEEP, PASSES, drawn=drawn_vector
)

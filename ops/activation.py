"""Activation functions: relu, leaky_relu, gelu (by erf or by tanh), tanh, cosh.

    relu        max(x, 0)
    leaky_relu  x if x > 0, else slope x
    gelu        x Φ(x), with the normal distribution function Φ
                or x sigmoid(2u), u = √(2/π) (x + 0.044715 x³), the form with tanh
    tanh, cosh  as they are

The gradient of x is f'(x) g, with g the gradient of the result. Both forms of gelu are those of
Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016).

Bytes: forward 2 items an element, backward 3: g and one other tensor are read. The derivatives of
relu and leaky_relu have two values, so a bit an element is enough beside g. FLOPs: an operation of
the formula is one, exp or erf too. Cases: `_vector_cases.py`, and some of them for the tanh form.
"""

import functools

import torch
from torch.nn import functional as F

from ops._drawn import drawn_vector
from ops._spec import PASSES, Cost, Op, Tensor, in_turn, make_case
from ops._vector_cases import EDGE, SWEEP, bits_bytes


def relu_reference(x):
    return torch.relu(x)


def leaky_relu_reference(x, negative_slope):
    return F.leaky_relu(x, negative_slope)


def gelu_reference(x, approximate="none"):
    return F.gelu(x, approximate=approximate)


def tanh_reference(x):
    return torch.tanh(x)


def cosh_reference(x):
    return torch.cosh(x)


def _cost(forward, backward, flags=False):
    """The cost by the FLOPs of an element in either pass.

    flags: a bit an element is all that the backward pass reads beside the gradient.
    """
    cost = functools.partial(_map_cost, forward, backward, flags)
    return in_turn(cost, _flags_cost if flags else None)


def _map_cost(forward, backward, flags, case, pass_, itemsize):
    n = case["N"]
    if pass_ == "forward":
        return Cost(n * itemsize, n * itemsize, forward * n)
    beside = bits_bytes(n) if flags else n * itemsize
    return Cost(n * itemsize + beside, n * itemsize, backward * n)


def _flags_cost(case):
    return bits_bytes(case["N"])


X = {"x": Tensor("N")}
TANH_EDGE = (
    make_case("tanh", N=10001),
    make_case("tanh", N=5000, values="large"),
    make_case("tanh", N=1000, values="infinities"),
    make_case("tanh", N=1000, values="denormal"),
)
TANH_SWEEP = tuple(
    make_case("tanh", N=n, dtypes=("bfloat16",)) for n in (4096 * 1024, 8192 * 14336, 2**28)
)

RELU = Op(
    "relu", relu_reference, X, _cost(1, 1, flags=True), EDGE, SWEEP, PASSES, drawn=drawn_vector
)
LEAKY_RELU = Op(
    "leaky_relu", leaky_relu_reference, X, _cost(1, 1, flags=True), EDGE, SWEEP, PASSES,
    drawn=drawn_vector, params={"negative_slope": 0.01},
)  # fmt: skip
GELU = Op(
    "gelu", gelu_reference, X, _cost(5, 11), (*EDGE, *TANH_EDGE), (*SWEEP, *TANH_SWEEP), PASSES,
    drawn=drawn_vector, flags={"tanh": {"approximate": "tanh"}},
)  # fmt: skip
TANH = Op("tanh", tanh_reference, X, _cost(1, 3), EDGE, SWEEP, PASSES, drawn=drawn_vector)
COSH = Op("cosh", cosh_reference, X, _cost(1, 2), EDGE, SWEEP, PASSES, drawn=drawn_vector)

"""Linear layer with its activation: out = a(x weightᵀ + bias), or a(x weightᵀ + bias) (x upᵀ).

Bytes: forward reads x, weights and the bias, and writes M N results. Backward reads dy, x and the
weights, and writes the gradient of each input. It also reads what the activation needs: a bit a
result for ReLU and leaky ReLU, and the result for tanh. Other activations need one number a result,
a gate needs two, and the forward pass writes them. FLOPs: 2 M N K a product forward, and twice that
backward.
Cases: the projections and MLPs of Llama, GPT-2 and Gemma 2 in training.
"""

import functools

import torch
from torch.nn import functional as F

from ops._drawn import log_uniform
from ops._spec import PASSES, Cost, Op, Tensor, fan_in, make_case

ACTIVATIONS = {
    "none": lambda z: z,
    "relu": torch.relu,
    "leaky_relu": functools.partial(F.leaky_relu, negative_slope=0.01),
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}
# A bit a result tells the slope of these; the result itself that of tanh.
BITS = ("relu", "leaky_relu")
RESULT = ("tanh",)
WITH_Z = ("gelu", "gelu_tanh", "silu")


def linear_reference(x, weight, bias=None, activation="none", up=None):
    z = x @ weight.T
    out = ACTIVATIONS[activation](z if bias is None else z + bias)
    return out if up is None else out * (x @ up.T)


def _cost(case, pass_, itemsize):
    m, n, k, flags = case["M"], case["N"], case["K"], case.flags
    weights = 2 if "gated" in flags else 1
    inputs = (m * k + weights * n * k) * itemsize
    bias = n * itemsize if "bias" in flags else 0
    results, products = m * n * itemsize, 2 * m * n * k * weights
    forward = Cost(inputs + bias, results, products)
    kept = seen = 0
    if "gated" in flags:
        kept = seen = 2 * results
    elif not {*flags}.isdisjoint(BITS):
        kept = seen = -(-m * n // 8)
    elif not {*flags}.isdisjoint(RESULT):
        seen = results
    elif not {*flags}.isdisjoint(WITH_Z):
        kept = seen = results
    backward = Cost(inputs + results + seen, inputs + bias, 2 * products)
    if pass_ != "both":
        return forward if pass_ == "forward" else backward
    return Cost(
        forward.bytes_read + backward.bytes_read,
        forward.bytes_written + kept + backward.bytes_written,
        3 * products,
    )


def _drawn(generator):
    """Any number of rows, and a weight whose sizes are multiples of 8; at most 2**38 products."""
    n, k = (log_uniform(generator, 256, 16384, 8) for _ in "NK")
    return make_case(M=min(log_uniform(generator, 64, 16384), 2**38 // (n * k)), N=n, K=k)


BF16 = ("bfloat16",)
LINEAR = Op(
    "linear",
    linear_reference,
    {
        "x": Tensor("M K"),
        "weight": Tensor("N K", transposed="conv1d", tame=True, scale=fan_in("K")),
        "bias": Tensor("N", when="bias", tame=True),
        "up": Tensor("N K", when="gated", tame=True, scale=fan_in("K")),
    },
    _cost,
    edge=(
        make_case(M=1, N=1, K=1),
        make_case(M=65, N=33, K=17),
        make_case("bias", M=33, N=40, K=24),
        make_case("conv1d", "bias", "gelu_tanh", M=33, N=40, K=24),
        make_case("conv1d", M=17, N=19, K=23),
        make_case("relu", M=33, N=40, K=24),
        make_case("leaky_relu", "bias", M=33, N=40, K=24),
        make_case("gelu", "bias", M=33, N=40, K=24),
        make_case("silu", M=33, N=40, K=24),
        make_case("tanh", "bias", M=33, N=40, K=24),
        make_case("gated", "silu", M=33, N=40, K=24),
        make_case("gated", "gelu_tanh", "bias", M=17, N=19, K=23),
        make_case("gated", "relu", M=33, N=40, K=24),
        make_case(M=0, N=16, K=16),
        make_case("bias", M=16, N=0, K=16),
        make_case("bias", M=16, N=16, K=0),
        make_case("bias", M=24, N=40, K=32, layout="padded"),
        make_case("bias", "gelu", M=24, N=40, K=32, layout="offset"),
        make_case(M=24, N=40, K=32, layout="transposed"),
        make_case("bias", M=24, N=40, K=32, layout="expanded"),
        make_case("silu", M=24, N=40, K=32, layout="offset8", dtypes=("float16",)),
        make_case("relu", M=24, N=40, K=32, values="large", dtypes=("float32", "bfloat16")),
        make_case("relu", M=24, N=40, K=32, values="spike"),
        make_case("relu", M=24, N=40, K=32, values="infinities"),
    ),
    sweep=(
        make_case(M=16384, N=2048, K=2048, dtypes=BF16),  # Llama 3.2 1B, attention
        make_case(M=16384, N=8192, K=2048, dtypes=BF16),  # and MLP up
        make_case(M=16384, N=2048, K=8192, dtypes=BF16),  # and MLP down
        make_case("gated", "silu", M=16384, N=8192, K=2048, dtypes=BF16),  # and its gate
        make_case("gated", "silu", M=8192, N=14336, K=4096, dtypes=BF16),  # Llama 3 8B
        make_case(M=8192, N=4096, K=14336, dtypes=("bfloat16", "float16")),  # and MLP down
        make_case("conv1d", "bias", "gelu_tanh", M=16384, N=3072, K=768, dtypes=BF16),  # GPT-2
        make_case("conv1d", "bias", M=16384, N=768, K=3072, dtypes=BF16),
        make_case("gated", "gelu_tanh", M=4096, N=14336, K=3584, dtypes=BF16),  # Gemma 2 9B
        make_case("relu", "bias", M=4096, N=4096, K=4096, dtypes=("bfloat16", "float32")),
    ),
    passes=PASSES,
    drawn=_drawn,
    params={"activation": "none"},
    flags={
        "bias": {},
        "conv1d": {},
        "gated": {},
        "relu": {"activation": "relu"},
        "leaky_relu": {"activation": "leaky_relu"},
        "gelu": {"activation": "gelu"},
        "gelu_tanh": {"activation": "gelu_tanh"},
        "silu": {"activation": "silu"},
        "tanh": {"activation": "tanh"},
    },
)

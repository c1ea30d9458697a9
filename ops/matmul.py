"""Matrix product with a fused epilogue: out = activation(a b + bias).

Bytes: M K + K N items read, and N of a bias; M N written. FLOPs: 2 M N K, the epilogue aside.
Cases: powers of two, and the MLPs and logits of Llama, DeepSeek-V3 and GPT-2.
"""

import math

import torch

from ops._drawn import log_uniform
from ops._spec import Cost, Op, Tensor, case, fan_in

LEAKY_SLOPE = 0.01


def matmul_reference(a, b, bias, activation):
    out = a @ b
    if bias is not None:
        out = out + bias
    if activation == "relu":
        out = torch.relu(out)
    elif activation == "leaky_relu":
        out = torch.where(out > 0, out, out * LEAKY_SLOPE)
    elif activation == "gelu":
        out = 0.5 * out * (1 + torch.erf(out * math.sqrt(0.5)))
    elif activation == "gelu_tanh":
        out = 0.5 * out * (1 + torch.tanh(math.sqrt(2 / math.pi) * (out + 0.044715 * out**3)))
    elif activation == "tanh":
        out = torch.tanh(out)
    return out


def _cost(a_case, direction, itemsize):
    m, n, k = a_case["M"], a_case["N"], a_case["K"]
    bias = n if "bias" in a_case.flags else 0
    return Cost((m * k + k * n + bias) * itemsize, m * n * itemsize, 2 * m * n * k)


def _drawn(generator):
    """Any number of rows, and a weight whose sizes are multiples of 8; at most 2**39 products."""
    n, k = (log_uniform(generator, 256, 16384, 8) for _ in "NK")
    return case(M=min(log_uniform(generator, 16, 16384), 2**39 // (n * k)), N=n, K=k)


HALVES = ("bfloat16", "float16")
MATMUL = Op(
    "matmul",
    matmul_reference,
    {
        "a": Tensor("M K"),
        "b": Tensor("K N", transposed="nt", tame=True, scale=fan_in("K")),
        "bias": Tensor("N", when="bias", tame=True),
    },
    _cost,
    edge=(
        case(M=1, N=1, K=1),
        case(M=127, N=129, K=65),
        case("nt", M=127, N=129, K=65),
        case(M=128, N=128, K=128),
        case("nt", M=200, N=136, K=72),
        case("relu", M=64, N=96, K=80),
        case("leaky_relu", "bias", M=65, N=96, K=80),
        case("gelu", "bias", M=64, N=96, K=80),
        case("gelu_tanh", "bias", M=64, N=96, K=80),
        case("tanh", "bias", M=64, N=96, K=80),
        case(M=0, N=16, K=16),
        case(M=16, N=16, K=0),
        case(M=40, N=48, K=64, layout="padded"),
        case(M=40, N=48, K=64, layout="offset"),
        case(M=40, N=48, K=64, layout="offset4", dtypes=("float16",)),
        case(M=40, N=48, K=64, layout="offset8", dtypes=("float16",)),
        case(M=40, N=48, K=64, layout="transposed"),
        case(M=40, N=48, K=64, layout="expanded"),
        case(M=40, N=48, K=64, values="large", dtypes=("float32", "bfloat16")),
        case(M=40, N=48, K=64, values="equal"),
        case(M=40, N=48, K=64, values="spike"),
        case("relu", M=40, N=48, K=64, values="infinities"),
        case(M=40, N=48, K=64, values="denormal"),
    ),
    sweep=(
        *(case(M=2**k, N=2**k, K=2**k) for k in range(9, 13)),
        case(M=8192, N=8192, K=8192, dtypes=HALVES),
        case("nt", M=8192, N=8192, K=8192, dtypes=("bfloat16",)),
        case(M=8192, N=14336, K=4096, dtypes=("bfloat16",)),  # Llama 3 8B, MLP up
        case(M=8192, N=4096, K=14336, dtypes=("bfloat16",)),  # Llama 3 8B, MLP down
        case(M=8192, N=13824, K=5120, dtypes=("bfloat16",)),  # Llama 2 13B, MLP up
        case(M=4096, N=18432, K=7168, dtypes=("bfloat16",)),  # DeepSeek-V3, dense MLP
        case(M=4096, N=50257, K=1600, dtypes=("bfloat16",)),  # GPT-2 XL, logits
        case("relu", M=4096, N=4096, K=4096, dtypes=("bfloat16",)),
        case("leaky_relu", M=4096, N=4096, K=4096, dtypes=HALVES),
        case("gelu", "bias", M=4096, N=4096, K=4096, dtypes=("bfloat16",)),
    ),
    drawn=_drawn,
    params={"activation": "none"},
    flags={
        "bias": {},
        "nt": {},
        "relu": {"activation": "relu"},
        "leaky_relu": {"activation": "leaky_relu"},
        "gelu": {"activation": "gelu"},
        "gelu_tanh": {"activation": "gelu_tanh"},
        "tanh": {"activation": "tanh"},
    },
)

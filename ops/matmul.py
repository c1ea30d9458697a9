"""Matrix product with a fused epilogue: out = activation(scale a b + bias) + residual.

The gated form has a factor: activation(scale a b + bias) (scale a up) + residual. With B all
matrices come in a batch of B.

Bytes: M K + K N items read, N of a bias, M N of a residual, K N of up; M N written, and as many for
each pre-activation. FLOPs: 2 M N K a product, the epilogue aside.
Cases: powers of two, and the MLPs and logits of Llama, DeepSeek-V3 and GPT-2.
"""

import math

import torch

from ops._drawn import log_uniform
from ops._spec import Cost, Op, Tensor, fan_in, make_case

LEAKY_SLOPE = 0.01


def matmul_reference(
    a, b, bias, activation, residual=None, up=None, scale=1.0, save_preactivation=False
):
    pre = out = scale * (a @ b) if bias is None else scale * (a @ b) + bias
    if activation == "relu":
        out = torch.relu(out)
    elif activation == "leaky_relu":
        out = torch.where(out > 0, out, out * LEAKY_SLOPE)
    elif activation == "gelu":
        out = 0.5 * out * (1 + torch.erf(out * math.sqrt(0.5)))
    elif activation == "gelu_tanh":
        out = 0.5 * out * (1 + torch.tanh(math.sqrt(2 / math.pi) * (out + 0.044715 * out**3)))
    elif activation == "silu":
        out = out * torch.sigmoid(out)
    elif activation == "tanh":
        out = torch.tanh(out)
    arguments = [pre]
    if up is not None:
        arguments.append(scale * (a @ up))
        out = out * arguments[-1]
    if residual is not None:
        out = out + residual
    return (out, *arguments) if save_preactivation else out


def _cost(case, pass_, itemsize):
    m, n, k, flags = case["M"], case["N"], case["K"], case.flags
    batch, products = case.sizes.get("B", 1), 1 + ("gated" in flags)
    read = batch * (m * k + products * k * n) + ("bias" in flags) * n
    read += ("residual" in flags) * batch * m * n
    results = 1 + ("preactivation" in flags) * products
    written = results * batch * m * n
    return Cost(read * itemsize, written * itemsize, 2 * products * batch * m * n * k)


def _drawn(generator):
    """Any number of rows, and a weight whose sizes are multiples of 8; at most 2**39 products."""
    n, k = (log_uniform(generator, 256, 16384, 8) for _ in "NK")
    return make_case(M=min(log_uniform(generator, 16, 16384), 2**39 // (n * k)), N=n, K=k)


HALVES = ("bfloat16", "float16")
MATMUL = Op(
    "matmul",
    matmul_reference,
    {
        "a": Tensor("B? M K", transposed="tn"),
        "b": Tensor("B? K N", transposed="nt", tame=True, scale=fan_in("K")),
        "bias": Tensor("N", when="bias", tame=True),
        "residual": Tensor("B? M N", when="residual", tame=True),
        "up": Tensor("B? K N", when="gated", transposed="nt", tame=True, scale=fan_in("K")),
    },
    _cost,
    edge=(
        make_case(M=1, N=1, K=1),
        make_case(M=127, N=129, K=65),
        make_case("nt", M=127, N=129, K=65),
        make_case(M=128, N=128, K=128),
        make_case("nt", M=200, N=136, K=72),
        make_case("relu", M=64, N=96, K=80),
        make_case("leaky_relu", "bias", M=65, N=96, K=80),
        make_case("gelu", "bias", M=64, N=96, K=80),
        make_case("gelu_tanh", "bias", M=64, N=96, K=80),
        make_case("silu", "bias", M=64, N=96, K=80),
        make_case("tanh", "bias", M=64, N=96, K=80),
        make_case("tn", M=200, N=136, K=72),
        make_case("tn", "nt", M=200, N=136, K=72),
        make_case("tn", M=33, N=35, K=37),
        make_case("tn", "nt", M=33, N=35, K=37),
        make_case("residual", "bias", M=65, N=96, K=80),
        make_case("residual", "gelu", "bias", "scale", "preactivation", M=64, N=96, K=80),
        make_case("gated", "silu", "nt", "preactivation", M=65, N=96, K=80),
        make_case("gated", "silu", "bias", "residual", M=33, N=35, K=37),
        make_case(B=3, M=72, N=48, K=40),
        make_case("tn", "nt", "residual", B=3, M=33, N=35, K=37),
        make_case("gated", "gelu_tanh", B=2, M=40, N=48, K=32),
        make_case(M=0, N=16, K=16),
        make_case(M=16, N=16, K=0),
        make_case(M=40, N=48, K=64, layout="padded"),
        make_case(M=40, N=48, K=64, layout="offset"),
        make_case(M=40, N=48, K=64, layout="offset4", dtypes=("float16",)),
        make_case(M=40, N=48, K=64, layout="offset8", dtypes=("float16",)),
        make_case(M=40, N=48, K=64, layout="transposed"),
        make_case(M=40, N=48, K=64, layout="expanded"),
        make_case(B=3, M=40, N=48, K=64, layout="padded"),
        make_case(B=3, M=40, N=48, K=64, layout="expanded"),
        make_case(M=40, N=48, K=64, values="large", dtypes=("float32", "bfloat16")),
        make_case(M=40, N=48, K=64, values="equal"),
        make_case(M=40, N=48, K=64, values="spike"),
        make_case("relu", M=40, N=48, K=64, values="infinities"),
        make_case(M=40, N=48, K=64, values="denormal"),
    ),
    sweep=(
        *(make_case(M=2**k, N=2**k, K=2**k) for k in range(9, 13)),
        make_case(M=8192, N=8192, K=8192, dtypes=HALVES),
        make_case("nt", M=8192, N=8192, K=8192, dtypes=("bfloat16",)),
        make_case(M=8192, N=14336, K=4096, dtypes=("bfloat16",)),  # Llama 3 8B, MLP up
        make_case(M=8192, N=4096, K=14336, dtypes=("bfloat16",)),  # Llama 3 8B, MLP down
        make_case(M=8192, N=13824, K=5120, dtypes=("bfloat16",)),  # Llama 2 13B, MLP up
        make_case(M=4096, N=18432, K=7168, dtypes=("bfloat16",)),  # DeepSeek-V3, dense MLP
        make_case("relu", M=4096, N=4096, K=4096, dtypes=("bfloat16",)),
        make_case("leaky_relu", M=4096, N=4096, K=4096, dtypes=HALVES),
        make_case("gelu", "bias", M=4096, N=4096, K=4096, dtypes=("bfloat16",)),
        make_case("tn", M=8192, N=8192, K=8192, dtypes=("bfloat16",)),  # the gradient of a weight
        make_case("tn", M=512, N=2048, K=16384, dtypes=("bfloat16",)),  # Llama 3.2 1B, of keys
        make_case("tn", "nt", M=8192, N=8192, K=8192, dtypes=("bfloat16",)),
        make_case(
            "residual", M=8192, N=4096, K=14336, dtypes=("bfloat16",)
        ),  # Llama 3 8B, MLP down
        make_case(
            "gated", "silu", "nt", M=8192, N=14336, K=4096, dtypes=("bfloat16",)
        ),  # and its gate
        make_case(B=64, M=1024, N=1024, K=1024, dtypes=("bfloat16",)),
        # GPT-2 XL, logits. A build takes the last case, and here operands are copied.
        make_case(M=4096, N=50257, K=1600, dtypes=("bfloat16",)),
    ),
    drawn=_drawn,
    params={"activation": "none"},
    flags={
        "bias": {},
        "nt": {},
        "tn": {},
        "residual": {},
        "gated": {},
        "scale": {"scale": 0.25},
        "preactivation": {"save_preactivation": True},
        "relu": {"activation": "relu"},
        "leaky_relu": {"activation": "leaky_relu"},
        "gelu": {"activation": "gelu"},
        "gelu_tanh": {"activation": "gelu_tanh"},
        "silu": {"activation": "silu"},
        "tanh": {"activation": "tanh"},
    },
)

"""Cross entropy of logits x wᵀ + b, which need not lie in memory as a whole.

The loss of a row of logits: `_cross_entropy.py`.

Bytes: x, w and the targets are read; with gradients those of x and w are written. FLOPs: 2 M H V
forward, 6 M H V with gradients. Cases: the widths and vocabularies of Llama, GPT-2 XL and Qwen 2.5.
"""

import torch

from ops._cross_entropy import reference
from ops._drawn import drawn_length, log_uniform
from ops._spec import Cost, Op, Tensor, fan_in, make_case


def linear_cross_entropy_reference(
    x,
    weight,
    targets,
    bias=None,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    reduction="mean",
    softcap=None,
    loss_dtype=None,
):
    logits = x @ weight.T
    if bias is not None:
        logits = logits + bias
    options = ignore_index, label_smoothing, z_loss, reduction, softcap, loss_dtype
    return reference(logits, targets, *options)


def _cost(case, pass_, itemsize):
    m, h, v = (case[letter] for letter in "MHV")
    factors = (m * h + v * h) * itemsize
    if pass_ == "both":
        return Cost(factors + 8 * m, factors + itemsize, 6 * m * h * v)
    return Cost(factors + 8 * m, itemsize, 2 * m * h * v)


def _drawn(generator):
    """Draw a width from that of GPT-2 to that of a 70B model.

    The weight has at most 1 GiB, and its product with the rows at most 2**39 multiplications. Three
    such matmuls take some milliseconds each.
    """
    h = log_uniform(generator, 512, 8192, 64)
    v = min(drawn_length(generator, 8192, 2**18), 2**29 // h)
    return make_case(M=min(log_uniform(generator, 256, 8192), 2**39 // (h * v)), H=h, V=v)


LINEAR_CROSS_ENTROPY = Op(
    "linear_cross_entropy",
    linear_cross_entropy_reference,
    {
        "x": Tensor("M H"),
        # The rows of x come out of a norm; logits of unit variance.
        "weight": Tensor("V H", scale=fan_in("H")),
        "targets": Tensor("M", "int64", grad=False, below="V", sentinel=("ignored", -100)),
        "bias": Tensor("V", when="bias"),
    },
    _cost,
    edge=(
        make_case(M=1, H=1, V=1),
        make_case(M=3, H=16, V=127),
        make_case("ignored", M=17, H=33, V=129),
        make_case("bias", "ignored", M=5, H=16, V=130),
        make_case("sum", "smooth", "z", "ignored", "bias", M=9, H=24, V=200),
        make_case(M=0, H=8, V=16),
        make_case(M=9, H=24, V=200, layout="padded"),
        make_case("bias", M=9, H=24, V=100, layout="offset"),
        make_case(M=9, H=16, V=40, layout="transposed"),
        make_case(M=4, H=16, V=100, layout="expanded"),
        make_case(M=2, H=32, V=270000, dtypes=("float32",)),
        # A tile for each multiprocessor: classes in whole tiles, and not; rows that end in a tile.
        make_case("ignored", M=130, H=344, V=17152, dtypes=("bfloat16",)),
        make_case("bias", "smooth", "z", M=130, H=72, V=17000, dtypes=("bfloat16",)),
        make_case("softcap", "bias", "z", "ignored", M=9, H=24, V=200),
        make_case("softcap", M=130, H=72, V=17152, dtypes=("bfloat16",)),
        make_case("none", "bias", "smooth", "ignored", M=9, H=24, V=200),
        make_case("none", "softcap", "z", M=5, H=33, V=129),
        make_case("wide", "ignored", M=17, H=33, V=129),
        make_case("wide", "none", M=5, H=16, V=130),
    ),
    sweep=(
        make_case(M=4096, H=4096, V=128256, dtypes=("bfloat16",)),
        make_case(M=8192, H=4096, V=32000, dtypes=("bfloat16",)),
        make_case(M=4096, H=2048, V=32000, dtypes=("bfloat16", "float16")),
        make_case(M=4096, H=1600, V=50257, dtypes=("bfloat16",)),  # GPT-2 XL
        make_case(M=4096, H=2048, V=151936, dtypes=("bfloat16",)),  # Qwen 2.5 3B
        make_case(M=1024, H=1024, V=32000, dtypes=("float32",)),
        make_case("bias", "smooth", "z", "ignored", M=4096, H=2048, V=32000, dtypes=("bfloat16",)),
    ),
    passes=("forward", "both"),
    drawn=_drawn,
    flags={
        "ignored": {},
        "bias": {},
        "smooth": {"label_smoothing": 0.1},
        "z": {"z_loss": 1e-3},
        "sum": {"reduction": "sum"},
        "none": {"reduction": "none"},
        # That of Gemma 2 is 30, which a row of normal logits would hardly feel.
        "softcap": {"softcap": 2.0},
        "wide": {"loss_dtype": torch.float32},
    },
)

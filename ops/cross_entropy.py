"""Cross entropy of logits and class indices, with label smoothing and z-loss.

The loss of a row: `_cross_entropy.py`; the result is its mean, its sum or all of it. The gradient
of a row is p (1 + 2 z lse) - e / V - (1 - e) [j = t], p the softmax of x.

Bytes: the logits and the targets are read once; with gradients those of the logits are written, at
once, since a backward pass need only multiply them. FLOPs: 5 an item, 10 with gradients. Cases: the
vocabularies of Llama, GPT-2 and Qwen.
"""

import torch

from ops._cross_entropy import reference
from ops._drawn import drawn_rows
from ops._spec import Cost, Op, Tensor, make_case


def cross_entropy_reference(
    logits,
    targets,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    reduction="mean",
    softcap=None,
    loss_dtype=None,
):
    options = ignore_index, label_smoothing, z_loss, reduction, softcap, loss_dtype
    return reference(logits, targets, *options)


def _cost(case, pass_, itemsize):
    logits = case["M"] * case["V"]
    written = logits * itemsize if pass_ == "both" else 0
    return Cost(
        logits * itemsize + 8 * case["M"], written + itemsize, (10 if written else 5) * logits
    )


CROSS_ENTROPY = Op(
    "cross_entropy",
    cross_entropy_reference,
    {
        "logits": Tensor("M V"),
        "targets": Tensor("M", "int64", grad=False, below="V", sentinel=("ignored", -100)),
    },
    _cost,
    edge=(
        make_case(M=1, V=1),
        make_case(M=3, V=127),
        make_case("ignored", M=17, V=129),
        make_case(M=2, V=1024),
        make_case(M=0, V=64),
        make_case("none", M=9, V=200, layout="padded"),
        make_case(M=9, V=200, layout="offset"),
        make_case("sum", "smooth", M=9, V=40, layout="transposed"),
        make_case(M=4, V=100, layout="expanded"),
        make_case("smooth", M=5, V=300, values="large"),
        make_case("smooth", "z", "ignored", M=9, V=300),
        make_case("none", "z", "ignored", M=9, V=300),
        make_case(M=5, V=300, values="equal"),
        make_case(M=5, V=300, values="spike"),
        make_case("none", M=5, V=300, values="inf"),
        make_case("none", M=6, V=100, values="infinities"),
        make_case(M=2, V=40000),
        make_case(M=1, V=270000, dtypes=("float32",)),
        make_case("smooth", "z", "ignored", M=3, V=33000, dtypes=("float16",)),
        make_case("softcap", M=9, V=200),
        make_case("softcap", "z", "ignored", M=5, V=127),
        make_case("softcap", "smooth", "none", M=4, V=100, layout="padded"),
        make_case("softcap", M=2, V=40000, dtypes=("bfloat16",)),
        make_case("softcap", "smooth", "ignored", M=3, V=33000, dtypes=("float16",)),
        make_case("wide", "ignored", M=9, V=200),
        make_case("wide", "none", M=6, V=129),
        make_case("wide", "sum", "z", M=5, V=300, dtypes=("float16",)),
    ),
    sweep=(
        make_case(M=8192, V=32000, dtypes=("bfloat16",)),
        make_case(M=8192, V=128256, dtypes=("bfloat16",)),
        make_case(M=4096, V=1024, dtypes=("bfloat16",)),
        make_case(M=4096, V=32000, dtypes=("float16", "float32")),
        make_case(M=4096, V=65536, dtypes=("bfloat16",)),
        make_case(M=8192, V=50257, dtypes=("bfloat16",)),  # GPT-2
        make_case(M=4096, V=151936, dtypes=("bfloat16",)),  # Qwen 2.5
        make_case("smooth", "z", "ignored", M=8192, V=32000, dtypes=("bfloat16",)),
    ),
    passes=("forward", "both"),
    drawn=drawn_rows(2**18, "V"),
    flags={
        "ignored": {},
        "smooth": {"label_smoothing": 0.1},
        "z": {"z_loss": 1e-3},
        "sum": {"reduction": "sum"},
        "none": {"reduction": "none"},
        # That of Gemma 2 is 30, which a row of normal logits would hardly feel.
        "softcap": {"softcap": 2.0},
        "wide": {"loss_dtype": torch.float32},
    },
)

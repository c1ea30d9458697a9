"""Embedding: out[i] = weight[ids[i]], a row of the weight for each token.

The gradient of a row is the sum of dy over the tokens that have it; that of the row `padding_idx`
is zero. No order of a sum is given, so a float32 sum is as good as any.

Bytes: forward reads each row that a token has once and writes a row a token; the rows of uniform
ids are counted in expectation. Backward reads dy and writes the whole gradient, most of it zeros.
FLOPs: an addition for each entry of dy. Cases: the vocabularies and widths of Llama, GPT-2, Qwen
2.5 and Gemma 2.
"""

import torch

from ops._drawn import drawn_length, log_uniform
from ops._spec import PASSES, Cost, Op, Tensor, in_turn, make_case

# A quarter of the tokens have this id in a case that is flagged so: text that was padded.
FREQUENT = 3


def embedding_reference(ids, weight, padding_idx=None):
    out = weight[ids]
    if padding_idx is not None:
        out = torch.where((ids == padding_idx % len(weight))[..., None], out.detach(), out)
    return out


def _cost(case, pass_, itemsize):
    m, v, c = (case[letter] for letter in "MVC")
    ids, rows = 8 * m, m * c * itemsize
    if pass_ == "backward":
        return Cost(ids + rows, v * c * itemsize, m * c)
    uniform = 3 * m // 4 if "frequent" in case.flags else m
    met = int(v * (1 - (1 - 1 / v) ** uniform)) if v else 0
    return Cost(ids + met * c * itemsize, rows, 0)


def _drawn(generator):
    """Draw a vocabulary and a width of at most 1 GiB, and a step's tokens."""
    c = drawn_length(generator, 512, 8192)
    v = min(log_uniform(generator, 8192, 2**18), 2**29 // c)
    return make_case(M=min(log_uniform(generator, 1024, 2**16), 2**28 // c), V=v, C=c)


BF16 = ("bfloat16",)
EMBEDDING = Op(
    "embedding",
    embedding_reference,
    {
        "ids": Tensor("M", "int64", grad=False, below="V", sentinel=("frequent", FREQUENT)),
        "weight": Tensor("V C"),
    },
    in_turn(_cost),
    edge=(
        make_case(M=1, V=1, C=1),
        make_case(M=17, V=5, C=33),
        make_case(M=300, V=40, C=24),
        make_case("padding", M=50, V=7, C=16),
        make_case("last", M=50, V=7, C=40),
        make_case("frequent", M=2500, V=50, C=8),
        make_case("frequent", M=2200, V=4, C=9, dtypes=("float32", "bfloat16")),
        make_case(M=0, V=9, C=16),
        make_case(M=9, V=9, C=0),
        make_case(M=3, V=2000, C=16),
        make_case(M=40, V=9, C=24, layout="padded"),
        make_case(M=40, V=9, C=24, layout="offset"),
        make_case(M=40, V=9, C=24, layout="strided"),
        make_case(M=40, V=9, C=24, layout="transposed"),
        make_case(M=40, V=9, C=24, layout="expanded"),
        make_case(M=40, V=9, C=32, layout="offset8", dtypes=("float16",)),
        make_case(M=40, V=9, C=24, values="large"),
        make_case(M=40, V=9, C=24, values="infinities"),
        make_case(M=40, V=9, C=24, values="denormal"),
    ),
    sweep=(
        make_case(M=16384, V=128256, C=2048, dtypes=BF16),  # Llama 3.2 1B
        make_case(M=8192, V=128256, C=4096, dtypes=BF16),  # Llama 3 8B
        make_case(M=16384, V=50257, C=768, dtypes=("bfloat16", "float32")),  # GPT-2
        make_case(M=4096, V=32000, C=4096, dtypes=("bfloat16", "float16")),  # Llama 2 7B
        make_case(M=32768, V=151936, C=2048, dtypes=BF16),  # Qwen 2.5 3B
        make_case(M=8192, V=256000, C=3584, dtypes=BF16),  # Gemma 2 9B
        make_case("frequent", M=16384, V=128256, C=2048, dtypes=BF16),
        make_case("padding", M=16384, V=50257, C=768, dtypes=BF16),
    ),
    passes=PASSES,
    drawn=_drawn,
    flags={"padding": {"padding_idx": 3}, "last": {"padding_idx": -1}, "frequent": {}},
)

"""Attention of the last queries of each sequence over a cache of its keys and values.

out = softmax(scale q kᵀ) v for each head, the scale being 1 / sqrt(D). Query head h reads key head
h // (H / K). The first `lengths` keys of a sequence count, all S if there are no lengths. Query i
stands at p = lengths - Q + i and sees the keys to p; a query that sees none gives zeros.

Bytes: queries, keys and values are read, the output is written. With lengths, half of the keys
count in the mean. FLOPs: 4 B H Q S D. Cases: the sizes of named models in generation.
"""

import math

import torch

from ops._attention import scale
from ops._drawn import log_uniform
from ops._spec import Cost, Op, Tensor, make_case


def decode_attention_reference(q, k, v, lengths=None):
    (b, h, rows, d), heads, s = q.shape, k.shape[1], k.shape[2]
    group = h // heads if heads else 0
    # Query heads of one key head side by side: no key is repeated.
    scores = q.reshape(b, heads, group * rows, d) @ k.mT / math.sqrt(d)
    scores = scores.view(b, heads, group, rows, s)
    ends = torch.full((b,), s, device=q.device) if lengths is None else lengths
    last = ends.view(b, 1, 1, 1, 1) - rows + torch.arange(rows, device=q.device).view(rows, 1)
    hidden = torch.arange(s, device=q.device) > last
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
    # All keys of some queries are hidden.
    weights = weights.masked_fill(hidden, 0.0)
    out = weights.view(b, heads, group * rows, s) @ v
    return out.view(b, heads, group, rows, d).reshape(q.shape)


def _cost(case, pass_, itemsize):
    b, h, heads, rows, s, d = (case[letter] for letter in "BHKQSD")
    keys = b * heads * s * d * itemsize
    read, flops = 2 * keys, 4 * b * h * rows * s * d
    if "lengths" in case.flags:
        read, flops = read // 2 + 8 * b, flops // 2
    queries = b * h * rows * d * itemsize
    return Cost(queries + read, queries, flops)


def _drawn(generator):
    """Any batch and length; one query, and heads of 64 or 128, one or several for each key."""
    d, heads = generator.choice((64, 128)), generator.choice((1, 2, 4, 8))
    group = generator.choice((1, 3, 4, 5, 7, 8))
    s = log_uniform(generator, 512, 32768)
    b = max(1, log_uniform(generator, 4096, 2**19) // s)
    return make_case(B=b, H=heads * group, K=heads, Q=1, S=s, D=d)


BF16 = ("bfloat16",)
LLAMA = {"H": 32, "K": 8}
KEYS = Tensor("B K S D", scale=scale, grad=False)
DECODE_ATTENTION = Op(
    "decode_attention",
    decode_attention_reference,
    {
        "q": Tensor("B H Q D", scale=scale, grad=False),
        "k": KEYS,
        "v": KEYS,
        "lengths": Tensor("B", dtype="int64", grad=False, when="lengths", below="S"),
    },
    _cost,
    edge=(
        make_case(B=1, H=1, K=1, Q=1, S=1, D=64),
        make_case(B=1, H=4, K=2, Q=1, S=300, D=64),
        make_case(B=2, H=8, K=8, Q=1, S=130, D=128),
        make_case(B=1, H=8, K=1, Q=1, S=1000, D=64),
        make_case(B=2, H=4, K=2, Q=3, S=100, D=64),
        make_case("lengths", B=3, H=4, K=2, Q=1, S=200, D=64),
        make_case("lengths", B=3, H=4, K=2, Q=2, S=600, D=128),
        make_case(B=0, H=2, K=1, Q=1, S=64, D=64),
        make_case(B=2, H=4, K=2, Q=1, S=70, D=64, layout="padded"),
        make_case(B=2, H=4, K=2, Q=2, S=70, D=64, layout="offset"),
        make_case(B=2, H=4, K=2, Q=1, S=70, D=64, layout="offset8", dtypes=("float16",)),
        make_case(B=2, H=4, K=2, Q=2, S=70, D=64, layout="transposed"),
        make_case(B=2, H=4, K=2, Q=1, S=70, D=64, layout="expanded"),
        make_case(B=1, H=4, K=2, Q=1, S=600, D=64, values="large", dtypes=("float32", "bfloat16")),
        make_case(B=1, H=4, K=2, Q=1, S=600, D=64, values="equal"),
        make_case(B=1, H=4, K=2, Q=1, S=600, D=64, values="denormal"),
    ),
    sweep=(
        # Llama 3 8B: one request, some and many of them; a long one; several queries at once.
        make_case(B=1, **LLAMA, Q=1, S=8192, D=128, dtypes=BF16),
        make_case(B=8, **LLAMA, Q=1, S=8192, D=128, dtypes=BF16),
        make_case(B=64, **LLAMA, Q=1, S=8192, D=128, dtypes=("bfloat16", "float16")),
        make_case(B=64, **LLAMA, Q=1, S=1024, D=128, dtypes=BF16),
        make_case(B=1, **LLAMA, Q=1, S=131072, D=128, dtypes=BF16),
        make_case(B=8, **LLAMA, Q=4, S=8192, D=128, dtypes=BF16),
        # A head for each query: Llama 2 7B.
        make_case(B=16, H=32, K=32, Q=1, S=4096, D=128, dtypes=BF16),
    ),
    drawn=_drawn,
    flags={"lengths": {}},
)

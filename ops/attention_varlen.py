"""Attention of packed sequences: out = softmax(scale q kᵀ) v within each, their rows end to end.

Sequence i has the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] - 1 of q, and such keys. The scale is
1 / sqrt(D). Query head h reads key head h // (H / K), K being H if a case has none. Row i of a
sequence stands at key p = i + its keys - its rows. Causal rows see no key beyond p, and with a
window W none before p - W. A softcap c makes the scores c tanh(scores / c). A row without a key is
zero.

Lengths follow from the sizes of a case. The shares of B sequences are the quantiles (i + 1/2) / B
of a log-normal law of deviation one, as lengths of documents spread. They come in an order of
golden steps, so that long and short ones mix, and their sums are rounded to rows. "even" ones have
equal shares. With U keys in place of T, a case has U - T keys before the new rows, as a cache has.
Their shares come in the reverse order. With fewer keys than rows all keys do.

Rows and keys that lie alike have one tensor of boundaries, which is handed over twice. Users of
flash-attn do so, and so does the example of PyTorch's `varlen_attn`.

Bytes: forward, q, k, v and the boundaries are read and out is written. Backward, out, its gradient
and the logarithm of each row's sum are read too, and three gradients are written. FLOPs: 4 D
forward and 10 D backward for each pair of a row and a key that it sees, as in `attention`. A causal
triangle is half of its square. Cases: packed training of named models, short texts, and
prompts that continue a cache.
"""

import functools
import math
from itertools import accumulate, pairwise
from statistics import NormalDist

import torch

from ops._attention import attend, scale
from ops._drawn import log_uniform
from ops._spec import PASSES, Cost, Op, Tensor, in_turn, make_case


def attention_varlen_reference(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    causal=False,
    window=None,
    softcap=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
):
    if cu_seqlens_q.is_meta:
        # There are shapes only, and the result has that of q.
        return q + 0 * (k.sum() + v.sum())
    rows, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    # Rows past the last sequence see no key; so the result hangs on all tensors in every case.
    parts = [q[rows[-1] :] * 0 + 0 * (k[:0].sum() + v[:0].sum())]
    for index in reversed(range(len(rows) - 1)):
        mine = q[rows[index] : rows[index + 1]]
        their_k, their_v = (x[keys[index] : keys[index + 1]] for x in (k, v))
        heads = (x.transpose(0, 1) for x in (mine, their_k, their_v))
        parts.append(attend(*heads, None, causal, window, softcap).transpose(0, 1))
    return torch.cat(parts[::-1])


def lengths_of_rows(case):
    """The number of rows of each sequence of a case."""
    return _shared_out(case["T"], _shares(case))


def lengths_of_keys(case):
    """The number of keys of each sequence of a case; see the module."""
    rows, total = lengths_of_rows(case), case.sizes.get("U", case["T"])
    if total < case["T"]:
        return _shared_out(total, _shares(case)[::-1])
    before = _shared_out(total - case["T"], _shares(case)[::-1])
    return [new + old for new, old in zip(rows, before, strict=True)]


def _shares(case):
    """A positive number for each sequence, in whose ratio they have their lengths."""
    count = case["B"]
    if "even" in case.flags:
        return [1.0] * count
    normal = NormalDist()
    # The step nearest to the golden section of them all that meets each of them.
    step = round(count * (math.sqrt(5) - 1) / 2) or 1
    while math.gcd(step, count) > 1:
        step += 1
    places = (index * step % count for index in range(count))
    return [math.exp(normal.inv_cdf((place + 0.5) / count)) for place in places]


def _shared_out(total, shares):
    """The total in whole parts of these shares."""
    ends = [round(total * part / sum(shares)) for part in accumulate(shares, initial=0.0)]
    return [end - start for start, end in pairwise(ends)]


def _boundaries(lengths):
    """Return the function of a case that gives the boundaries of its sequences as a table."""

    def table(case, start):
        return torch.tensor(list(accumulate(lengths(case), initial=0)), dtype=torch.float64)

    return table


def _cost(case, pass_, itemsize):
    b, h, t, d = (case[letter] for letter in "BHTD")
    heads, u = case.sizes.get("K", h), case.sizes.get("U", t)
    rows, keys = t * h * d * itemsize, u * heads * d * itemsize
    boundaries = (1 if u == t else 2) * 4 * (b + 1)
    products = h * d * sum(map(_pairs(case), lengths_of_rows(case), lengths_of_keys(case)))
    if pass_ == "forward":
        return Cost(rows + 2 * keys + boundaries, rows, 2 * products)
    read = 3 * rows + 2 * keys + boundaries + _kept(case)
    return Cost(read, rows + 2 * keys, 5 * products)


def _kept(case):
    """The logarithm of the sum of each row, in float32."""
    return 4 * case["H"] * case["T"]


def _pairs(case):
    """The function of a sequence's rows and keys that gives twice the number of pairs seen."""

    def pairs(s, t):
        if "causal" not in case.flags:
            return 2 * s * t
        window = case.sizes.get("W", t)
        # Triangles are half squares: of the keys after a row, of rows before all keys, and of
        # the keys before a window.
        hidden = max(0, t - window) ** 2 - max(0, t - s - window) ** 2
        return 2 * s * t - s * s + max(0, s - t) ** 2 - hidden

    return pairs


def _with_one_tensor(function):
    """Return an implementation as the harness calls it: one tensor of boundaries if both agree."""

    @functools.wraps(function)
    def call(**given):
        # In each case the lengths of rows and of keys agree if their sums do.
        if given["q"].shape[0] == given["k"].shape[0]:
            given["cu_seqlens_k"] = given["cu_seqlens_q"]
        return function(**given)

    return call


def _longest(lengths):
    return lambda case: max(lengths(case), default=0)


BF16 = ("bfloat16",)
LLAMA = {"H": 32, "K": 8}


def _sweep():
    # Packed training: 16,384 tokens and a hidden size of 2048, as in `attention`.
    for flags in ((), ("causal",)):
        for d in (64, 128):
            dtypes = ("bfloat16", "float16") if flags and d == 128 else BF16
            yield make_case(*flags, dtypes=dtypes, B=16, H=2048 // d, T=16384, D=d)
    # The same in equal lengths, which `attention` has as a batch.
    yield make_case("causal", "even", B=8, H=16, T=16384, D=128, dtypes=BF16)
    # Llama 3 8B in training on documents, and prompts that continue a cache.
    yield make_case("causal", B=8, **LLAMA, T=32768, D=128, dtypes=BF16)
    yield make_case("causal", B=16, **LLAMA, T=4096, U=65536, D=128, dtypes=BF16)
    # The window of Mistral 7B; the softcap of Gemma 2 9B.
    yield make_case("causal", B=4, **LLAMA, W=4095, T=32768, D=128, dtypes=BF16)
    yield make_case("causal", "softcap", B=16, H=16, K=8, T=16384, D=256, dtypes=BF16)
    # Short texts, as an encoder of the size of BERT base embeds them.
    yield make_case(B=256, H=12, T=16384, D=64, dtypes=BF16)


def _drawn(generator):
    """Any number of sequences, heads of 64 or 128, and 1024 to 16384 rows in all."""
    flags = generator.choice(((), ("causal",)))
    d, h = generator.choice((64, 128)), generator.choice((8, 12, 16, 20, 32))
    b, t = log_uniform(generator, 2, 64), log_uniform(generator, 1024, 16384)
    return make_case(*flags, B=b, H=h, T=t, D=d)


KEYS = Tensor("U|T K|H D", scale=scale)
ATTENTION_VARLEN = Op(
    "attention_varlen",
    attention_varlen_reference,
    {
        "q": Tensor("T H D", scale=scale),
        "k": KEYS,
        "v": KEYS,
        "cu_seqlens_q": Tensor(
            "B+1", dtype="int32", grad=False, table=_boundaries(lengths_of_rows)
        ),
        "cu_seqlens_k": Tensor(
            "B+1", dtype="int32", grad=False, table=_boundaries(lengths_of_keys)
        ),
    },
    in_turn(_cost, _kept),
    edge=(
        make_case(B=1, H=2, T=70, D=64),
        make_case(B=3, H=2, T=150, D=64),
        make_case("causal", B=3, H=2, T=200, D=64),
        make_case("causal", B=2, H=1, T=200, D=128),
        make_case("causal", "even", B=2, H=1, T=128, D=64),
        # More sequences than rows: some are empty. None has a row. One row each.
        make_case("causal", B=40, H=1, T=30, D=64),
        make_case("causal", B=2, H=2, T=0, D=64),
        make_case("causal", "even", B=9, H=2, T=9, D=64),
        # Heads share keys; a cache before the rows; fewer keys than rows, so some see none.
        make_case("causal", B=3, H=4, K=2, T=100, D=64),
        make_case("causal", B=3, H=4, K=2, T=40, U=210, D=64),
        make_case(B=3, H=6, K=1, T=70, U=150, D=64),
        make_case("causal", B=3, H=2, T=150, U=60, D=64),
        make_case(B=5, H=2, T=60, U=3, D=64),
        make_case("causal", B=3, H=2, W=40, T=220, D=64),
        make_case("causal", B=3, H=4, K=2, W=64, T=90, U=250, D=64),
        make_case("softcap", B=3, H=2, T=150, D=64),
        make_case("causal", "softcap", B=3, H=4, K=2, T=40, U=100, D=64),
        make_case(B=3, H=2, T=70, D=16),
        make_case("causal", B=3, H=2, T=70, D=40),
        make_case("causal", B=3, H=2, K=1, T=70, D=96),
        make_case(B=2, H=1, T=70, D=256),
        make_case("causal", B=3, H=2, T=70, D=64, layout="padded"),
        make_case("causal", B=3, H=2, T=70, D=64, layout="offset"),
        make_case(B=3, H=2, T=40, D=64, layout="offset8", dtypes=("float16",)),
        make_case("causal", B=3, H=2, T=40, D=64, layout="transposed"),
        make_case("causal", B=3, H=2, T=40, D=64, layout="strided"),
        make_case(
            *("causal",), B=2, H=1, T=140, D=64, values="large", dtypes=("float32", "bfloat16")
        ),
        make_case(B=2, H=1, T=140, D=64, values="equal"),
        make_case(B=2, H=1, T=140, D=64, values="spike", dtypes=("float32", "bfloat16")),
        make_case("causal", B=2, H=1, T=40, D=64, values="denormal"),
    ),
    sweep=tuple(_sweep()),
    passes=PASSES,
    # On Hopper dq is added up in memory, in any order.
    deterministic=("forward",),
    drawn=_drawn,
    params={
        "causal": False,
        "window": lambda case: case.sizes.get("W"),
        "max_seqlen_q": _longest(lengths_of_rows),
        "max_seqlen_k": _longest(lengths_of_keys),
    },
    flags={"causal": {"causal": True}, "even": {}, "softcap": {"softcap": 2.0}},
    adapted=_with_one_tensor,
)

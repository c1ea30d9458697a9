"""Attention over kept blocks of scores: out = softmax(scale q kᵀ) v, over the keys of these blocks.

The scores of a head are cut into squares; `block_mask` says which are kept. It is `[I, J]` for all
heads, `[G, I, J]` with G of 1 or H, or `[A, G, I, J]` with A of 1 or B. The last square of a row or
column may be shorter. Query head h reads key head h // (H / K), K being H if a case has none. Row i
stands at key p = i + T - S, T being S if a case has none; causal rows see no key beyond p. A row
that sees no key gives zeros. The scale is 1 / sqrt(D).

The side of a square follows from I and S: the smallest power of two, at least 16, of which I cover
S. The masks keep the diagonal and squares at random, or those nearest to the diagonal in cases with
"local". Users make something of a mask once and use it in many steps, so it is prepared.

Bytes: those of attention; the mask has a byte for a square and is not counted. FLOPs: 4 D forward
and 10 D backward for each pair that is kept and seen. Cases: 16,384 positions with a tenth, a
quarter and a half of the squares, and the block sizes of Dao et al. ("FlashAttention", 2022).
"""

import functools
import math

import torch

from ops._attention import attend, scale
from ops._drawn import log_uniform
from ops._spec import PASSES, Case, Cost, Op, Tensor, in_turn, make_case

LEAST_SIDE = 16
SHARES = {"tenth": 0.1, "quarter": 0.25, "half": 0.5, "gaps": 0.25}


def block_sparse_attention_reference(q, k, v, block_mask, block_size, causal=False):
    b, h = q.shape[:2]
    full = block_mask[(None,) * (4 - block_mask.dim())].expand(b, h, *block_mask.shape[-2:])

    def pairs(heads, first, rows, keys):
        i = torch.arange(first, first + rows, device=q.device) // block_size
        j = torch.arange(keys, device=q.device) // block_size
        return full[heads // h, heads % h][:, i][:, :, j]

    heads = (x.flatten(0, 1) for x in (q, k, v))
    return attend(*heads, causal=causal, pairs=pairs).view(q.shape)


def side(case: Case) -> int:
    """Return the side of the squares of a case."""
    return max(LEAST_SIDE, 1 << (-(-case["S"] // case["I"]) - 1).bit_length())


def _kept_blocks(case, start):
    """The mask of a case, which is the same wherever the tables of a cell start."""
    return _mask(tuple(case.sizes.items()), case.flags).double()


@functools.lru_cache(maxsize=32)
def _mask(sizes, flags):
    """The mask of a case: the same share of those squares in each head that hold a seen pair."""
    case = Case(dict(sizes), flags)
    seen = _pairs_by_block(case) > 0
    i, j = case["I"], case["J"]
    p, key = torch.arange(i)[:, None] + j - i, torch.arange(j)[None, :]
    shape = [case[letter] for letter in "AG" if letter in case.sizes]
    generator = torch.Generator().manual_seed(0)
    rank = torch.rand((*shape, i, j), generator=generator, dtype=torch.float64)
    if "local" in flags:
        # A fraction below one decides between two squares at the same distance.
        rank = rank + (p - key).abs()
    if "gaps" in flags:
        seen[0], seen[:, -1] = False, False
    else:
        rank = rank.masked_fill(p == key, -1.0)
    rank = rank.masked_fill(~seen, math.inf)
    share = next((SHARES[flag] for flag in flags if flag in SHARES), 1.0)
    count = round(share * int(seen.sum()))
    if "gaps" not in flags:
        # The diagonal is kept, so no share is too small for it.
        count = max(count, int(((p == key) & seen).sum()))
    order = rank.flatten(-2).argsort(-1)[..., :count]
    kept = torch.zeros(rank.shape, dtype=torch.bool).flatten(-2).scatter(-1, order, True)
    return kept.view(rank.shape)


def _pairs_by_block(case):
    """How many pairs of a row and a key each square of a head holds that may see each other."""
    s, t = case["S"], case.sizes.get("T", case["S"])
    size, i, j = side(case), case["I"], case["J"]
    row, first = torch.arange(s)[:, None], size * torch.arange(j)[None, :]
    last = torch.clamp(first + size, max=t).expand(s, j)
    if "causal" in case.flags:
        last = torch.minimum(last, row + t - s + 1)
    found = torch.zeros((i, j), dtype=torch.int64)
    return found.index_add(0, torch.arange(s) // size, (last - first).clamp(min=0))


@functools.lru_cache(maxsize=1024)
def _pairs(sizes, flags):
    """How many pairs a call computes: those of all heads that are kept and seen."""
    case = Case(dict(sizes), flags)
    mask = _mask(sizes, flags)
    pairs = int((mask * _pairs_by_block(case)).sum())
    alike = case["B"] // case.sizes.get("A", 1) * (case["H"] // case.sizes.get("G", 1))
    return pairs * alike


def _cost(case, pass_, itemsize):
    b, h, s, d = (case[letter] for letter in "BHSD")
    heads, t = case.sizes.get("K", h), case.sizes.get("T", s)
    rows, keys = b * h * s * d * itemsize, b * heads * t * d * itemsize
    products = 4 * d * _pairs(tuple(case.sizes.items()), case.flags)
    if pass_ == "forward":
        return Cost(rows + 2 * keys, rows, products)
    return Cost(3 * rows + 2 * keys + _kept(case), rows + 2 * keys, products * 5 // 2)


def _kept(case):
    """The logarithm of the sum of each row, in float32."""
    return 4 * case["B"] * case["H"] * case["S"]


def _sweep():
    """16,384 tokens and a hidden size of 2048, as the sweep of attention has."""
    bf16 = ("bfloat16",)
    for flag in ("tenth", "quarter", "half"):
        yield make_case(flag, B=1, H=16, I=128, J=128, S=16384, D=128, dtypes=bf16)
    for flag in ("tenth", "quarter", "half"):
        yield make_case(flag, B=1, H=32, I=128, J=128, S=16384, D=64, dtypes=bf16)
    yield make_case("causal", "quarter", B=1, H=16, I=128, J=128, S=16384, D=128, dtypes=bf16)
    # All squares, which says what the lists cost.
    yield make_case(B=1, H=16, I=128, J=128, S=16384, D=128, dtypes=bf16)
    # Smaller squares; a mask for each head; shorter sequences of a batch.
    yield make_case("quarter", B=1, H=16, I=256, J=256, S=16384, D=128, dtypes=bf16)
    yield make_case("quarter", B=1, H=16, G=16, I=128, J=128, S=16384, D=128, dtypes=bf16)
    yield make_case("quarter", B=4, H=16, I=32, J=32, S=4096, D=128, dtypes=bf16)
    # Llama 3 8B with a band of an eighth of the squares that a causal row sees.
    yield make_case(
        "causal", "local", "quarter", B=1, H=32, K=8, I=128, J=128, S=16384, D=128, dtypes=bf16
    )


def _drawn(generator):
    """Any length from 1024, squares of 64 or 128, heads of 64 or 128, up to 16,384 tokens."""
    flags = generator.choice(((), ("causal",))), generator.choice(("tenth", "quarter", "half"))
    d, h = generator.choice((64, 128)), generator.choice((8, 12, 16, 20, 32))
    s, size = log_uniform(generator, 1024, 16384), generator.choice((64, 128))
    blocks = -(-s // size)
    b = max(1, log_uniform(generator, 2048, 16384) // s)
    return make_case(*flags[0], flags[1], B=b, H=h, I=blocks, J=blocks, S=s, D=d)


KEYS = Tensor("B K|H T|S D", scale=scale)
BLOCK_SPARSE_ATTENTION = Op(
    "block_sparse_attention",
    block_sparse_attention_reference,
    {
        "q": Tensor("B H S D", scale=scale),
        "k": KEYS,
        "v": KEYS,
        "block_mask": Tensor("A? G? I J", dtype="bool", grad=False, table=_kept_blocks),
    },
    in_turn(_cost, _kept),
    edge=(
        make_case(B=1, H=1, I=1, J=1, S=1, D=64),
        make_case(B=1, H=2, I=2, J=2, S=128, D=64),
        make_case("half", B=1, H=2, I=4, J=4, S=127, D=64),
        make_case("gaps", B=2, H=1, I=3, J=3, S=130, D=32),
        make_case("causal", "half", B=1, H=1, I=3, J=3, S=96, D=64),
        make_case("causal", "half", B=1, H=2, G=2, I=4, J=4, S=100, D=32),
        make_case("local", "half", B=1, H=1, I=5, J=5, S=80, D=16),
        make_case("half", B=1, H=1, I=2, J=2, S=200, D=128),
        make_case("half", B=2, H=4, K=2, A=2, G=4, I=2, J=3, T=90, S=64, D=64),
        make_case("causal", "half", B=1, H=4, K=1, I=2, J=6, T=180, S=50, D=64),
        make_case("causal", "half", B=2, H=2, A=2, G=1, I=4, J=2, T=60, S=110, D=64),
        make_case(B=0, H=2, I=2, J=2, S=64, D=64),
        make_case("causal", "half", B=1, H=2, I=3, J=3, S=70, D=64, layout="padded"),
        make_case("half", B=1, H=2, I=3, J=3, S=40, D=64, layout="offset8", dtypes=("float16",)),
        make_case("half", B=1, H=2, I=3, J=3, S=40, D=64, layout="transposed"),
        make_case("half", B=1, H=1, I=5, J=5, S=70, D=40),
        make_case("half", B=1, H=1, I=2, J=2, S=64, D=256),
        make_case(
            "half", B=1, H=1, I=3, J=3, S=140, D=64, values="large", dtypes=("float32", "bfloat16")
        ),
        make_case("half", B=1, H=1, I=3, J=3, S=140, D=64, values="equal"),
        make_case(
            "half", B=1, H=1, I=3, J=3, S=140, D=64, values="spike", dtypes=("float32", "bfloat16")
        ),
        make_case("half", B=1, H=1, I=3, J=3, S=40, D=64, values="denormal"),
    ),
    sweep=tuple(_sweep()),
    passes=PASSES,
    drawn=_drawn,
    # On Hopper dq is added up in memory, in any order.
    deterministic=("forward",),
    prepared=("block_mask",),
    params={"block_size": side, "causal": False},
    flags={"causal": {"causal": True}, "local": {}, **{flag: {} for flag in SHARES}},
)

"""Rotary position embedding of queries and keys.

    forward   each pair (a, b) of a head becomes (a c - b s, a s + b c)
    backward  the same with -s, the rotation by the opposite angle

The cosine c and the sine s are those of the position and the place of the pair. Pairs
are the two halves of a head (as in GPT-NeoX and Llama), or neighbours, `interleaved` (as in GPT-J
and the original, Su et al., "RoFormer", 2021). Entries beyond the rotated ones are copied. "alone":
there is no k. "positions": the position of each token is a row of tables of length L.

Bytes: q, k, cos and sin are read once, and the results of q and k written. FLOPs: 6 a pair. Cases:
the attention of Llama 3, GLM-4, Qwen 2.5 and Phi-3.
"""

import torch

from ops._drawn import log_uniform
from ops._spec import PASSES, Cost, Op, Tensor, in_turn, make_case


def rotary_reference(q, k, cos, sin, positions=None, interleaved=False):
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    angles = cos[..., None, :], sin[..., None, :]
    turned = tuple(_turned(x, *angles, interleaved) for x in (q, k) if x is not None)
    return turned[0] if k is None else turned


def _turned(x, cos, sin, interleaved):
    size = 2 * cos.shape[-1]
    pairs, rest = x[..., :size], x[..., size:]
    # The members of a pair in the last dimension.
    pairs = pairs.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    a, b = (pairs if interleaved else pairs.transpose(-1, -2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1)
    turned = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)
    return torch.cat((turned, rest), -1)


def _table(of):
    """The table of a function of the angles: of position p and pair r, p / BASE**(r / R)."""

    def table(case, start):
        rows = case.sizes.get("L", case["S"])
        positions = start + torch.arange(rows, dtype=torch.float64)
        places = torch.arange(case["R"], dtype=torch.float64) / max(1, case["R"])
        return of(positions[:, None] * BASE**-places)

    return table


def _cost(case, pass_, itemsize):
    tokens = case["B"] * case["S"]
    heads = tokens * (case["H"] + (0 if "alone" in case.flags else case["K"]))
    elements, rows, chosen = heads * case["D"], case["S"], 0
    if "positions" in case.flags:
        # Positions may repeat, and a table of L rows has no more.
        rows, chosen = min(tokens, case["L"]), 8 * tokens
    read = (elements + 2 * rows * case["R"]) * itemsize + chosen
    return Cost(read, elements * itemsize, 6 * heads * case["R"])


# That of Llama 3; RoFormer has 10,000.
BASE = 500_000.0
BF16 = ("bfloat16",)
LLAMA = {"H": 32, "K": 8, "D": 128, "R": 64}


def _drawn(generator):
    """Any number of tokens; heads of 64 to 128, all of which turns, one or several for each key."""
    d, k = generator.choice((64, 80, 96, 128)), generator.choice((1, 2, 4, 8, 16))
    sizes = {"H": k * generator.choice((1, 3, 4, 5, 7, 8)), "K": k, "D": d, "R": d // 2}
    tokens, s = log_uniform(generator, 512, 16384), log_uniform(generator, 128, 8192)
    return make_case(B=max(1, tokens // s), S=s, **sizes)


ROTARY = Op(
    "rotary",
    rotary_reference,
    {
        "q": Tensor("B S H D"),
        "k": Tensor("B S K D", unless="alone"),
        "cos": Tensor("L|S R", grad=False, table=_table(torch.cos)),
        "sin": Tensor("L|S R", grad=False, table=_table(torch.sin)),
        "positions": Tensor("B S", "int64", grad=False, when="positions", below="L"),
    },
    in_turn(_cost),
    edge=(
        make_case(B=1, S=1, H=1, K=1, D=2, R=1),
        make_case(B=1, S=2, H=2, K=1, D=64, R=32),
        make_case(B=2, S=3, H=5, K=1, D=96, R=48),
        make_case(B=2, S=2, H=3, K=3, D=80, R=16),
        make_case(B=2, S=0, H=2, K=1, D=64, R=32),
        make_case("interleaved", B=1, S=1, H=1, K=1, D=2, R=1),
        make_case("interleaved", B=2, S=3, H=9, K=2, D=64, R=32),
        make_case("interleaved", B=1, S=2, H=3, K=1, D=80, R=20),
        make_case(B=2, S=2, H=4, K=2, D=64, R=32, layout="padded"),
        make_case(B=2, S=2, H=4, K=2, D=64, R=32, layout="offset8"),
        make_case(B=2, S=2, H=3, K=1, D=32, R=16, layout="strided"),
        make_case(B=2, S=2, H=3, K=1, D=32, R=16, layout="transposed"),
        make_case("interleaved", B=2, S=2, H=3, K=1, D=32, R=16, layout="expanded"),
        make_case(B=1, S=3, H=4, K=2, D=64, R=32, values="large"),
        make_case(B=1, S=3, H=4, K=2, D=64, R=32, values="spike"),
        make_case(B=1, S=3, H=4, K=2, D=64, R=32, values="infinities"),
        make_case(B=1, S=3, H=4, K=2, D=64, R=32, values="denormal"),
        make_case("interleaved", B=1, S=3, H=4, K=2, D=64, R=32, values="infinities"),
        make_case("alone", B=2, S=3, H=5, K=1, D=96, R=48),
        make_case("alone", B=2, S=2, H=3, K=1, D=32, R=16, layout="transposed"),
        make_case("positions", B=2, S=3, H=5, K=2, D=64, R=32, L=40),
        make_case("positions", "interleaved", B=2, S=3, H=4, K=1, D=80, R=20, L=7),
        make_case("positions", "alone", B=3, S=1, H=4, K=1, D=64, R=32, L=9, layout="padded"),
    ),
    # The attention of Llama 3 8B; that of GLM-4 9B, which turns every second half of a head.
    sweep=(
        *(make_case(B=1, S=s, **LLAMA, dtypes=BF16) for s in (1024, 4096, 16384)),
        make_case(B=4, S=4096, **LLAMA),
        make_case("interleaved", B=4, S=4096, **LLAMA, dtypes=BF16),
        make_case(B=2, S=4096, H=28, K=4, D=128, R=64, dtypes=BF16),  # Qwen 2.5 7B
        make_case(B=2, S=4096, H=32, K=32, D=96, R=48, dtypes=BF16),  # Phi-3 mini
        make_case("interleaved", B=4, S=4096, H=32, K=2, D=128, R=32, dtypes=BF16),
    ),
    passes=PASSES,
    drawn=_drawn,
    # A tensor says by its presence whether k and positions are there.
    flags={"interleaved": {"interleaved": True}, "alone": {}, "positions": {}},
)

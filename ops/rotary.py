"""Rotary position embedding of queries and keys.

    forward   each pair (a, b) of a head becomes (a c - b s, a s + b c)
    backward  the same with -s, the rotation by the opposite angle

The cosine c and the sine s are those of the position and the place of the pair. Pairs
are the two halves of a head (as in GPT-NeoX and Llama), or neighbours, `interleaved` (as in GPT-J
and the original, Su et al., "RoFormer", 2021). Entries beyond the rotated ones are copied.

Bytes: q, k, cos and sin are read once, and the results of q and k written. FLOPs: 6 a pair. Cases:
the attention of Llama 3, GLM-4, Qwen 2.5 and Phi-3.
"""

import torch

from ops._drawn import log_uniform
from ops._spec import PASSES, Cost, Op, Tensor, case, in_turn


def rotary_reference(q, k, cos, sin, interleaved=False):
    return tuple(_turned(x, cos[:, None], sin[:, None], interleaved) for x in (q, k))


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

    def table(a_case, start):
        positions = start + torch.arange(a_case["S"], dtype=torch.float64)
        places = torch.arange(a_case["R"], dtype=torch.float64) / max(1, a_case["R"])
        return of(positions[:, None] * BASE**-places)

    return table


def _cost(a_case, direction, itemsize):
    heads = a_case["B"] * a_case["S"] * (a_case["H"] + a_case["K"])
    elements, angles = heads * a_case["D"], 2 * a_case["S"] * a_case["R"]
    return Cost((elements + angles) * itemsize, elements * itemsize, 6 * heads * a_case["R"])


# That of Llama 3; RoFormer has 10,000.
BASE = 500_000.0
BF16 = ("bfloat16",)
LLAMA = {"H": 32, "K": 8, "D": 128, "R": 64}


def _drawn(generator):
    """Any number of tokens; heads of 64 to 128, all of which turns, one or several for each key."""
    d, k = generator.choice((64, 80, 96, 128)), generator.choice((1, 2, 4, 8, 16))
    sizes = {"H": k * generator.choice((1, 3, 4, 5, 7, 8)), "K": k, "D": d, "R": d // 2}
    tokens, s = log_uniform(generator, 512, 16384), log_uniform(generator, 128, 8192)
    return case(B=max(1, tokens // s), S=s, **sizes)


ROTARY = Op(
    "rotary",
    rotary_reference,
    {
        "q": Tensor("B S H D"),
        "k": Tensor("B S K D"),
        "cos": Tensor("S R", grad=False, table=_table(torch.cos)),
        "sin": Tensor("S R", grad=False, table=_table(torch.sin)),
    },
    in_turn(_cost),
    edge=(
        case(B=1, S=1, H=1, K=1, D=2, R=1),
        case(B=1, S=2, H=2, K=1, D=64, R=32),
        case(B=2, S=3, H=5, K=1, D=96, R=48),
        case(B=2, S=2, H=3, K=3, D=80, R=16),
        case(B=2, S=0, H=2, K=1, D=64, R=32),
        case("interleaved", B=1, S=1, H=1, K=1, D=2, R=1),
        case("interleaved", B=2, S=3, H=9, K=2, D=64, R=32),
        case("interleaved", B=1, S=2, H=3, K=1, D=80, R=20),
        case(B=2, S=2, H=4, K=2, D=64, R=32, layout="padded"),
        case(B=2, S=2, H=4, K=2, D=64, R=32, layout="offset8"),
        case(B=2, S=2, H=3, K=1, D=32, R=16, layout="strided"),
        case(B=2, S=2, H=3, K=1, D=32, R=16, layout="transposed"),
        case("interleaved", B=2, S=2, H=3, K=1, D=32, R=16, layout="expanded"),
        case(B=1, S=3, H=4, K=2, D=64, R=32, values="large"),
        case(B=1, S=3, H=4, K=2, D=64, R=32, values="spike"),
        case(B=1, S=3, H=4, K=2, D=64, R=32, values="infinities"),
        case(B=1, S=3, H=4, K=2, D=64, R=32, values="denormal"),
        case("interleaved", B=1, S=3, H=4, K=2, D=64, R=32, values="infinities"),
    ),
    # The attention of Llama 3 8B; that of GLM-4 9B, which turns every second half of a head.
    sweep=(
        *(case(B=1, S=s, **LLAMA, dtypes=BF16) for s in (1024, 4096, 16384)),
        case(B=4, S=4096, **LLAMA),
        case("interleaved", B=4, S=4096, **LLAMA, dtypes=BF16),
        case(B=2, S=4096, H=28, K=4, D=128, R=64, dtypes=BF16),  # Qwen 2.5 7B
        case(B=2, S=4096, H=32, K=32, D=96, R=48, dtypes=BF16),  # Phi-3 mini
        case("interleaved", B=4, S=4096, H=32, K=2, D=128, R=32, dtypes=BF16),
    ),
    passes=PASSES,
    drawn=_drawn,
    flags={"interleaved": {"interleaved": True}},
)

"""Random integers, and dropout, both from the stream of a seed (`_philox.py`).

    randint  out[i] = low + floor(w[offset + i] (high - low) / 2**bits)
    dropout  out[i] = x[i] / q if h[i] >= t, else zero; dx = dy / q if h[i] >= t

The words w have 32 bits for a range up to NARROW, and 64 bits for a wider one. The numbers h are
half words, so t / LEVELS is the nearest to p, and q = 1 - t / LEVELS the share that is kept.

An implementation with a stream of its own is held to the laws of `_laws.py` instead. Bytes: randint
writes each element, dropout reads and writes it once; no FLOPs. Cases: powers of two, and an
activation of Llama 3 8B.
"""

import math

import torch

from ops._drawn import drawn_vector
from ops._laws import improbable, uneven
from ops._philox import multiply_high, philox_words
from ops._spec import PASSES, Cost, Op, Tensor, in_turn, make_case

# Widest range that takes 32 bits.
NARROW = 2**24

# Numbers of 16 bits decide what dropout keeps.
LEVELS = 2**16


def randint_reference(low, high, size, seed, offset=0, dtype=torch.int64):
    span, count = high - low, math.prod(size)
    if span <= NARROW:
        value = philox_words(seed, offset, count) * span >> 32
    else:
        words = philox_words(seed, 2 * offset, 2 * count).view(-1, 2)
        value = multiply_high(words[:, 0], words[:, 1], span)
    return (value + low).to(dtype).view(size)


def _randint_properties(given, results, low, high, size, offset=0, dtype=torch.int64):
    return uneven(results["out"], low, high)


def dropout_reference(x, p, seed):
    dropped = _levels(p)
    words = philox_words(torch.tensor(seed, device=x.device), 0, -(-x.numel() // 2))
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1).reshape(-1)[: x.numel()]
    scaled = x * _scale(dropped)
    return torch.where(halves.view(x.shape) >= dropped, scaled, torch.zeros_like(scaled))


def _dropout_properties(given, results, p, seed):
    x, out = given["x"].reshape(-1), results["out"].reshape(-1)
    # An entry that is zero or no number does not show whether it was dropped.
    telling = x.isfinite() & (x != 0)
    kept = out != 0
    if breach := _scaled("out", x, out, kept & telling, p):
        return breach
    dropped = (telling & ~kept).double()
    slack = 1 / LEVELS
    count, of = int(dropped.sum().item()), int(telling.sum().item())
    if breach := improbable("dropped", count, of, p, slack):
        return breach
    both = slice(0, x.numel() // 2 * 2)
    pairs = int(telling[both].view(-1, 2).all(1).sum().item())
    count = int(dropped[both].view(-1, 2).all(1).sum().item())
    if breach := improbable("neighbours dropped", count, pairs, p * p, 2 * slack):
        return breach
    if "dx" not in results:
        return ""
    dy, dx = given["dy"].reshape(-1), results["dx"].reshape(-1)
    if (dx[telling & ~kept] != 0).any():
        return "dx: not zero where out was dropped"
    return _scaled("dx", dy, dx, kept & telling, p)


def _scaled(name, x, out, kept, p):
    """Why the kept entries are not those of x over 1 - p, to the rounding of both; else ""."""
    kind = torch.finfo(x.dtype)
    expected = x[kept].double() / (1 - p)
    bound = (8 * kind.eps + 1 / LEVELS / (1 - p)) * expected.abs() + kind.tiny * kind.eps
    odd = ((out[kept].double() - expected).abs() > bound).sum().item()
    return f"{name}: {odd} kept entries are not divided by 1 - p" if odd else ""


def _levels(p):
    """How many of the LEVELS numbers drop an entry; some keep it unless p is one."""
    return LEVELS if p == 1 else min(round(p * LEVELS), LEVELS - 1)


def _scale(dropped):
    return LEVELS / (LEVELS - dropped) if dropped < LEVELS else 0.0


def _randint_cost(case, pass_, itemsize):
    return Cost(0, case["N"] * (4 if "int32" in case.flags else 8), 0)


def _dropout_cost(case, pass_, itemsize):
    moved = case["N"] * itemsize
    return Cost(moved, moved, 0)


# No tensor but the seed: its cells are of one floating dtype, so that each is timed once.
RANDINT = Op(
    "randint",
    randint_reference,
    {"seed": Tensor("", dtype="int64", grad=False)},
    _randint_cost,
    edge=(
        make_case(N=1),
        make_case(N=127),
        make_case(N=0),
        make_case(N=5000),
        make_case("int32", N=5000),
        make_case("coin", "int32", N=4096),
        make_case("wide", N=3000),
        make_case("wide32", "int32", N=3000),
        make_case("late", N=3001),
        make_case("late", "int32", N=2048),
        make_case("late", "wide", N=2048),
    ),
    sweep=(
        make_case(N=2**22),
        make_case(N=2**26),
        make_case(N=2**28),
        make_case("int32", N=2**22),
        make_case("int32", N=2**28),
        make_case("wide", N=2**26),
        make_case("wide32", "int32", N=2**26),
    ),
    dtypes=("float32",),
    # The tokens of GPT-2.
    params={"low": 0, "high": 50257, "size": lambda case: (case["N"],)},
    flags={
        "int32": {"dtype": torch.int32},
        "coin": {"high": 2},
        "wide": {"low": -(2**61), "high": 2**62 + 12345},
        "wide32": {"low": -5, "high": 2**31 - 7},
        "late": {"offset": 2**40 + 16 * 2**10 + 3},
    },
    properties=_randint_properties,
    drawn=drawn_vector,
)
DROPOUT = Op(
    "dropout",
    dropout_reference,
    {"x": Tensor("N")},
    in_turn(_dropout_cost),
    edge=(
        make_case(N=1),
        make_case(N=127),
        make_case(N=0),
        make_case(N=10001),
        make_case(N=8192, layout="offset"),
        make_case(N=1000, layout="strided"),
        make_case(N=5000, values="large"),
        make_case(N=5000, values="equal"),
        make_case(N=5000, layout="offset4", dtypes=("float16",)),
        make_case("half", N=5000),
    ),
    sweep=(
        make_case(N=2**22, dtypes=("bfloat16",)),
        make_case(N=2**26, dtypes=("bfloat16", "float32")),
        make_case(N=8192 * 14336, dtypes=("bfloat16", "float16")),  # Llama 3 8B, MLP activation
        make_case(N=2**28, dtypes=("bfloat16",)),
        make_case("half", N=2**26, dtypes=("bfloat16",)),
    ),
    passes=PASSES,
    params={"p": 0.1, "seed": 20261121},
    flags={"half": {"p": 0.5}},
    properties=_dropout_properties,
    drawn=drawn_vector,
)

"""The random stream of a seed, as Triton draws it and as PyTorch checks it, and laws of chance.

The stream is that of Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011): the key is the seed, and call c, a counter of 64 bits, gives the words 4c to 4c + 3.
"""

import itertools
import math

import torch
import triton
import triton.language as tl

ROUNDS = tl.constexpr(10)
# The authors' multipliers and the steps of the key.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)
MULTIPLIER_0, MULTIPLIER_1 = (tl.constexpr(value) for value in MULTIPLIERS)
STEP_0, STEP_1 = (tl.constexpr(value) for value in STEPS)
WORD = 0xFFFFFFFF
# A law is broken where chance breaks it less than once in 10**8 times.
SIGMAS, NATS = 6.0, 20.0
MOST_BINS, LEAST_IN_BIN = 256, 16


@triton.jit
def number(given):
    """int64 of an integer, or of what a pointer to one leads to."""
    # To the compiler of PyTorch, which looks for what a kernel writes, a number has no dtype.
    if hasattr(given, "dtype") and given.dtype.is_ptr():
        given = tl.load(given)
    return tl.cast(given, tl.int64)


@triton.jit
def philox(seed, block, CALLS: tl.constexpr):
    """The words of the calls from block * CALLS on: four tiles of CALLS.

    seed: an integer, or a pointer to one of 64 bits. CALLS: a power of two.
    """
    seed = number(seed)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    first = block.to(tl.int64) * CALLS
    # The first call of a block is a multiple of its length: the sum of the low halves stays low.
    c0 = (first & 0xFFFFFFFF).to(tl.uint32) + tl.arange(0, CALLS).to(tl.uint32)
    c1 = (first >> 32).to(tl.uint32)
    c2 = tl.zeros((CALLS,), tl.uint32)
    c3 = c2
    for _ in tl.static_range(ROUNDS):
        # One multiplication gives both halves of the product.
        p0, p1 = c0.to(tl.uint64) * MULTIPLIER_0, c2.to(tl.uint64) * MULTIPLIER_1
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0, k1 = k0 + STEP_0, k1 + STEP_1
    return c0, c1, c2, c3


@triton.jit
def interleave(a, b, c, d, LENGTH: tl.constexpr):
    """a0 b0 c0 d0 a1 b1 … of four tiles, LENGTH in all."""
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(LENGTH)


def boxed(given: int | torch.Tensor, device: torch.device) -> int | torch.Tensor:
    """What stands for an integer of 64 bits where a kernel is started: itself, but in a traced
    graph a tensor of it if it is beyond 32 bits, of which PyTorch's compiler has no scalars."""
    if not torch.compiler.is_dynamo_compiling() or isinstance(given, torch.Tensor):
        return given
    if -(2**31) <= given < 2**31:
        return given
    return torch.full((), given, dtype=torch.int64, device=device)


def philox_words(seed: int | torch.Tensor, first: int, count: int) -> torch.Tensor:
    """`count` words of the stream from `first` on, int64; on the device of the seed."""
    device = seed.device if isinstance(seed, torch.Tensor) else None
    call = torch.arange(first // 4, -(-(first + count) // 4), device=device)
    zero = torch.zeros_like(call)
    words = (call & WORD, call >> 32 & WORD, zero, zero)
    key = (seed & WORD, seed >> 32 & WORD)
    for _ in range(ROUNDS.value):
        # Products of 64 bits wrap to the same bits, whatever their sign.
        p0, p1 = (word * factor for word, factor in zip(words[::2], MULTIPLIERS, strict=True))
        high = (p1 >> 32 & WORD) ^ words[1] ^ key[0], (p0 >> 32 & WORD) ^ words[3] ^ key[1]
        words = (high[0], p1 & WORD, high[1], p0 & WORD)
        key = [(half + step) & WORD for half, step in zip(key, STEPS, strict=True)]
    return torch.stack(words, dim=-1).reshape(-1)[first % 4 : first % 4 + count]


def multiply_high(low: torch.Tensor, high: torch.Tensor, factor: int) -> torch.Tensor:
    """The upper 64 bits of (high * 2**32 + low) * factor, of words of 32 bits in int64."""
    factor_low, factor_high = factor & WORD, factor >> 32
    cross, other = high * factor_low, low * factor_high
    carry = (low * factor_low >> 32 & WORD) + (cross & WORD) + (other & WORD)
    return high * factor_high + (cross >> 32 & WORD) + (other >> 32 & WORD) + (carry >> 32)


def improbable(what: str, count: int, of: int, probability: float, slack: float = 0.0) -> str:
    """Why `count` of so many independent draws is no chance; "" where it may be one.

    slack: by how much the probability may be off.
    """
    expected = of * probability
    # Bernstein's inequality: wider than the normal law where few are expected.
    width = SIGMAS * math.sqrt(expected * (1 - probability)) + NATS + slack * of
    if abs(count - expected) <= width:
        return ""
    return f"{what}: {count} of {of}, expected {expected:.0f} ± {width:.0f}"


def uneven(x: torch.Tensor, low: int, high: int) -> str:
    """Why integers are no independent, uniform draws from [low, high); "" where they may be.

    Their range, Pearson's chi-square over bins of equal width, and neighbours.
    """
    x, count, span = x.reshape(-1), x.numel(), high - low
    if not count:
        return ""
    least, most = x.min().item(), x.max().item()
    if least < low or most >= high:
        return f"range: {least} to {most}, expected {low} to {high - 1}"
    bins = max(1, min(span, MOST_BINS, count // LEAST_IN_BIN))
    edges = [low + -(-index * span // bins) for index in range(bins + 1)]
    inner = torch.tensor(edges[1:-1], dtype=x.dtype, device=x.device)
    found = torch.bincount(torch.bucketize(x, inner, right=True), minlength=bins).double()
    widths = [after - before for before, after in itertools.pairwise(edges)]
    expected = torch.tensor([count * width / span for width in widths], dtype=torch.float64)
    square = ((found.cpu() - expected) ** 2 / expected).sum().item()
    # Laurent and Massart (2000), lemma 1: the tail of a chi-square variable.
    limit = bins - 1 + 2 * math.sqrt((bins - 1) * NATS) + 2 * NATS
    if square > limit:
        return f"chi-square over {bins} bins: {square:.0f}, expected at most {limit:.0f}"
    half = span // 2
    upper = x[: count // 2 * 2].reshape(-1, 2) >= low + half
    alike = int((upper[:, 0] == upper[:, 1]).sum().item())
    share = half / span
    probability = share**2 + (1 - share) ** 2
    return improbable("neighbours in the same half", alike, count // 2, probability)

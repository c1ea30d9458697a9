"""The random stream of a seed, as Triton draws it.

The stream is that of Philox-4x32-10. The key is the seed. Call c, a counter of 64 bits, gives the
words 4c to 4c + 3. (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.)
"""

import torch
import triton
import triton.language as tl

ROUNDS = tl.constexpr(10)
# The authors' multipliers and the steps of the key.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)
MULTIPLIER_0, MULTIPLIER_1 = (tl.constexpr(value) for value in MULTIPLIERS)
STEP_0, STEP_1 = (tl.constexpr(value) for value in STEPS)


@triton.jit
def number(given):
    """An integer as int64, or the integer that a pointer leads to."""
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
    """Return an integer of 64 bits in the form in which a kernel takes it.

    It is the integer itself. Dynamo has no scalars beyond 32 bits, so in a traced graph such an
    integer is a tensor of one int64.
    """
    if not torch.compiler.is_dynamo_compiling() or isinstance(given, torch.Tensor):
        return given
    if -(2**31) <= given < 2**31:
        return given
    return torch.full((), given, dtype=torch.int64, device=device)

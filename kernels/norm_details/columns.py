"""Cut the N columns of a row into splits, one for each program, and a split into chunks.

A split is at most `span` columns, a chunk is one block of columns in registers. All chunks are
loaded alike. A chunk that lies within the columns of every split needs no mask, so only the last
chunks of an uneven row spend registers on one.
"""

import triton
import triton.language as tl

# Splits begin at a multiple of this many columns: in an aligned row they are aligned as well.
ALIGNED_COLUMNS = tl.constexpr(32)


def span_of(n: int, splits: int) -> int:
    """Return how many of n columns a split has at most; the last split may have fewer, or none."""
    if splits == 1:
        return n
    aligned = ALIGNED_COLUMNS.value
    return -(-n // (splits * aligned)) * aligned


def chunks_of(n: int, splits: int, block: int) -> tuple[int, int]:
    """Return how many chunks of `block` columns a split has, and how many of them need no mask."""
    if splits == 1:
        return -(-n // block), n // block
    span = span_of(n, splits)
    shortest = max(n - (splits - 1) * span, 0)
    return -(-span // block), shortest // block


@triton.jit
def multiple(size, ITEMS: tl.constexpr):
    """Return a size that is a multiple of ITEMS, and tell the compiler so.

    It knows of multiples of 16 alone, and would read other rows item by item.
    """
    return size // ITEMS * ITEMS


@triton.jit
def owned_columns(
    split_id, N,
    NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Return where the columns of a split begin and where they end; empty if end <= begin.

    NUM_CHUNKS, NUM_FULL: as `chunks_of` returns them. If they are equal N is a multiple of
    NUM_SPLITS * BLOCK_N, and no mask needs the end.
    """
    span = NUM_CHUNKS * BLOCK_N
    if NUM_FULL < NUM_CHUNKS:
        span = N
        if NUM_SPLITS > 1:
            span = tl.cdiv(N, NUM_SPLITS * ALIGNED_COLUMNS) * ALIGNED_COLUMNS
    begin = split_id * span
    return begin, tl.minimum(begin + span, N)

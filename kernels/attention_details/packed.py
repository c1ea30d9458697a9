"""Device functions that find the tiles of packed sequences, whose rows lie end to end.

Sequence i has the rows from boundary i to boundary i + 1. The host does not know the boundaries, so
it starts a program for each slot that a tile might need: rows // BLOCK + sequences + 1. The tiles
of sequence i take the slots from boundary i // BLOCK + i on. A sequence of n rows has at most
n // BLOCK + 1 tiles, and the next begins at least so many slots later. So no two share a slot, and
at most one slot of each is idle. The idea is that of vLLM's unified attention kernel in Triton
(Apache 2.0). There a program searches by halves. Here it reads all boundaries side by side, because
in a search each load waits for the last.

The rows past the last sequence count as one more. On the other side it has no rows, so its results
are zeros.
"""

import triton
import triton.language as tl

# Boundaries that a program reads at once.
AT_ONCE = tl.constexpr(256)


@triton.jit
def slots_of(total, B, BLOCK: tl.constexpr):
    """The number of slots of B sequences that have `total` rows."""
    return total // BLOCK + B + 1


@triton.jit
def boundary(cu_ptr, stride, index, B, total):
    """The first row of sequence `index`: zero for the first, as for an index beyond B.

    A number outside of the tensor is moved into it, so no boundary leads to other memory.
    """
    inside = (index > 0) & (index <= B)
    start = tl.load(cu_ptr + index.to(tl.int64) * stride, mask=inside, other=0)
    return tl.maximum(0, tl.minimum(total, start)).to(tl.int32)


@triton.jit
def tile_in(cu_ptr, stride, B, total, slot, BLOCK: tl.constexpr):
    """The sequence and the tile within it that a slot holds; an idle slot's tile is past its end.

    B: sequences; the rows past the last are number B. total: rows of all.
    """
    # Sequences begin in rising slots: those that do so by this slot are counted.
    found = tl.full((), -1, tl.int32)
    first = tl.full((), 0, tl.int32)
    for start in range(0, B + 1, AT_ONCE):
        index = start + tl.arange(0, AT_ONCE)
        begin = boundary(cu_ptr, stride, index, B, total) // BLOCK + index
        begun = (index <= B) & (begin <= slot)
        found += tl.sum(begun.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(begun, begin, 0), 0))
    return found, slot - first


@triton.jit
def rows_in(cu_ptr, stride, B, total, index, OWNED: tl.constexpr):
    """The first row of sequence `index`, and the number of its rows.

    The rows past the last sequence, number B, are counted on the side that is OWNED.
    """
    start = boundary(cu_ptr, stride, index, B, total)
    end = boundary(cu_ptr, stride, tl.minimum(index + 1, B), B, total)
    if OWNED:
        end = tl.where(index == B, total, end)
    return start, tl.maximum(0, end - start)


@triton.jit
def bounds_in(rows, keys, before, after):
    """left and right of a sequence, as `scores.py` has them, from the sizes of its window."""
    # Sizes beyond the sequence bound nothing; so no sum of these numbers passes 2**31.
    offset = keys - rows
    return offset - tl.minimum(before, keys), offset + tl.minimum(after, rows)

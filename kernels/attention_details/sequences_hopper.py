"""Packed sequences in kernels for Hopper: the copies of their rows, and which a program takes.

A copy ends with its sequence. A descriptor has one bound for all rows of a tensor. So the first row
past any sequence has the coordinate that is the bound, and two more coordinates make up for it.
Source: `triton/tools/ragged_tma.py` of Triton (MIT licence).

The device functions that find sequences are those of `packed.py`, which says how sequences take
slots, in Gluon's words. Both change together. The slots of few sequences may also have an order.
Those whose tiles take longest come first, since a long tile that begins late keeps all others
waiting (Graham, "Bounds on multiprocessing timing anomalies", 1969).

All is written for tiles of rows, which see keys. The backward pass has tiles of keys, which rows
see. It gives rows and keys in each other's place.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .hopper_tiles import layout_of

# Boundaries that are read at once.
AT_ONCE = gl.constexpr(256)
# Fewer sequences than this have their slots in order.
SORTED = gl.constexpr(64)
# More than the tiles of a sequence: a tile has 16 rows or more, of fewer than the second number.
MOST_TILES, TOO_MANY_ROWS = gl.constexpr(2**24), 2**27
# The bound of the rows of a descriptor. The first row past a sequence has this coordinate.
BOUND = gl.constexpr(2**30)
# A bound that no coordinate of the first two axes reaches: first rows and ends of sequences.
NO_BOUND = 2**31 - 2**16


def described_rows(x: torch.Tensor, rows: int, heads: int = 1) -> TensorDescriptor:
    """Return a descriptor of packed x [total, H, D] with blocks of so many rows of some heads.

    `rows_at` gives the coordinates of a block. Past the end of its sequence, zeros are read and
    nothing is written. An address has 64 bits: BOUND steps of the first axis are 2**64 items less
    BOUND rows, so they take off what the coordinate of the rows has too much.
    """
    (total, h, d), (step, head, _) = x.shape, x.stride()
    # The stride of an axis of one item is never used, and need not be one that TMA takes.
    step, head = d if total == 1 else step, d if h == 1 else head
    strides = [2**34 - step, step, head, step, 1]
    block = 1, 1, heads, rows, d
    shape = [NO_BOUND, NO_BOUND, h, BOUND.value, d]
    return TensorDescriptor(x, shape, strides, list(block), layout_of(x.dtype, *block))


@gluon.jit
def rows_at(head, first, rows, row):
    """The coordinates of a block of a sequence that begins with number `row`, and with a head.

    first, rows: the first row of the sequence, and how many it has.
    """
    return BOUND, first + rows, head, BOUND - rows + row, 0


@gluon.jit
def boundary(cu_ptr, stride, index, B, total):
    """The first row of sequence `index`, as `packed.boundary` has it."""
    inside = (index > 0) & (index <= B)
    start = gl.load(cu_ptr + gl.cast(index, gl.int64) * stride, mask=inside, other=0)
    return gl.cast(gl.maximum(0, gl.minimum(total, start)), gl.int32)


@gluon.jit
def sequence_of(slot, cu_ptr, stride, B, total, BLOCK: gl.constexpr):
    """The sequence that a slot belongs to, as `packed.tile_in` finds it, and its first slot."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    found, first = gl.cast(-1, gl.int32), gl.cast(0, gl.int32)
    for start in range(0, B + 1, AT_ONCE):
        index = start + gl.arange(0, AT_ONCE, LAYOUT)
        begin = boundary(cu_ptr, stride, index, B, total) // BLOCK + index
        begun = (index <= B) & (begin <= slot)
        found = found + gl.sum(gl.where(begun, 1, 0), 0)
        first = gl.maximum(first, gl.max(gl.where(begun, begin, 0), 0))
    return found, first


@gluon.jit
def rows_of(index, cu_ptr, stride, B, total, OWNED: gl.constexpr):
    """The first row of sequence `index` and the number of its rows, as `packed.rows_in`."""
    start = boundary(cu_ptr, stride, index, B, total)
    end = boundary(cu_ptr, stride, gl.minimum(index + 1, B), B, total)
    if OWNED:
        # The rows past the last sequence count as one more.
        end = gl.where(index == B, total, end)
    return start, gl.maximum(0, end - start)


@gluon.jit
def bounds_in(rows, keys, before, after):
    """left and right of a sequence, as `packed.bounds_in` has them."""
    offset = keys - rows
    return offset - gl.minimum(before, keys), offset + gl.minimum(after, rows)


@gluon.jit
def order_of_sequences():
    """Shared memory for what `put_longest_first` writes."""
    return gl.allocate_shared_memory(gl.int32, [2, SORTED], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def put_longest_first(order, boundaries, totals, BLOCK: gl.constexpr):
    """Write the first slot and the number of tiles of each of fewer sequences than SORTED.

    Those with the most keys have the first slots. No slot between is idle.
    """
    cu_q_ptr, cu_k_ptr, stride_cq, stride_ck, B = boundaries
    total_q, total_k = totals
    # All pairs of sequences: a loop over one of the two would wait for each load.
    PAIRS: gl.constexpr = gl.BlockedLayout([4, 8], [4, 8], [4, 1], [1, 0])
    MINE: gl.constexpr = gl.SliceLayout(1, PAIRS)
    OTHER: gl.constexpr = gl.SliceLayout(0, PAIRS)
    index = gl.arange(0, SORTED, gl.BlockedLayout([1], [32], [4], [0]))
    rows = rows_of(index, cu_q_ptr, stride_cq, B, total_q, True)[1]
    keys = rows_of(index, cu_k_ptr, stride_ck, B, total_k, False)[1]
    tiles = gl.where(index <= B, gl.cdiv(rows, BLOCK), 0)
    mine, other = gl.arange(0, SORTED, MINE)[:, None], gl.arange(0, SORTED, OTHER)[None, :]
    my_keys = gl.convert_layout(keys, MINE)[:, None]
    other_keys = gl.convert_layout(keys, OTHER)[None, :]
    ahead = (other_keys > my_keys) | ((other_keys == my_keys) & (other < mine))
    first = gl.sum(gl.where(ahead, gl.convert_layout(tiles, OTHER)[None, :], 0), 1)
    order.index(0).store(first)
    order.index(1).store(tiles)


@gluon.jit
def tile_at(slot, order, boundaries, total, ORDERED: gl.constexpr, BLOCK: gl.constexpr):
    """The sequence of a slot and its tile there; that of an idle slot is past the end of its rows.

    order: as `put_longest_first` left it if ORDERED. total: rows of all sequences.
    """
    cu_q_ptr, _, stride_cq, _, B = boundaries
    if ORDERED:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        index = gl.arange(0, SORTED, LAYOUT)
        first = order.index(0).load(LAYOUT)
        hit = (first <= slot) & (slot < first + order.index(1).load(LAYOUT))
        # One number for both, so that the threads meet once.
        found = gl.max(gl.where(hit, index * MOST_TILES + (slot - first), -1), 0)
        sequence = gl.where(found < 0, B, found // MOST_TILES)
        tile = gl.where(found < 0, MOST_TILES - 1, found % MOST_TILES)
    else:
        sequence, begin = sequence_of(slot, cu_q_ptr, stride_cq, B, total, BLOCK)
        tile = slot - begin
    return sequence, tile

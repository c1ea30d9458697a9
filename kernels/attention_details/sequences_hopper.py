"""Device functions that find packed sequences in kernels for Hopper.

They are those of `packed.py`, which says how sequences take slots, in Gluon's words. Both change
together.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Boundaries that are read at once.
AT_ONCE = gl.constexpr(256)


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

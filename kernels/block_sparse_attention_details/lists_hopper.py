"""Device functions that read the lists of a block mask in kernels for Hopper.

The lists are those of `block_mask.py`, as `walk.py` reads them for the portable kernels. Both
change together.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Entries of a list that are compared at once.
AT_ONCE = gl.constexpr(128)


@gluon.jit
def entries_below(indices_ptr, first, last, limit):
    """The place, from first to last, at which a list reaches `limit`."""
    found = first
    for start in range(first, last, AT_ONCE):
        at = start + gl.arange(0, AT_ONCE, gl.BlockedLayout([1], [32], [4], [0]))
        index = gl.load(indices_ptr + at, mask=at < last, other=limit)
        found = found + gl.sum(gl.where(index < limit, 1, 0), 0)
    return found


@gluon.jit
def tile_start(indices_ptr, at, there, BLOCK: gl.constexpr, SIZE: gl.constexpr):
    """The first key, or row, of tile `at` of all lists: each of their blocks has BLOCK / SIZE.

    there: whether there is such a tile; else the result has no meaning.
    """
    PARTS: gl.constexpr = BLOCK // SIZE
    index = gl.load(indices_ptr + at // PARTS, mask=there, other=0)
    return index * BLOCK + at % PARTS * SIZE

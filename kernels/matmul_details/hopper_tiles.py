"""Tiles of the product on Hopper: their order, and views of blocks and of accumulators."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Multiplying groups of four warps.
GROUPS = gl.constexpr(2)


@gluon.jit
def tile_coords(pid, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """The row and the column of tile pid, in groups of GROUP_M rows of tiles."""
    first = pid // (GROUP_M * tiles_n) * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    within = pid % (GROUP_M * tiles_n)
    return first + within % rows, within // rows


@gluon.jit
def batched_tile_coords(number, sizes, META: gl.constexpr):
    """The outer and inner batch, the row and the column of a tile of all batches."""
    tiles_m, tiles_n = sizes[0], sizes[1]
    BATCHED: gl.constexpr = META[5]
    GROUP_M: gl.constexpr = META[4]
    if BATCHED:
        batch = number // (tiles_m * tiles_n)
        tile_m, tile_n = tile_coords(number % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        return batch // sizes[3], batch % sizes[3], tile_m, tile_n
    else:
        tile_m, tile_n = tile_coords(number, tiles_m, tiles_n, GROUP_M)
        return number, number, tile_m, tile_n


@gluon.jit
def as_matrix(slot):
    """A slot without its dimensions of batches."""
    if len(slot.shape) == 4:
        slot = slot.reshape([slot.shape[2], slot.shape[3]])
    return slot


@gluon.jit
def halves(x):
    """The left and the right half of the columns of x."""
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))

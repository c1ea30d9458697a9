"""The tiles of the forward kernels of the norms, and the rule that chooses a kernel.

The measurements behind the rule are in docs/lab/layer_norm.md and docs/lab/rms_norm.md.
"""

from typing import NamedTuple

from .._runtime.configs import Configs
from .columns import chunks_of
from .forward import Forward, _norm_forward_loop_kernel, _norm_forward_row_kernel
from .forward_split import _norm_forward_split_kernel

# The longest row that one program keeps in its registers.
ROW_BYTES = 131072
# The shortest row that is worth reading twice.
LOOP_BYTES = 4096
ACCESS_BYTES = 16
MOST_CHUNKS = 8


class Tile(NamedTuple):
    """The kernel for rows of up to `size` bytes, and its tile."""

    size: float
    reads: int  # how often the kernel reads a row: 1 or 2
    splits: int  # programs of a row
    rows: int  # rows of a program
    block: int  # the most columns of a chunk
    warps: int


SHORT_TILES = (
    Tile(256, 1, 1, 8, 128, 4),
    Tile(512, 1, 1, 4, 256, 4),
    Tile(1024, 1, 1, 2, 512, 4),
    Tile(2048, 1, 1, 2, 1024, 4),
    Tile(4096, 1, 1, 1, 2048, 4),
)
LONG_TILES = (
    *(Tile(ROW_BYTES * 2**power, 1, 4 * 2**power, 1, 4096, 8) for power in (0, 1, 2, 3)),
    # No more splits: an H200 has no room for 64 in each of several launches (`may_wait`).
    Tile(ROW_BYTES * 16, 1, 32, 1, 4096, 8),
    Tile(float("inf"), 2, 1, 1, 4096, 16),
)
TILES = (
    *SHORT_TILES,
    Tile(8192, 2, 1, 1, 4096, 8),
    Tile(16384, 1, 1, 1, 2048, 4),
    # Twice, without a mask, where the blocks of 16-bit rows are full; with a mask once is faster.
    Tile(24575, 1, 1, 1, 4096, 8),
    Tile(24576, 2, 1, 1, 4096, 16),
    Tile(32767, 1, 1, 1, 4096, 8),
    Tile(32768, 2, 1, 1, 4096, 16),
    Tile(65536, 1, 1, 1, 4096, 16),
    Tile(ROW_BYTES, 1, 1, 1, 8192, 32),
    *LONG_TILES,
)
# An RMS norm reads one vector less, and a residual is read only once. The longest row of 16 warps
# depends on whether there is a residual.
RMS_TILES, RESIDUAL_TILES = (
    (
        *SHORT_TILES,
        Tile(8192, 2, 1, 1, 2048, 8),
        Tile(16384, 1, 1, 1, 2048, 4),
        Tile(most, 2, 1, 1, 4096, 16),
        Tile(65536, 2, 1, 1, 8192, 32),
        Tile(ROW_BYTES, 1, 1, 1, 16384, 32),
        *LONG_TILES,
    )
    for most in (24576, 32768)
)


def _loop_config(block, warps):
    return {"BLOCK_N": block, "num_warps": warps}


def _row_config(rows, block, warps):
    return {"BLOCK_M": rows, "BLOCK_N": block, "num_warps": warps}


def _split_config(block, splits, warps):
    return {"BLOCK_N": block, "NUM_SPLITS": splits, "num_warps": warps}


LOOP_CANDIDATES = tuple(
    _loop_config(block, warps)
    for block, warps in ((1024, 4), (2048, 8), (4096, 8), (4096, 16), (4096, 32), (8192, 32))
)
ROW_CANDIDATES = tuple(
    _row_config(rows, block, warps)
    for rows in (1, 2, 4, 8)
    for block in (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    for warps in (1, 2, 4, 8, 16, 32)
    if 8 <= rows * block // (32 * warps) <= (64 if block > 1024 else 32)
    and (rows == 1 or rows * block <= (2048 if block <= 1024 else 8192))
)
SPLIT_CANDIDATES = tuple(
    _split_config(block, splits, warps)
    for block, warps in ((2048, 8), (4096, 8), (4096, 16))
    for splits in (2, 4, 8, 16, 32)
)


def tile_of(tiles: tuple[Tile, ...], n: int, itemsize: int) -> Tile:
    """Return the first of `tiles` that is for rows of n elements."""
    size = n * itemsize
    for tile in tiles:
        # One program has no registers left for the masks of the longest rows.
        crowded = tile.size == ROW_BYTES and tile.splits == 1 and n % tile.block
        if size <= tile.size and not crowded:
            return tile
    raise ValueError(f"tiles: none for {size} bytes, expected a last one without a limit")


def forward_configs(
    family: str,
    tiles: tuple[Tile, ...] = TILES,
    residual_tiles: tuple[Tile, ...] = RESIDUAL_TILES,
) -> Forward:
    """Return the configurations of the three kernels, for the table of a family.

    Args:
        family: `layer_norm` or `rms_norm`.
        tiles: the rule for rows without a residual, in the order of their sizes.
        residual_tiles: the rule for rows with a residual.
    """

    def rule(n, itemsize, residual):
        return tile_of(residual_tiles if residual else tiles, n, itemsize)

    def choose_loop(n, itemsize, residual):
        tile = rule(n, itemsize, residual)
        # A row in splits is read by this kernel if its programs may not wait for each other.
        tile = tile if tile.reads == 2 else tiles[-1]
        return _loop_config(min(tile.block, _power(n)), tile.warps)

    def choose_row(n, itemsize, residual):
        tile = rule(n, itemsize, residual)
        return _row_config(tile.rows, min(tile.block, _power(n)), tile.warps)

    def choose_split(n, itemsize, residual):
        tile = rule(n, itemsize, residual)
        return _split_config(tile.block, tile.splits, tile.warps)

    return Forward(
        Configs(_norm_forward_loop_kernel, LOOP_CANDIDATES, choose_loop, _suits_loop, family),
        Configs(_norm_forward_row_kernel, ROW_CANDIDATES, choose_row, _suits_row, family),
        Configs(_norm_forward_split_kernel, SPLIT_CANDIDATES, choose_split, _suits_split, family),
        rule,
    )


def _power(n):
    return max(16, 1 << (n - 1).bit_length())


def _suits_loop(candidate, n, itemsize, residual):
    """Return whether a row is worth reading twice, in eight blocks at most if it is short."""
    size, block = n * itemsize, candidate["BLOCK_N"]
    return size > LOOP_BYTES and block <= n and (n <= 8 * block or size > ROW_BYTES)


def _suits_row(candidate, n, itemsize, residual):
    """Return whether blocks are full, and a thread holds up to 128 bytes.

    It holds at least 64 bytes of long rows, and one access of short rows.
    """
    rows, block, warps = candidate.values()
    size, whole = n * itemsize, max(128, _power(n))
    chunks, _ = chunks_of(n, 1, block)
    held = rows * chunks * block * itemsize / (32 * warps)
    full = block == whole if n <= 2048 else 2048 <= block <= whole
    shared = rows == 1 or (chunks == 1 and size <= 8192)
    least = ACCESS_BYTES if size <= 4096 else 64
    fits = size <= ROW_BYTES and chunks <= MOST_CHUNKS
    return fits and full and shared and least <= held <= 128


def _suits_split(candidate, n, itemsize, residual):
    """Return whether a thread holds 64 to 128 bytes, and no split is shorter than a block."""
    block, splits, warps = candidate.values()
    chunks, full = chunks_of(n, splits, block)
    held = chunks * block * itemsize / (32 * warps)
    return n * itemsize > 32768 and full > 0 and chunks <= MOST_CHUNKS and 64 <= held <= 128

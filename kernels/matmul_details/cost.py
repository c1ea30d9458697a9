"""How long the forms of a product take, by a model that was fitted to times on an H200.

A program takes tiles one after the other. A tile takes a time for each step of K, and one for all
else. The memory takes its own time beside the tiles; the sum of squares stands for the two. 13,425
times of 882 products in bfloat16 differ from it by 8 % (docs/lab/matmul.md).
"""

import math
from collections.abc import Collection, Mapping

import triton

# Microseconds by rows and columns of a tile. The first is of a step of K, 128 bytes of a row. The
# second is of such a step if rows of an operand begin within a sector of the L2 cache. The third is
# of all else of a tile. The last tile of each kernel was timed with whole sectors alone. 2.30 was
# fitted as 1.70, by which products of short K took tiles that were up to 1.3 times too slow.
Times = Mapping[tuple[int, int], tuple[float, float, float]]
HOPPER: Times = {
    (128, 256): (0.567, 0.671, 2.05),
    (128, 128): (0.307, 0.440, 1.36),
    (128, 64): (0.247, 0.354, 1.03),
    (256, 128): (0.588, 0.696, 2.12),
}
DESCRIPTOR: Times = {
    (128, 128): (0.355, 0.449, 1.04),
    (64, 128): (0.272, 0.354, 0.58),
    (64, 64): (0.172, 0.238, 0.44),
    (128, 256): (0.595, 0.704, 2.30),
}
WIDEST = (128, 256)
STEP_BYTES, SECTOR_BYTES = 128, 32
# Bytes of both operands that are read in a microsecond.
READ_BYTES = 3.0e6
# Microseconds of the kernel that adds parts of K, and the bytes that it moves in one.
SUM_US, SUM_BYTES = 3.1, 7.1e6
# Into how many parts K may be divided, and the items of K that each keeps.
PARTS, LEAST_ITEMS = (1, 2, 3, 4, 6, 8, 12, 16, 24), 128


def tiles_us(
    times: Times, tile: tuple[int, int], m: int, n: int, k: int, batches: int, sms: int,
    itemsize: int, whole_sectors: bool,
) -> float:  # fmt: skip
    """Return the microseconds of a product `[M, K] [K, N]` of so many batches by one tile.

    itemsize: bytes of an item of the operands. whole_sectors: whether the rows of both in memory
    lie multiples of SECTOR_BYTES apart.
    """
    whole, odd, rest = times[tile]
    tiles = triton.cdiv(m, tile[0]) * triton.cdiv(n, tile[1]) * batches
    steps = triton.cdiv(k * itemsize, STEP_BYTES)
    return triton.cdiv(tiles, sms) * (steps * (whole if whole_sectors else odd) + rest)


def hopper_is_faster(
    described: Collection[tuple[int, int]], m: int, n: int, k: int, batches: int, sms: int,
    itemsize: int, gated: bool, whole_sectors: bool,
) -> bool:  # fmt: skip
    """Return whether the Hopper kernel ends before the descriptor kernel, each with its best tile.

    described: tiles that the descriptor kernel may have. gated: whether there is a second factor
    `[K, N]`. Then a tile of the Hopper kernel has half of its columns from either, and one of the
    descriptor kernel has two products.
    """
    own, other = (
        min(
            tiles_us(times, tile, m, columns, items, batches, sms, itemsize, whole_sectors)
            for tile in tiles
        )
        for times, tiles, columns, items in (
            (HOPPER, HOPPER, n * (1 + gated), k),
            (DESCRIPTOR, described, n, k * (1 + gated)),
        )
    )
    return own <= other


def parts_of(m: int, n: int, k: int, sms: int, whole_sectors: bool = True) -> int:
    """Return into how many parts to divide K, at least 1, of a product with items of two bytes."""

    def total(parts):
        # Shared memory has no room for the float32 result of the widest tile.
        described = [tile for tile in DESCRIPTOR if parts == 1 or tile != WIDEST]
        tiles = min(
            tiles_us(times, tile, m, n, triton.cdiv(k, parts), parts, sms, 2, whole_sectors)
            for times, tiles in ((HOPPER, HOPPER), (DESCRIPTOR, described))
            for tile in tiles
        )
        product = math.hypot(tiles, 2 * k * (m + n) / READ_BYTES)
        # A part is written and read in float32.
        return product + (parts > 1) * (SUM_US + m * n * (8 * parts + 2) / SUM_BYTES)

    # Parts have whole steps, so more of them may have no more to do.
    steps = max(1, triton.cdiv(2 * k, STEP_BYTES))
    found = [parts for parts in PARTS if parts == 1 or k >= parts * LEAST_ITEMS]
    return min((triton.cdiv(steps, triton.cdiv(steps, parts)) for parts in found), key=total)

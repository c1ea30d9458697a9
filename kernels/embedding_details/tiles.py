"""Columns of a tile, which all kernels of an embedding choose by the same rule."""

# The choice of a tile is the same for all rows of this length or more.
WIDE = 2048


def columns(c: int, most: int) -> int:
    """Return the least power of two that holds c columns, from 16 to `most`."""
    return min(most, max(16, 1 << (c - 1).bit_length()))


def suits(candidate, c, **key):
    """Whether a configuration's columns are not far more than c."""
    return candidate["BLOCK_C"] < 2 * max(c, 128)

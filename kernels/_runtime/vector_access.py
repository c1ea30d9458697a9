"""Sizes told to the compiler, so that threads access several items at once."""

from .layout import ACCESS_BYTES


def access_items(itemsize: int, *sizes: int) -> int:
    """Return the most items of a vector access of which each of the sizes, in items, is a multiple.

    Triton knows only whether a size is a multiple of 16. A kernel that is handed this number tells
    the rest: `size // ITEMS * ITEMS`.
    """
    items = ACCESS_BYTES // itemsize
    # In a traced graph sizes are symbols, of which `math.gcd` knows nothing.
    while any(size % items for size in sizes):
        items //= 2
    return items

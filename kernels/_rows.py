"""Tile configurations that the families over rows share: BLOCK_M rows of N elements a program."""

ACCESS_BYTES = 16
# Rows that share a program are short: together they have at most this many elements.
MOST_SHARED = 8192

WARPS_OF_ROWS = {1: (1, 2, 4, 8, 16, 32), 2: (2, 4, 8, 16), 4: (2, 4, 8), 8: (4, 8)}
ROW_CONFIGS = tuple(
    {"BLOCK_M": rows, "num_warps": warps}
    for rows, several in WARPS_OF_ROWS.items()
    for warps in several
)
# A thread holds 8 to 32 elements of a block.
LOOP_CONFIGS = tuple(
    {"BLOCK_N": block, "num_warps": warps}
    for block in (2048, 4096, 8192, 16384)
    for warps in (4, 8, 16, 32)
    if 8 <= block // (32 * warps) <= 32
)


def suits_row(most):
    """The `suits` of a kernel that keeps whole rows in registers: a thread fills one access at
    least, and holds at most `most` elements, or twice as many of a single row."""

    def suits(candidate, n, itemsize):
        rows, threads = candidate["BLOCK_M"], 32 * candidate["num_warps"]
        elements = rows << (n - 1).bit_length()
        if rows == 1:
            return ACCESS_BYTES // itemsize * threads <= elements <= 2 * most * threads
        fits = ACCESS_BYTES // itemsize * threads <= elements <= most * threads
        return fits and elements <= MOST_SHARED

    return suits

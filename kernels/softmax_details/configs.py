"""Tiles of softmax: rows that a program keeps in registers in chunks, and rows in a loop."""

# The longest row, in bytes, that one program keeps in its registers: a tensor of it, or both y and
# dy in the backward pass.
ROW_BYTES = 131072
PAIR_BYTES = 65536
# The longest row, in elements, whose numerators the forward pass keeps in float32. For 16-bit rows
# a loop is faster from fewer elements on: the first cache serves the second and third reading, and
# these loads are short beside the exponentials.
NUMERATORS = 16384
FEWER_NUMERATORS = 12288
ACCESS_BYTES = 16
MOST_CHUNKS = 4
# Limits of rows that are peeled. Rows of up to the first are read twice by one program in the
# backward pass; several programs hold a longer one. Rows of up to the second are a tile of several
# in the forward pass; a warp takes longer ones in turn.
SPLIT_LOOP_BYTES = 16384
TILED_BYTES = 256
# A longer loop is not unrolled: all its loads at once would take too many registers.
MOST_BLOCKS = 8
# Few tiles fit rows of more elements.
LONG_ROW = 32768
# The most that a thread keeps of a tensor: 64 registers.
HELD_BYTES = 256
# (longest row in bytes, rows of a program, most elements of a chunk, warps)
ROW_TILES = (
    (128, 16, 64, 4),
    (256, 8, 128, 4),
    (512, 4, 256, 4),
    (1024, 2, 512, 4),
    (8192, 1, 4096, 2),
    (16384, 1, 8192, 4),
    (24576, 1, 4096, 8),
    (32768, 1, 8192, 16),
    (65536, 1, 16384, 32),
)
BACKWARD_TILES = (
    *ROW_TILES[:4],
    (2048, 1, 1024, 4),
    (8192, 1, 4096, 16),
    (16384, 1, 8192, 16),
    (32768, 1, 8192, 4),
    (65536, 1, 16384, 32),
    (ROW_BYTES, 1, 16384, 32),
)
ROW_CANDIDATES = tuple(
    {"BLOCK_M": rows, "BLOCK_N": block, "num_warps": warps}
    for rows in (1, 2, 4)
    for block in (1024, 2048, 4096, 8192, 16384, 32768)
    for warps in (1, 2, 4, 8, 16, 32)
    if 8 <= rows * block // (32 * warps) <= 64 and (rows == 1 or rows * block <= 8192)
)
LOOP_CANDIDATES = tuple(
    {"BLOCK_N": block, "num_warps": warps}
    for block in (2048, 4096, 8192, 16384)
    for warps in (8, 16, 32)
    if 4 <= block // (32 * warps) <= 32
)


def fits_in_registers(n, itemsize, causal):
    """Return whether a program keeps the numerators of a row in its registers."""
    return n <= (FEWER_NUMERATORS if itemsize == 2 and not causal else NUMERATORS)


def reads_rows_twice(n, itemsize, causal):
    """Return whether a program of the backward pass reads y and dy twice.

    It does so with long rows, and with rows that the first cache of a multiprocessor can hold. A
    diagonal takes registers, so causal rows are long earlier.
    """
    if causal:
        return n * itemsize > PAIR_BYTES
    return n * itemsize > ROW_BYTES or 4096 < n * itemsize <= (32768 if itemsize == 2 else 16384)


def constant_num_blocks(n, block):
    """Return the number of blocks of n elements if the kernel is to know it, else 0."""
    blocks = -(-n // block)
    return blocks if blocks <= MOST_BLOCKS else 0


def choose_row(n, itemsize, causal=False, wide=False, tiles=ROW_TILES):
    held = n * (4 if wide else itemsize)
    # Faster than a generator, and by comparisons alone, which a graph of any size can trace.
    for limit, rows, block, warps in tiles:
        if held <= limit:
            while block >= 2 * n:
                block //= 2
            return {"BLOCK_M": rows, "BLOCK_N": block, "num_warps": warps}
    raise ValueError(f"n: {n}, expected a row that registers hold")


def choose_backward_row(n, itemsize, causal=False):
    return choose_row(n, itemsize, causal, False, BACKWARD_TILES)


def choose_loop(n, itemsize):
    if n * itemsize <= 32768:
        return {"BLOCK_N": 4096, "num_warps": 16}
    return {"BLOCK_N": 8192, "num_warps": 32}


def choose_backward_loop(n, itemsize):
    if n * itemsize <= 4096:
        # One access for each thread.
        block = 512 // itemsize
        while block < n:
            block *= 2
        return {"BLOCK_N": block, "num_warps": block * itemsize // 512}
    if n * itemsize <= 16384:
        return {"BLOCK_N": 8192 // itemsize, "num_warps": 16}
    if n * itemsize <= 32768:
        return {"BLOCK_N": 4096 if n % 8192 else 8192, "num_warps": 32}
    return {"BLOCK_N": 16384, "num_warps": 32}


def suits_row(candidate, n, itemsize, causal=False, most=2):
    """Return whether the chunks are full and few, and a thread holds 16 to 256 bytes of a row."""
    rows, block, warps = candidate.values()
    chunks = -(-n // block)
    held = rows * chunks * block * itemsize / (32 * warps)
    full = block <= 1 << (n - 1).bit_length() and (rows == 1 or (chunks == 1 and n <= 4096))
    few = chunks <= (MOST_CHUNKS if n > LONG_ROW else most)
    return full and few and ACCESS_BYTES <= held <= HELD_BYTES


def suits_forward_row(candidate, n, itemsize, causal=False, wide=False):
    return suits_row(candidate, n, 4, most=3)

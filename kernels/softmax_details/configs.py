"""Tiles of softmax: rows that a program keeps in registers in chunks, and rows that it walks."""

# The longest row that one program keeps in its registers: backward, and backward where it keeps
# both of the tensors that it reads.
ROW_BYTES = 131072
PAIR_BYTES = 65536
# Forward it keeps the weights, in float32, of rows of so many elements. Of 16-bit rows, whose loads
# are short beside the exponentials, it pays to walk the longer ones: they are in the first cache.
WEIGHTS = 16384
FEWER_WEIGHTS = 12288
ACCESS_BYTES = 16
MOST_CHUNKS = 4
# Of rows that are split: the longest that a program reads twice backward, where others share longer
# ones, and the longest that are a tile of several forward, where a warp takes longer ones in turn.
SPLIT_WALK_BYTES = 16384
TILED_BYTES = 256
# A walk of more steps is not unrolled: all its loads at once would take too many registers.
MOST_STEPS = 8
# Rows of more elements have few tiles that fit.
LONG_ROW = 32768
# What a thread keeps of a tensor: 64 registers at most.
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


def keeps(n, itemsize, causal):
    """Whether a program keeps the weights of a row in its registers."""
    return n <= (FEWER_WEIGHTS if itemsize == 2 and not causal else WEIGHTS)


def walks_backward(n, itemsize, causal):
    """Whether a program reads y and dy twice: long rows, and those of which the first cache holds
    enough for a multiprocessor."""
    if causal:
        return n * itemsize > PAIR_BYTES
    return n * itemsize > ROW_BYTES or 4096 < n * itemsize <= (32768 if itemsize == 2 else 16384)


def constant_steps(n, block):
    """The steps of a walk along n elements where the kernel is to know them, else 0."""
    steps = -(-n // block)
    return steps if steps <= MOST_STEPS else 0


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
        # An access a thread.
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
    """Whether the chunks are full and few, and a thread holds 16 to 256 bytes of a row."""
    rows, block, warps = candidate.values()
    chunks = -(-n // block)
    held = rows * chunks * block * itemsize / (32 * warps)
    full = block <= 1 << (n - 1).bit_length() and (rows == 1 or (chunks == 1 and n <= 4096))
    few = chunks <= (MOST_CHUNKS if n > LONG_ROW else most)
    return full and few and ACCESS_BYTES <= held <= HELD_BYTES


def suits_forward_row(candidate, n, itemsize, causal=False, wide=False):
    return suits_row(candidate, n, 4, most=3)

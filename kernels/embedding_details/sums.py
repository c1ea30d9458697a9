"""The sums of an embedding's gradient: of the rows of dy whose tokens share an id.

The first sorted token of an id has a program that adds up the id's rows of dy. Other programs write
zeros to the rows without a token. Reads that wait for each other would decide otherwise: a program
that owned rows of both kinds would look for their tokens one row after the other.

A frequent id would leave a program with most of the tokens. So the sorted tokens also form chunks.
If all tokens of a chunk have one id, its rows are added up beforehand, by a program of its own.
"""

import torch
import triton
import triton.language as tl

from .._runtime.configs import Configs
from .._runtime.vector_access import access_items
from .._triton.memory import load_f32, store_as
from .sort import LAST_KEY, MOST_STEPS, PLACE, PLACE_BITS, bisect
from .tiles import WIDE, columns, suits

# Tokens of a chunk, whose sum is taken beforehand if they have one id.
CHUNK = 64
# Rows that a program reads at once, so that their loads overlap.
AT_ONCE = 8


def sum_tokens(keys: torch.Tensor, dy: torch.Tensor, dweight: torch.Tensor) -> None:
    """Write to dweight `[V, C]` the sums of dy `[M, C]` by the ids of the sorted keys `[M]`."""
    m, (v, c) = len(keys), dweight.shape
    config = SUMS.pick(dy.device, c=min(c, WIDE), itemsize=dy.element_size())
    tiles, chunks = (c - 1) // config["BLOCK_C"] + 1, m // CHUNK
    # A plan takes no allocation without memory.
    parts = torch.empty((max(chunks, 1), c), dtype=torch.float32, device=dy.device)
    shared = {
        "keys_ptr": keys, "dy_ptr": dy, "parts_ptr": parts, "stride_dy": dy.stride(0),
        "V": v, "C": c, "ITEMS": access_items(dy.element_size(), c, dy.stride(0)),
        "CHUNK": CHUNK, "AT_ONCE": AT_ONCE, "BLOCK_C": config["BLOCK_C"],
        "num_warps": config["num_warps"],
    }  # fmt: skip
    if chunks:
        _chunk_kernel[(chunks * tiles,)](tiles=tiles, **shared)
    fills = (v - 1) // config["BLOCK_V"] + 1
    _sum_kernel[((fills + m) * tiles,)](
        dweight_ptr=dweight, M=m, tiles=tiles, fills=fills, steps=MOST_STEPS,
        BLOCK_V=config["BLOCK_V"], **shared,
    )  # fmt: skip


@triton.jit
def _chunk_kernel(
    keys_ptr, dy_ptr, parts_ptr, stride_dy, V, C, tiles,
    ITEMS: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """parts[j] = the sum of dy over the tokens of chunk j, if all of them have one id.

    Grid: chunks * tiles, tiles = cdiv(C, BLOCK_C). A program owns BLOCK_C columns of a chunk of
    CHUNK sorted tokens. It reads their keys and rows of dy, AT_ONCE of them at a time, and writes
    parts [chunks, C], float32. C and the stride are multiples of ITEMS, those of an access.
    """
    stride_dy, C = stride_dy // ITEMS * ITEMS, C // ITEMS * ITEMS
    pid = tl.program_id(0)
    chunk = (pid // tiles).to(tl.int64)
    first = tl.load(keys_ptr + chunk * CHUNK) >> PLACE_BITS
    last = tl.load(keys_ptr + chunk * CHUNK + CHUNK - 1) >> PLACE_BITS
    if (first == last) & (first < V):
        cols = (pid % tiles) * BLOCK_C + tl.arange(0, BLOCK_C)
        acc = tl.zeros((BLOCK_C,), tl.float32)
        begin = chunk * CHUNK
        acc = _add_tokens(acc, keys_ptr, dy_ptr, begin, begin + CHUNK, cols, stride_dy, C, AT_ONCE)
        tl.store(parts_ptr + chunk * C + cols, acc, mask=cols < C)


@triton.jit
def _sum_kernel(
    keys_ptr, dy_ptr, parts_ptr, dweight_ptr, stride_dy, M, V, C, tiles, fills, steps,
    ITEMS: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dweight[v] = the sum of dy over the tokens with id v, computed in float32.

    Grid: (fills + M) * tiles, fills = cdiv(V, BLOCK_V), tiles = cdiv(C, BLOCK_C). One of the first
    fills * tiles programs owns BLOCK_C columns of BLOCK_V rows of dweight [V, C]. It bisects the
    keys [M], and writes zeros to the rows without a token. Each other program owns BLOCK_C columns
    of a sorted token. If that is the first one of a row, it reads the keys of the row's tokens, and
    of these the rows of dy, or of parts for whole chunks. Then it writes the row of dweight. steps:
    at least the number of bits of M. C and the stride are multiples of ITEMS, those of an access.
    BLOCK_V, BLOCK_C: powers of two.
    """
    stride_dy, C = stride_dy // ITEMS * ITEMS, C // ITEMS * ITEMS
    pid = tl.program_id(0)
    unit = pid // tiles
    cols = (pid % tiles) * BLOCK_C + tl.arange(0, BLOCK_C)
    wide = cols < C
    if unit < fills:
        rows = unit.to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
        low = tl.zeros((BLOCK_V,), tl.int64)
        place = bisect(keys_ptr, rows << PLACE_BITS, low, low + M, steps)
        found = tl.load(keys_ptr + place, mask=place < M, other=LAST_KEY) >> PLACE_BITS
        empty = (found != rows) & (rows < V)
        ptrs = dweight_ptr + rows[:, None] * C + cols[None, :]
        zeros = tl.zeros((BLOCK_V, BLOCK_C), dweight_ptr.dtype.element_ty)
        tl.store(ptrs, zeros, mask=empty[:, None] & wide[None, :])
    else:
        first = (unit - fills).to(tl.int64)
        row = tl.load(keys_ptr + first) >> PLACE_BITS
        before = tl.load(keys_ptr + first - 1, mask=first > 0, other=-1) >> PLACE_BITS
        if (row != before) & (row < V):
            places = first + tl.arange(0, AT_ONCE)
            keys = tl.load(keys_ptr + places, mask=places < M, other=LAST_KEY)
            same = (keys >> PLACE_BITS) == row
            ptrs = dy_ptr + (keys & PLACE)[:, None] * stride_dy + cols[None, :]
            acc = tl.sum(load_f32(ptrs, same[:, None] & wide[None, :]), 0)
            if tl.sum(same.to(tl.int32), 0) == AT_ONCE:
                start = first + AT_ONCE
                end = _first_of(keys_ptr, row + 1, start, M)
                # The sum of the chunk that begins here has these rows already.
                ready = (first % CHUNK == 0) & (end - first >= CHUNK)
                acc = tl.where(ready, 0.0, acc)
                start = tl.where(ready, first, start)
                head = tl.minimum((start + CHUNK - 1) // CHUNK * CHUNK, end)
                tail = tl.maximum(end // CHUNK * CHUNK, head)
                acc = _add_tokens(acc, keys_ptr, dy_ptr, start, head, cols, stride_dy, C, AT_ONCE)
                for chunk in range(head // CHUNK, tail // CHUNK, AT_ONCE):
                    chunks = chunk + tl.arange(0, AT_ONCE)
                    inside = chunks < tail // CHUNK
                    part_ptrs = parts_ptr + chunks[:, None] * C + cols[None, :]
                    acc += tl.sum(load_f32(part_ptrs, inside[:, None] & wide[None, :]), 0)
                acc = _add_tokens(acc, keys_ptr, dy_ptr, tail, end, cols, stride_dy, C, AT_ONCE)
            store_as(dweight_ptr + row * C + cols, acc, wide)


@triton.jit
def _first_of(keys_ptr, row, low, high):
    """Return the place of the first key of an id from `row` on within [low, high), else high."""
    low, high, wanted = tl.cast(low, tl.int64), tl.cast(high, tl.int64), row << PLACE_BITS
    while low < high:
        middle = (low + high) // 2
        if tl.load(keys_ptr + middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def _add_tokens(acc, keys_ptr, dy_ptr, first, last, cols, stride_dy, C, AT_ONCE: tl.constexpr):
    """Return acc, float32, plus the rows of dy of the sorted tokens [first, last)."""
    for start in range(first, last, AT_ONCE):
        places = start + tl.arange(0, AT_ONCE)
        inside = places < last
        tokens = tl.load(keys_ptr + places, mask=inside, other=0) & PLACE  # [AT_ONCE]
        ptrs = dy_ptr + tokens[:, None] * stride_dy + cols[None, :]
        acc += tl.sum(load_f32(ptrs, inside[:, None] & (cols < C)[None, :]), 0)
    return acc


SUM_CONFIGS = tuple(
    {"BLOCK_V": rows, "BLOCK_C": columns, "num_warps": warps}
    for columns in (128, 256, 512, 1024, 2048)
    for rows in (4, 8, 16, 32)
    for warps in (1, 2, 4)
    if 4 <= columns // (32 * warps) <= 16
)


def _choose_sum(c, itemsize):
    # An access of 16 bytes a thread for a row.
    width = columns(c, 2048 // itemsize)
    return {"BLOCK_V": 32, "BLOCK_C": width, "num_warps": max(1, width * itemsize // 512)}


SUMS = Configs(_sum_kernel, SUM_CONFIGS, _choose_sum, suits, "embedding")

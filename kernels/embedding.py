"""Embedding: out[i] = weight[ids[i]], and a gradient of the weight that repeats bit for bit.

Memory decides. The forward pass copies rows. If there are more tokens than rows, it copies some
columns of all tokens first: then a row that many tokens have is still in the L2. Else it copies
whole rows one after the other. Rows that are no whole sectors of memory are copied so, too: two
parts of a sector that are written long after each other cost two writes of it.

The backward pass writes the whole gradient, most of it zeros, and reads each row of dy once. Each
row of the gradient has one program. So no row is written twice, no zeros are written first, and no
two programs add to one number.

A program must find the tokens of a row. So the tokens are sorted by their id, and by their place
within an id. A key holds both, so all keys differ and every correct sort gives the same order. The
place of a key in a block of keys is the number of smaller keys, which a program counts. Its place
in the whole is the sum of such numbers, found in each sorted block by bisection. Sums run in that
order in float32.

The first sorted token of an id has a program that adds up the id's rows of dy. Other programs write
zeros to the rows without a token. Reads that wait for each other would decide otherwise: a program
that owned rows of both kinds would look for their tokens one row after the other.

A frequent id would leave a program with most of the tokens. So the sorted tokens also form chunks.
If all tokens of a chunk have one id, its rows are added up beforehand, by a program of its own.

Sources: sorting by ranks in sorted blocks is that of Satish, Harris and Garland, "Designing
efficient sorting algorithms for manycore GPUs" (2009). PyTorch's backward pass sorts as well.
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import (
    MOST_ITEMS,
    check_floating,
    check_integer,
    check_same_device,
    check_tensors,
)
from ._runtime.configs import Configs
from ._runtime.layout import as_rows_2d
from ._runtime.vector_access import access_items
from ._triton.memory import load_f32, store_as

ACCUMULATES = {"embedding": "float32"}
# Bytes that memory writes at once.
SECTOR = 32
# Keys of a sorted block, and of these those that a program places, and that it compares at a time.
SORTED, PLACED, SEEN = 1024, 16, 512
# Below so many ids, an id and a place within a block fit in 31 bits.
NARROW = 2**31 // SORTED - 1
# The bits of any number of tokens; one that depends on their number would ask for a graph for each.
MOST_STEPS = MOST_ITEMS.bit_length()
# Keys that a program ranks. It bisects several sorted blocks at once, as each step of a bisection
# waits for the one before: the second number if there are few blocks, else the third.
RANKED, BISECTED_OF_FEW, BISECTED, FEW = 32, 8, 4, 16
# Beyond so many tokens the bisections take more time than PyTorch's sort.
MOST_RANKED = 2**16
# Tokens of a chunk, whose sum is taken beforehand if they have one id.
CHUNK = 64
# Rows that a program reads at once, so that their loads overlap.
AT_ONCE = 8
# The upper half of a key is the id, the lower half the place of the token.
PLACE_BITS = tl.constexpr(32)
PLACE = tl.constexpr(2**32 - 1)
LAST_KEY = tl.constexpr(2**63 - 1)


def embedding(
    ids: torch.Tensor, weight: torch.Tensor, *, padding_idx: int | None = None
) -> torch.Tensor:
    """Return a row of the weight for each token.

    It is PyTorch's function without its options `max_norm`, `scale_grad_by_freq` and `sparse`. The
    gradient has the same bits in each run.

    Args:
        ids: any shape, int64 or int32, from 0 to V - 1. Values are checked on a CPU only; on a GPU
            the row of an id out of range is NaN, and its gradient goes nowhere.
        weight: `[V, C]`, float32, float16 or bfloat16.
        padding_idx: a row without a gradient, from -V to V - 1, or None.

    Returns:
        A new contiguous tensor `[..., C]` with the shape of ids, in the dtype of the weight. It is
        differentiable once, in the weight.

    Raises:
        TypeError: an argument has another kind or dtype.
        ValueError: the weight has other dimensions or another device than ids, padding_idx or an id
            is out of range, or there are too many tokens.

    Source:
        `torch.nn.functional.embedding`.

    Example:
        >>> weight = torch.randn(10, 4, device="cuda")
        >>> embedding(torch.tensor([[1, 2, 2]], device="cuda"), weight).shape
        torch.Size([1, 3, 4])
    """
    padding = -1
    if padding_idx is not None:
        check_integer("padding_idx", padding_idx)
        check_tensors(weight=weight)
        rows = weight.shape[0] if weight.dim() else 0
        padding = check_integer("padding_idx", padding_idx, -rows, rows - 1)
        padding += rows if padding < 0 else 0
    if needs_grad(weight):
        return _Embedding.apply(ids, weight, padding)
    return embedding_fwd(ids, weight)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, padding):
        out = embedding_fwd(ids, weight)
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding = weight.shape[0], padding
        return out

    @staticmethod
    @once
    def backward(ctx, dy):
        return None, embedding_bwd(ctx.saved_tensors[0], dy, ctx.rows, ctx.padding), None


def embedding_fwd(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return out `[..., C]`; arguments and errors as those of `embedding`."""
    check_tensors(ids=ids, weight=weight)
    _check(ids, weight)
    (v, c), m = weight.shape, ids.numel()
    out = torch.empty((*ids.shape, c), dtype=weight.dtype, device=weight.device)
    if out.numel() == 0:
        return out
    weight = as_rows_2d(weight)
    by_columns = m > v and c * out.element_size() % SECTOR == 0
    config = FORWARD.pick(
        out.device, c=min(c, WIDE), itemsize=out.element_size(), by_columns=by_columns
    )
    blocks, tiles = (m - 1) // config["BLOCK_M"] + 1, (c - 1) // config["BLOCK_C"] + 1
    _forward_kernel[(blocks * tiles,)](
        ids_ptr=ids.contiguous(), weight_ptr=weight, out_ptr=out,
        stride_weight=weight.stride(0), M=m, V=v, C=c, count=blocks if by_columns else tiles,
        BY_COLUMNS=by_columns, ITEMS=access_items(out.element_size(), c, weight.stride(0)),
        **config,
    )  # fmt: skip
    return out


def embedding_bwd(ids: torch.Tensor, dy: torch.Tensor, rows: int, padding: int) -> torch.Tensor:
    """Return the gradient of a weight of so many rows, contiguous.

    padding: the row whose gradient is zero; -1 if there is none.
    """
    m, c = ids.numel(), dy.shape[-1]
    dweight = torch.empty((rows, c), dtype=dy.dtype, device=dy.device)
    if dweight.numel() == 0:
        return dweight
    dy = as_rows_2d(dy)
    keys = torch.empty(m, dtype=torch.int64, device=dy.device)
    blocks, chunks = (m - 1) // SORTED + 1 if m else 0, m // CHUNK
    if m:
        unranked = keys if blocks == 1 else torch.empty_like(keys)
        few = m <= MOST_RANKED
        _sort_kernel[((m - 1) // PLACED + 1,)](
            ids_ptr=ids.contiguous(), keys_ptr=unranked, M=m, V=rows, padding=padding,
            BLOCK=SORTED if few else PLACED, OWN=PLACED, SEEN=SEEN if few else PLACED,
            NARROW=rows < NARROW, num_warps=4,
        )  # fmt: skip
        if not few:
            keys = torch.sort(unranked)[0]
        elif blocks > 1:
            _rank_kernel[((m - 1) // RANKED + 1,)](
                unranked_ptr=unranked, keys_ptr=keys, M=m, blocks=blocks, steps=SORTED.bit_length(),
                BLOCK=SORTED, OWN=RANKED, BISECTED=BISECTED_OF_FEW if blocks <= FEW else BISECTED,
                num_warps=4,
            )  # fmt: skip
    config = SUMS.pick(dy.device, c=min(c, WIDE), itemsize=dy.element_size())
    tiles = (c - 1) // config["BLOCK_C"] + 1
    # A plan takes no allocation without memory.
    parts = torch.empty((max(chunks, 1), c), dtype=torch.float32, device=dy.device)
    shared = {
        "keys_ptr": keys, "dy_ptr": dy, "parts_ptr": parts, "stride_dy": dy.stride(0),
        "V": rows, "C": c, "ITEMS": access_items(dy.element_size(), c, dy.stride(0)),
        "CHUNK": CHUNK, "AT_ONCE": AT_ONCE, "BLOCK_C": config["BLOCK_C"],
        "num_warps": config["num_warps"],
    }  # fmt: skip
    if chunks:
        _chunk_kernel[(chunks * tiles,)](tiles=tiles, **shared)
    fills = (rows - 1) // config["BLOCK_V"] + 1
    _sum_kernel[((fills + m) * tiles,)](
        dweight_ptr=dweight, M=m, tiles=tiles, fills=fills, steps=MOST_STEPS,
        BLOCK_V=config["BLOCK_V"], **shared,
    )  # fmt: skip
    return dweight


def _check(ids, weight):
    """Raise TypeError or ValueError unless ids and weight are tensors that `embedding` takes."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids: {ids.dtype}, expected int64 or int32")
    check_floating(weight=weight)
    if weight.dim() != 2:
        raise ValueError(f"weight: shape {tuple(weight.shape)}, expected [V, C]")
    check_same_device(ids=ids, weight=weight)
    if torch.compiler.is_compiling():
        return
    for name, size in (("ids", ids.numel()), ("weight", max(weight.shape))):
        if size > MOST_ITEMS:
            raise ValueError(f"{name}: a size of {size}, expected at most {MOST_ITEMS}")
    if ids.device.type == "cpu":
        outside = ids[(ids < 0) | (ids >= len(weight))]
        if outside.numel():
            raise ValueError(f"ids: {outside[0].item()}, expected 0 to {len(weight) - 1}")


@triton.jit
def _forward_kernel(
    ids_ptr, weight_ptr, out_ptr, stride_weight, M, V, C, count,
    BY_COLUMNS: tl.constexpr, ITEMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[i] = weight[ids[i]], NaN for an id below 0 or from V on.

    Grid: cdiv(M, BLOCK_M) * cdiv(C, BLOCK_C). A program owns BLOCK_C columns of BLOCK_M tokens. It
    reads their ids and the rows of weight [V, C], and writes out [M, C]. BY_COLUMNS: whether
    programs that follow each other have the same columns, and not the same tokens. count: the
    number of such programs. C and the stride are multiples of ITEMS, those of an access.
    """
    stride_weight, C = stride_weight // ITEMS * ITEMS, C // ITEMS * ITEMS
    pid = tl.program_id(0)
    block = pid % count if BY_COLUMNS else pid // count
    tile = pid // count if BY_COLUMNS else pid % count
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = rows < M
    ids = tl.load(ids_ptr + rows, mask=inside, other=0).to(tl.int64)
    known = inside & (ids >= 0) & (ids < V)
    wide = (cols < C)[None, :]
    x = tl.load(
        weight_ptr + ids[:, None] * stride_weight + cols[None, :],
        mask=known[:, None] & wide, other=float("nan"),
    )  # fmt: skip
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * C + cols[None, :]
    tl.store(out_ptrs, x, mask=inside[:, None] & wide)


@triton.jit
def _sort_kernel(
    ids_ptr, keys_ptr, M, V, padding,
    BLOCK: tl.constexpr, OWN: tl.constexpr, SEEN: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """keys = the keys of each block of BLOCK tokens, ascending.

    Grid: cdiv(M, OWN). A program owns OWN tokens of a block. It reads the ids of the block, SEEN at
    a time and as many beyond it, and counts those before each of its own. It writes its keys to
    those places of keys [M]. OWN and SEEN divide BLOCK. NARROW: whether (V + 1) * BLOCK fits in 31
    bits.
    """
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    block = tl.program_id(0) * OWN // BLOCK * BLOCK
    ids = _ids(ids_ptr, own, M, V, padding)
    order = _order(ids, own - block, BLOCK, NARROW)
    rank = tl.zeros((OWN,), tl.int32)
    within = tl.arange(0, SEEN)
    ahead = _ids(ids_ptr, block + within, M, V, padding)
    for _ in range(0, BLOCK, SEEN):
        seen = _order(ahead, within, BLOCK, NARROW)
        # The next ids are on their way while these are compared.
        within += SEEN
        ahead = _ids(ids_ptr, block + within, M, V, padding)
        before = seen[None, :] < order[:, None]  # [OWN, SEEN]
        rank += tl.sum(before.to(tl.int32), 1)
    keys = (ids.to(tl.int64) << PLACE_BITS) | own
    tl.store(keys_ptr + block + rank, keys, mask=own < M)


@triton.jit
def _ids(ids_ptr, places, M, V, padding):
    """Return the ids at these places; `padding` and those out of range become V, that of no row.

    So do places past the last token, which are the last in order.
    """
    ids = tl.load(ids_ptr + places, mask=places < M, other=-1)
    return tl.where((ids < 0) | (ids >= V) | (ids == padding), V, ids)


@triton.jit
def _order(ids, within, BLOCK: tl.constexpr, NARROW: tl.constexpr):
    """Return numbers that order the tokens of a block by id, then by place within the block."""
    KEY: tl.constexpr = tl.int32 if NARROW else tl.int64
    return ids.to(KEY) * BLOCK + within


@triton.jit
def _rank_kernel(
    unranked_ptr, keys_ptr, M, blocks, steps,
    BLOCK: tl.constexpr, OWN: tl.constexpr, BISECTED: tl.constexpr,
):  # fmt: skip
    """keys = all keys, ascending, from blocks of which each is.

    Grid: cdiv(M, OWN). A program owns OWN keys of a block. It reads them, and bisects each of the
    `blocks` blocks of BLOCK keys for the number of keys below each of its own, BISECTED blocks at a
    time. The sum of these numbers is the place in keys [M]. steps: the number of bits of BLOCK.
    """
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    inside = own < M
    keys = tl.load(unranked_ptr + own, mask=inside, other=LAST_KEY)
    rank = tl.zeros((OWN,), tl.int32)
    for block in range(0, blocks, BISECTED):
        first = tl.minimum((block + tl.arange(0, BISECTED)) * BLOCK, M)[:, None]
        low = first + tl.zeros((BISECTED, OWN), tl.int32)
        high = tl.minimum(low + BLOCK, M)
        rank += tl.sum(_bisect(unranked_ptr, keys[None, :], low, high, steps) - first, 0)
    tl.store(keys_ptr + rank, keys, mask=inside)


@triton.jit
def _bisect(keys_ptr, wanted, low, high, steps):
    """Return the first places in [low, high) whose keys are not below `wanted`, else high.

    low, high: integers of one shape. The ranges have fewer than 2**steps keys.
    """
    for _ in range(steps):
        middle = (low + high) // 2
        key = tl.load(keys_ptr + middle, mask=low < high, other=LAST_KEY)
        below = key < wanted
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, tl.minimum(high, middle))
    return low


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
        place = _bisect(keys_ptr, rows << PLACE_BITS, low, low + M, steps)
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


# The choice of a tile is the same for all rows of this length or more.
WIDE = 2048
FORWARD_CONFIGS = tuple(
    {"BLOCK_M": rows, "BLOCK_C": columns, "num_warps": warps}
    for columns in (64, 128, 256, 512, 1024, 2048)
    for rows in (1, 2, 4, 8, 16, 32)
    for warps in (1, 2, 4)
    if 8 <= rows * columns // (32 * warps) <= 64
)
SUM_CONFIGS = tuple(
    {"BLOCK_V": rows, "BLOCK_C": columns, "num_warps": warps}
    for columns in (128, 256, 512, 1024, 2048)
    for rows in (4, 8, 16, 32)
    for warps in (1, 2, 4)
    if 4 <= columns // (32 * warps) <= 16
)


def _columns(c, most):
    """Return the least power of two that holds c columns, from 16 to `most`."""
    return min(most, max(16, 1 << (c - 1).bit_length()))


def _choose_forward(c, itemsize, by_columns):
    # Each of four warps has four accesses of 512 bytes on the way. By columns, a slice of all rows
    # is to stay in the L2; by rows, the accesses of a row are to lie side by side.
    columns = _columns(c, (256 if by_columns else 2048) // itemsize)
    return {"BLOCK_M": min(32, 8192 // (columns * itemsize)), "BLOCK_C": columns, "num_warps": 4}


def _choose_sum(c, itemsize):
    # An access of 16 bytes a thread for a row.
    columns = _columns(c, 2048 // itemsize)
    return {"BLOCK_V": 32, "BLOCK_C": columns, "num_warps": max(1, columns * itemsize // 512)}


def _suits(candidate, c, **key):
    return candidate["BLOCK_C"] < 2 * max(c, 128)


FORWARD = Configs(_forward_kernel, FORWARD_CONFIGS, _choose_forward, _suits)
SUMS = Configs(_sum_kernel, SUM_CONFIGS, _choose_sum, _suits)
embedding_fwd = cached_launch(embedding_fwd)
embedding_bwd = cached_launch(embedding_bwd)

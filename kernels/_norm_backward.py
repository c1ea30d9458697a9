"""Backward pass of layer norm and RMS norm: dx, and the sums over rows that are dw and db.

With xhat = (x - mean) rstd (RMS norm: x rstd) and g = w dy, dx = rstd (g - xhat mean(g xhat) -
mean(g)) + ds, dw = sum of dy xhat over the rows, db = sum of dy. The term mean(g) is that of a
layer norm; ds is the gradient of the fused sum. A fixed number of programs share the rows. Each
reads its rows once, while the next are on their way to shared memory, and keeps its part of dw and
db in registers. Rows beyond ROW_BYTES are split: each program of a group holds the same columns of
many rows, and the group takes the sums along a row together (`_exchange.py`). Rows of any length
are cut so (`_norm_columns.py`). If programs may not wait for each other, or a row is too long for
all that may, x and dy are read twice (`_norm_backward_twice.py`). A last kernel adds the parts in a
fixed order, so the result is the same in each run. The two-stage sum follows the layer norm
tutorial of Triton, without its locks.
"""

import torch
import triton
import triton.language as tl

from kernels._device import shared_bytes, sm_count
from kernels._exchange import may_wait, parts_together, unsaid
from kernels._launch import launch
from kernels._norm_backward_twice import (
    SPLITS,
    TILE,
    TILE_CANDIDATES,
    TILE_PROGRAMS,
    _norm_backward_sums_kernel,
    _norm_backward_tile_kernel,
)
from kernels._norm_columns import chunks_of, owned_columns, span_of
from kernels._norm_forward import add_pairs, spaced
from kernels._plan import empty, planned
from kernels._tile import store_as, widened, zero_after
from kernels._tuned import Config, Configs

# What a program holds of a row at most, with its share of dw and db.
ROW_BYTES = 32768
# The longest row that is one chunk whatever its length.
UNDIVIDED = 4096
# The compiler reads 16 bytes at a time if rows are a multiple of this many columns long.
ALIGNED_ROW = 16
# The most columns of an unaligned row that a program holds, and of a split of one, both in
# UNALIGNED_WARPS: masks and unpacked numbers take registers.
UNALIGNED_COLUMNS, UNALIGNED_SPLIT = 8192, 5120
UNALIGNED_WARPS = 8
# (longest row, rows of a tile, warps, stages, programs a multiprocessor)
ROW_TILES = (
    (256, 8, 4, 3, 2),
    (512, 8, 4, 3, 2),
    (1024, 4, 4, 3, 2),
    (2048, 2, 8, 3, 2),
    (4096, 1, 8, 3, 2),
    (8192, 1, 8, 3, 1),
    (16384, 1, 16, 3, 1),
)


def _row_config(rows, stages, programs, splits, warps):
    return {
        "BLOCK_M": rows, "STAGES": stages, "PER_SM": programs, "NUM_SPLITS": splits,
        "num_warps": warps,
    }  # fmt: skip


ROW_CANDIDATES = (
    *(
        _row_config(rows, stages, programs, 1, warps)
        for rows, warps in ((1, 4), (1, 8), (1, 16), (2, 8), (4, 4), (4, 8), (8, 4))
        for stages, programs in ((1, 4), (3, 1), (3, 2))
    ),
    *(
        _row_config(1, 3, programs, splits, warps)
        for splits in (2, 3, 4, 6, 8, 12, 16, 24, 32)
        for warps, programs in ((8, 1), (8, 2), (16, 1))
    ),
)
SUM_CANDIDATES = tuple(
    {"BLOCK_P": rows, "BLOCK_N": columns, "num_warps": 4}
    for rows, columns in ((32, 32), (64, 32), (128, 16), (256, 8))
)
# The most columns of a split, if ROW_BYTES hold them. The exchange takes registers that a layer
# norm has not: it keeps db as well.
SPLIT_COLUMNS, RMS_SPLIT_COLUMNS = 12288, 16384
# Beyond so many splits they are longer instead: on an H200 no more programs may wait (`may_wait`).
MOST_SPLITS = 32
# How many shares of dw there are at most; more than the last make no difference to a tile.
SHARES = (1, 2, 4, 8, 16, 32, 64, 128)
# Shared memory for rows on their way, a little less than an H200 has.
SHARED_BYTES = 220000


def backward_configs(
    family: str, tile: Config = TILE, columns: int = SPLIT_COLUMNS
) -> tuple[Configs, Configs, Configs, Configs]:
    """Return the tiles of rows, of the sums along rows, of tiles and of parts, for the table of a
    family; `tile` is the rule of the second and the third, a split has at most `columns`."""

    def choose_row(n, itemsize):
        whole, warps = ROW_BYTES // itemsize, 16
        span = min(whole, columns)
        if n % ALIGNED_ROW:
            whole, span, warps = UNALIGNED_COLUMNS, UNALIGNED_SPLIT, UNALIGNED_WARPS
        if n > whole:
            splits = max(-(-n // whole), min(-(-n // span), MOST_SPLITS))
            return _row_config(1, 3, 1, splits, warps)
        tiles = (tile for limit, *tile in ROW_TILES if n <= limit)
        rows, warps, stages, programs = next(tiles, ROW_TILES[-1][1:])
        return _row_config(rows, stages, programs, 1, warps)

    def choose_tile(n, itemsize):
        return tile

    return (
        Configs(_norm_backward_row_kernel, ROW_CANDIDATES, choose_row, _suits_row, family),
        Configs(_norm_backward_sums_kernel, TILE_CANDIDATES, choose_tile, family=family),
        Configs(_norm_backward_tile_kernel, TILE_CANDIDATES, choose_tile, family=family),
        Configs(_norm_sum_parts_kernel, SUM_CANDIDATES, _choose_sum, family=family),
    )


def _suits_row(candidate, n, itemsize):
    """Whether a thread has 8 to 32 elements of a tile, and what is on its way fits: x, dy, ds."""
    splits = candidate["NUM_SPLITS"]
    held = span_of(n, splits)
    if (n * itemsize > ROW_BYTES) != (splits > 1) or held * itemsize > ROW_BYTES:
        return False
    elements = candidate["BLOCK_M"] * (1 << (held - 1).bit_length())
    on_the_way = 3 * (candidate["STAGES"] - 1) * elements * itemsize
    several = candidate["BLOCK_M"] == 1 or elements <= 4096
    full = 8 <= elements // (32 * candidate["num_warps"]) <= 32
    return several and full and on_the_way <= SHARED_BYTES


def _choose_sum(n, itemsize, shares):
    rows = min(shares, 128 if n <= 8192 else 64)
    return {"BLOCK_P": rows, "BLOCK_N": 2048 // rows, "num_warps": 4}


@triton.jit
def _norm_backward_row_kernel(
    x_ptr, dy_ptr, ds_ptr, weight_ptr, stats_ptr, dx_ptr, parts_ptr, slots_ptr,
    stride_xm, stride_dym, stride_dsm, M, N,
    IS_LAYER_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr, PER_SM: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """dx of all rows, and for each group of programs its partial sums of dw and db.

    xhat = (x - mean) rstd, g = w dy, c1 = mean(g xhat), c2 = mean(g) (0 in an RMS norm):
    dx = rstd (g - xhat c1 - c2) + ds; dw = sum over rows of dy xhat, db = sum over rows of dy.

    Grid: num_groups * NUM_SPLITS. A group takes every num_groups-th tile of BLOCK_M rows, or a
    range of them. Split `split_id` of the group owns the columns [begin, end) of these rows as
    NUM_CHUNKS chunks of BLOCK_N; it keeps x, dy, w and its part of dw and db in registers.

    Reads x, dy (and ds) [M, N] once, in rows stride_xm, stride_dym, stride_dsm apart, w [N] and
    stats (rstd [M], then mean [M] of a layer norm). Writes dx [M, N], and parts, float32: dw
    [num_groups, N] if there is a weight, then db [num_groups, N] if HAS_BIAS.

    NUM_FULL: the leading chunks that lie within the columns of each split, so need no mask.
    NUM_SPLITS > 1: BLOCK_M is 1, all programs of the grid are resident at once, and slots holds
    a pair for each split and row, empty. STAGES: rows loaded ahead, plus one. PER_SM: used by the
    host only.
    """
    split_id = tl.program_id(0) % NUM_SPLITS
    begin, end = owned_columns(split_id, N, NUM_CHUNKS, NUM_FULL, BLOCK_N, NUM_SPLITS)
    group = (tl.program_id(0) // NUM_SPLITS).to(tl.int64)
    num_groups = tl.num_programs(0) // NUM_SPLITS
    dw, db, weights = (), (), ()
    for chunk in tl.static_range(NUM_CHUNKS):
        cols = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]  # [1, BLOCK_N]
        if weight_ptr is not None:
            mask_n = (cols < end) | (chunk < NUM_FULL)
            weights += (tl.load(weight_ptr + cols, mask=mask_n, other=0.0),)
        dw += (tl.zeros((BLOCK_M, BLOCK_N), tl.float32),)
        db += (tl.zeros((BLOCK_M, BLOCK_N), tl.float32),)
    # All programs read one region of memory at a time if they take rows in turn. Split rows of 16
    # bits are faster in a range for each group (docs/lab/rms_norm.md); so are short rows.
    if BLOCK_M == 1 and (NUM_SPLITS == 1 or x_ptr.dtype.element_ty.primitive_bitwidth == 32):
        first_row, last_row, step = group, M, num_groups
    else:
        per_group = tl.cdiv(tl.cdiv(M, BLOCK_M), num_groups) * BLOCK_M
        first_row, last_row = group * per_group, tl.minimum((group + 1) * per_group, M)
        step = BLOCK_M
    for start in tl.range(first_row, last_row, step, num_stages=STAGES):
        # 1. Load the rows.
        offs_m = start + tl.arange(0, BLOCK_M)
        rows = offs_m[:, None]  # [BLOCK_M, 1]
        mask_m = (offs_m < M) | (BLOCK_M == 1)
        xs, dys = (), ()
        for chunk in tl.static_range(NUM_CHUNKS):
            cols = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
            mask = mask_m[:, None] & ((cols < end) | (chunk < NUM_FULL))
            xs += (tl.load(x_ptr + rows * stride_xm + cols, mask=mask, other=0.0),)
            dys += (tl.load(dy_ptr + rows * stride_dym + cols, mask=mask, other=0.0),)
        rstd = tl.load(stats_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        mean = 0.0
        if IS_LAYER_NORM:
            mean = tl.load(stats_ptr + M + offs_m, mask=mask_m, other=0.0)[:, None]
        # 2. Sum along the rows, and into dw and db.
        lanes_c1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        lanes_c2 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        old_dw, old_db = dw, db
        dw, db = (), ()
        for chunk in tl.static_range(NUM_CHUNKS):
            xhat = (xs[chunk].to(tl.float32) - mean) * rstd
            dy = dys[chunk].to(tl.float32)
            g = dy
            if weight_ptr is not None:
                g = widened(weights[chunk], zero_after(tl.cast(start, tl.int32))) * dy
            lanes_c1 += g * xhat
            if weight_ptr is not None:
                dw += (old_dw[chunk] + dy * xhat,)
            else:
                dw += (old_dw[chunk],)
            if IS_LAYER_NORM:
                lanes_c2 += g
            if HAS_BIAS:
                db += (old_db[chunk] + dy,)
            else:
                db += (old_db[chunk],)
        if IS_LAYER_NORM:
            c1, c2 = tl.reduce((lanes_c1, lanes_c2), 1, add_pairs)
        else:
            c1 = tl.sum(lanes_c1, 1)
            c2 = tl.zeros((BLOCK_M,), tl.float32)
        if NUM_SPLITS > 1:
            parts_c1, parts_c2 = parts_together(
                slots_ptr + start * (2 * NUM_SPLITS), split_id, tl.sum(c1, 0), tl.sum(c2, 0),
                NUM_SPLITS,
            )  # fmt: skip
            c1 = tl.sum(parts_c1, 0) + tl.zeros((BLOCK_M,), tl.float32)
            c2 = tl.sum(parts_c2, 0) + tl.zeros((BLOCK_M,), tl.float32)
        zero = zero_after(c1)[:, None]
        c1 = (c1 / N)[:, None]
        c2 = (c2 / N)[:, None]
        # 3. Store dx.
        for chunk in tl.static_range(NUM_CHUNKS):
            cols = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
            mask = mask_m[:, None] & ((cols < end) | (chunk < NUM_FULL))
            xhat = (widened(xs[chunk], zero) - mean) * rstd
            if weight_ptr is None:
                g = widened(dys[chunk], zero)
            else:
                g = widened(weights[chunk], zero) * widened(dys[chunk], zero)
                if chunk >= NUM_FULL:
                    # Fused with the difference the product would not be rounded, and the only
                    # element of a row would not cancel.
                    g = tl.where(mask, g, 0.0)
            dx = (g - c2 - xhat * c1) * rstd
            if ds_ptr is not None:
                ds = tl.load(ds_ptr + rows * stride_dsm + cols, mask=mask, other=0.0)
                dx += widened(ds, zero)
            store_as(dx_ptr + rows * N + cols, dx, mask)
    for chunk in tl.static_range(NUM_CHUNKS):
        cols = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask_n = (cols < end) | (chunk < NUM_FULL)
        part = group
        if weight_ptr is not None:
            tl.store(parts_ptr + part * N + cols, tl.sum(dw[chunk], 0)[None, :], mask=mask_n)
            part = num_groups + group
        if HAS_BIAS:
            tl.store(parts_ptr + part * N + cols, tl.sum(db[chunk], 0)[None, :], mask=mask_n)


@triton.jit
def _norm_sum_parts_kernel(
    parts_ptr, dw_ptr, db_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    """dw and db [N], the sums of their P parts each, always in the same order.

    Grid: cdiv(N, BLOCK_N), how many of dw and db there are. Reads parts, float32: [P, N] of dw if
    dw_ptr is not None, then [P, N] of db. A program sums BLOCK_N columns, BLOCK_P rows at a time.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    total = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    which = tl.program_id(1).to(tl.int64)
    for start in range(0, P, BLOCK_P):
        offs_p = which * P + start + tl.arange(0, BLOCK_P)
        mask = (offs_p[:, None] < (which + 1) * P) & mask_n[None, :]
        total += tl.load(parts_ptr + offs_p[:, None] * N + offs_n[None, :], mask=mask, other=0.0)
    total = tl.sum(total, 0)
    if dw_ptr is None:
        store_as(db_ptr + offs_n, total, mask_n)
    elif which == 0:
        store_as(dw_ptr + offs_n, total, mask_n)
    elif db_ptr is not None:
        store_as(db_ptr + offs_n, total, mask_n)


@planned
def norm_backward(
    configs: tuple[Configs, ...],
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    stats: torch.Tensor | None,
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    layer: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of `norm_forward`, of the dtypes of what they belong to.

    configs: as `backward_configs` returns them. x: what was normalized, [..., N]; weight, bias: [N]
    or None; stats: as the forward pass left them; dy: the gradient of y; ds: that of the sum, or
    None; layer: whether it was a layer norm. Returns dx (that of the residual too), dw and db, each
    None if there is no such vector.
    """
    dx, dw, db = empty(x), None, None
    if weight is not None:
        weight = weight.contiguous()
        dw = empty(weight)
    if bias is not None:
        db = empty(bias)
    n, elements = x.shape[-1], x.numel()
    if elements == 0:
        return dx, None if dw is None else dw.zero_(), None if db is None else db.zero_()
    m, itemsize, device = elements // n, x.element_size(), x.device
    x, stride_xm = spaced(x, n)
    dy, stride_dym = spaced(dy, n)
    stride_dsm = 0
    if ds is not None:
        ds, stride_dsm = spaced(ds, n)
    rows, sums_of_rows, tiles, sum_parts = configs
    vectors, parts = (weight is not None) + (bias is not None), None
    config = rows.pick(device, n=n, itemsize=itemsize)
    groups, block, chunks, full = row_plan(n, itemsize, config, device)
    if groups:
        splits, programs = config["NUM_SPLITS"], min(-(-m // config["BLOCK_M"]), groups)
        if vectors:
            parts = empty(x, (vectors, programs, n), torch.float32)
        slots = unsaid(m, splits, device) if splits > 1 else None
        launch(
            _norm_backward_row_kernel, (programs * splits,),
            x_ptr=x, dy_ptr=dy, ds_ptr=ds, weight_ptr=weight, stats_ptr=stats, dx_ptr=dx,
            parts_ptr=parts, slots_ptr=slots, stride_xm=stride_xm, stride_dym=stride_dym,
            stride_dsm=stride_dsm, M=m, N=n, IS_LAYER_NORM=layer, HAS_BIAS=bias is not None,
            NUM_CHUNKS=chunks, NUM_FULL=full, BLOCK_N=block, **config,
        )  # fmt: skip
    else:
        config = sums_of_rows.pick(device, n=n, itemsize=itemsize)
        sums = empty(x, (1 + layer, m, SPLITS), torch.float32)
        launch(
            _norm_backward_sums_kernel, (-(-m // config["BLOCK_M"]), SPLITS),
            x_ptr=x, dy_ptr=dy, weight_ptr=weight, stats_ptr=stats, sums_ptr=sums,
            stride_xm=stride_xm, stride_dym=stride_dym, M=m, N=n,
            IS_LAYER_NORM=layer, EVEN=n % config["BLOCK_N"] == 0, SPLITS=SPLITS, **config,
        )  # fmt: skip
        config = tiles.pick(device, n=n, itemsize=itemsize)
        columns = -(-n // config["BLOCK_N"])
        programs = -(-TILE_PROGRAMS * sm_count(device) // columns)
        programs = min(programs, -(-m // config["BLOCK_M"]))
        if vectors:
            parts = empty(x, (vectors, programs, n), torch.float32)
        launch(
            _norm_backward_tile_kernel, (columns, programs),
            x_ptr=x, dy_ptr=dy, ds_ptr=ds, weight_ptr=weight, stats_ptr=stats, sums_ptr=sums,
            dx_ptr=dx, parts_ptr=parts, stride_xm=stride_xm, stride_dym=stride_dym,
            stride_dsm=stride_dsm, M=m, N=n, IS_LAYER_NORM=layer, HAS_BIAS=bias is not None,
            EVEN=n % config["BLOCK_N"] == 0, SPLITS=SPLITS, **config,
        )  # fmt: skip
    if vectors:
        shares = next((most for most in SHARES if programs <= most), SHARES[-1])
        config = sum_parts.pick(device, n=n, itemsize=itemsize, shares=shares)
        launch(
            _norm_sum_parts_kernel, (-(-n // config["BLOCK_N"]), vectors),
            parts_ptr=parts, dw_ptr=dw, db_ptr=db, P=programs, N=n, **config,
        )  # fmt: skip
    return dx, dw, db


def row_plan(
    n: int, itemsize: int, config: Config, device: torch.device
) -> tuple[int, int, int, int]:
    """Return how `_norm_backward_row_kernel` cuts rows of n: groups, block, chunks, full chunks.

    groups: how many rows, or tiles of them, are worked on at a time; 0 if the row fits neither the
    registers nor the shared memory of its programs, or if these may not wait for each other. x and
    dy are read once if it is not 0.
    """
    splits = config["NUM_SPLITS"]
    block = _block(n, splits)
    chunks, full = chunks_of(n, splits, block)
    held = chunks * block * itemsize
    # By the rule two rows of x, dy and ds are on their way.
    fits = held <= ROW_BYTES and 6 * held <= shared_bytes(device)
    if not fits or (splits > 1 and not may_wait(device, splits)):
        return 0, block, chunks, full
    return config["PER_SM"] * sm_count(device) // splits, block, chunks, full


def _block(n, splits):
    """Return the columns of a chunk: a whole row or split if it is short or a power of two, else a
    quarter or an eighth of the next power of two.

    Eighths fit more closely, so they leave registers for masks. Unaligned rows need these most:
    each of their numbers of 16 bits comes in a register of its own.
    """
    span = span_of(n, splits)
    # Two columns at least: a mask that is a constant keeps no product from fusing.
    power = max(2, 1 << (span - 1).bit_length())
    if n == splits * power or n <= UNDIVIDED:
        return power
    closer = -(-span // (power // 8)) % 2
    return power // (8 if closer or n % ALIGNED_ROW else 4)

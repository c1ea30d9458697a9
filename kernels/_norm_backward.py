"""Backward pass of layer norm and RMS norm: dx, and the sums over rows that are dw and db.

With h = (x - mean) rstd (RMS norm: x rstd) and g = w dy: dx = rstd (g - h mean(g h) - mean g) + ds,
dw = sum of dy h over the rows, db = sum of dy; the terms mean g and db are those of a layer norm,
ds is the gradient of the fused sum. A fixed number of programs share the rows, read each
once while the next are on their way to shared memory, and keep their share of dw and db in
registers. Rows beyond ROW_BYTES have several programs, each of which holds the same columns of
many rows; they take the sums along a row together (`_exchange.py`). Where rows do not divide so, or
programs may not wait for each other, x and dy are read twice (`_norm_backward_twice.py`). A last
kernel adds the shares in a fixed order, so the result is the same in each run. The two-stage sum
follows the layer norm tutorial of Triton, without its locks.
"""

import torch
import triton
import triton.language as tl

from kernels._device import shared_bytes, sm_count
from kernels._exchange import parts_together, side_by_side, unsaid
from kernels._launch import launch
from kernels._norm_backward_twice import (
    SPLITS,
    TILE,
    TILE_CANDIDATES,
    TILE_PROGRAMS,
    _norm_backward_sums_kernel,
    _norm_backward_tile_kernel,
)
from kernels._norm_forward import add_pairs, spaced
from kernels._plan import empty, planned
from kernels._tile import store_as, widened, zero_after
from kernels._tuned import Config, Configs

# What a program holds of a row at most, with its share of dw and db.
ROW_BYTES = 32768
# The longest row that is kept whatever its length, in one block.
UNDIVIDED = 8192
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


def _row_config(rows, stages, programs, holders, warps):
    return {
        "BLOCK_M": rows, "STAGES": stages, "PER_SM": programs, "HOLDERS": holders,
        "num_warps": warps,
    }  # fmt: skip


ROW_CANDIDATES = (
    *(
        _row_config(rows, stages, programs, 1, warps)
        for rows, warps in ((1, 4), (1, 8), (1, 16), (2, 8), (4, 4), (4, 8), (8, 4))
        for stages, programs in ((1, 4), (3, 1), (3, 2))
    ),
    *(
        _row_config(1, 3, programs, holders, warps)
        for holders in (2, 4, 8, 16, 32, 64)
        for warps, programs in ((8, 1), (8, 2), (16, 1))
    ),
)
SUM_CANDIDATES = tuple(
    {"BLOCK_P": rows, "BLOCK_N": columns, "num_warps": 4}
    for rows, columns in ((32, 32), (64, 32), (128, 16), (256, 8))
)
# The most programs that hold a row between them. A layer norm has them hold rows of up to
# SHARED_ROW_BYTES: of longer ones db would take registers that it has not.
MOST_HOLDERS = 64
SHARED_ROW_BYTES = 65536
# How many shares of dw there are at most; more than the last make no difference to a tile.
SHARES = (1, 2, 4, 8, 16, 32, 64, 128)
# Shared memory for rows on their way, a little less than an H200 has.
SHARED_BYTES = 220000


def backward_configs(
    family: str, tile: Config = TILE, longest: float = SHARED_ROW_BYTES
) -> tuple[Configs, Configs, Configs, Configs]:
    """The tiles of rows, of the sums along rows, of tiles and of shares, for a family's table;
    `tile` is the rule of the second and the third, programs share rows of up to `longest` bytes."""

    def choose_row(n, itemsize):
        if ROW_BYTES < n * itemsize <= longest:
            holders = 1 << (-(-n * itemsize // ROW_BYTES) - 1).bit_length()
            return _row_config(1, 3, 1, min(holders, MOST_HOLDERS), 16)
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
    held = n // candidate["HOLDERS"]
    if (n * itemsize > ROW_BYTES) != (candidate["HOLDERS"] > 1) or held * itemsize > ROW_BYTES:
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
    CENTRED: tl.constexpr, EVEN: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr, PER_SM: tl.constexpr, HOLDERS: tl.constexpr,
):  # fmt: skip
    holder = tl.program_id(0) % HOLDERS
    begin = holder * CHUNKS * BLOCK_N
    group = (tl.program_id(0) // HOLDERS).to(tl.int64)
    groups = tl.num_programs(0) // HOLDERS
    dw, db, weights = (), (), ()
    for chunk in tl.static_range(CHUNKS):
        offs = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        weights += (tl.load(weight_ptr + offs, mask=(offs < N) | EVEN, other=0.0),)
        dw += (tl.zeros((BLOCK_M, BLOCK_N), tl.float32),)
        db += (tl.zeros((BLOCK_M, BLOCK_N), tl.float32),)
    # Rows in turn, so that all programs read one region of memory. Rows of 16 bits that several
    # hold are faster in a range for each group, why is not known; short rows stay in one as well.
    if BLOCK_M == 1 and (HOLDERS == 1 or x_ptr.dtype.element_ty.primitive_bitwidth == 32):
        begin_m, last, step = group, M, groups
    else:
        share = tl.cdiv(tl.cdiv(M, BLOCK_M), groups) * BLOCK_M
        begin_m, last, step = group * share, tl.minimum((group + 1) * share, M), BLOCK_M
    for start in tl.range(begin_m, last, step, num_stages=STAGES):
        offs_m = start + tl.arange(0, BLOCK_M)
        rows = offs_m[:, None]
        mask_m = (offs_m < M) | (BLOCK_M == 1)
        xs, dys = (), ()
        for chunk in tl.static_range(CHUNKS):
            offs = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
            mask = mask_m[:, None] & ((offs < N) | EVEN)
            xs += (tl.load(x_ptr + rows * stride_xm + offs, mask=mask, other=0.0),)
            dys += (tl.load(dy_ptr + rows * stride_dym + offs, mask=mask, other=0.0),)
        rstd = tl.load(stats_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        mean = 0.0
        if CENTRED:
            mean = tl.load(stats_ptr + M + offs_m, mask=mask_m, other=0.0)[:, None]
        lane_along = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        lane_level = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        old_dw, old_db = dw, db
        dw, db = (), ()
        for chunk in tl.static_range(CHUNKS):
            hat = (xs[chunk].to(tl.float32) - mean) * rstd
            dy = dys[chunk].to(tl.float32)
            g = widened(weights[chunk], zero_after(tl.cast(start, tl.int32))) * dy
            lane_along += g * hat
            dw += (old_dw[chunk] + dy * hat,)
            if CENTRED:
                lane_level += g
                db += (old_db[chunk] + dy,)
            else:
                db += (old_db[chunk],)
        if CENTRED:
            along, level = tl.reduce((lane_along, lane_level), 1, add_pairs)
        else:
            along = tl.sum(lane_along, 1)
            level = tl.zeros((BLOCK_M,), tl.float32)
        if HOLDERS > 1:
            alongs, levels = parts_together(
                slots_ptr + start * (2 * HOLDERS), holder, tl.sum(along, 0), tl.sum(level, 0),
                HOLDERS,
            )  # fmt: skip
            along = tl.sum(alongs, 0) + tl.zeros((BLOCK_M,), tl.float32)
            level = tl.sum(levels, 0) + tl.zeros((BLOCK_M,), tl.float32)
        zero = zero_after(along)[:, None]
        along = (along / N)[:, None]
        level = (level / N)[:, None]
        for chunk in tl.static_range(CHUNKS):
            offs = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
            mask = mask_m[:, None] & ((offs < N) | EVEN)
            hat = (widened(xs[chunk], zero) - mean) * rstd
            g = widened(weights[chunk], zero) * widened(dys[chunk], zero)
            if not EVEN:
                # Fused with the difference it would not be rounded, and the only element of a row
                # would not cancel.
                g = tl.where(mask, g, 0.0)
            dx = (g - level - hat * along) * rstd
            if ds_ptr is not None:
                ds = tl.load(ds_ptr + rows * stride_dsm + offs, mask=mask, other=0.0)
                dx += widened(ds, zero)
            store_as(dx_ptr + rows * N + offs, dx, mask)
    for chunk in tl.static_range(CHUNKS):
        offs = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = (offs < N) | EVEN
        tl.store(parts_ptr + group * N + offs, tl.sum(dw[chunk], 0)[None, :], mask=mask)
        if CENTRED:
            total = tl.sum(db[chunk], 0)[None, :]
            tl.store(parts_ptr + (groups + group) * N + offs, total, mask=mask)


@triton.jit
def _norm_sum_parts_kernel(
    parts_ptr, dw_ptr, db_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    total = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    which = tl.program_id(1).to(tl.int64)
    for start in range(0, P, BLOCK_P):
        offs_p = which * P + start + tl.arange(0, BLOCK_P)
        mask = (offs_p[:, None] < (which + 1) * P) & mask_n[None, :]
        total += tl.load(parts_ptr + offs_p[:, None] * N + offs_n[None, :], mask=mask, other=0.0)
    total = tl.sum(total, 0)
    if which == 0:
        store_as(dw_ptr + offs_n, total, mask_n)
    elif db_ptr is not None:
        store_as(db_ptr + offs_n, total, mask_n)


@planned
def norm_backward(
    configs: tuple[Configs, ...],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stats: torch.Tensor | None,
    dy: torch.Tensor,
    ds: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of `norm_forward`, of the same dtypes as what they belong to.

    configs: as `backward_configs` returns them. x: what was normalized, [..., N]; weight: [N];
    bias: [N] or None; stats: as the forward pass left them; dy: the gradient of y; ds: that of the
    sum, or None. Returns dx (that of the residual too), dw, and db or None.
    """
    weight, centred = weight.contiguous(), bias is not None
    dx, dw, db = empty(x), empty(weight), empty(bias) if centred else None
    n, elements = x.shape[-1], x.numel()
    if elements == 0:
        return dx, dw.zero_(), db.zero_() if centred else None
    m, itemsize, device = elements // n, x.element_size(), x.device
    x, stride_xm = spaced(x, n)
    dy, stride_dym = spaced(dy, n)
    stride_dsm = 0
    if ds is not None:
        ds, stride_dsm = spaced(ds, n)
    rows, sums_of_rows, tiles, sum_parts = configs
    config = rows.pick(device, n=n, itemsize=itemsize)
    groups, held, block = _shares(n, itemsize, config, device)
    if groups:
        holders, programs = config["HOLDERS"], min(-(-m // config["BLOCK_M"]), groups)
        parts = empty(x, (1 + centred, programs, n), torch.float32)
        slots = unsaid(m, holders, device) if holders > 1 else None
        launch(
            _norm_backward_row_kernel, (programs * holders,),
            x_ptr=x, dy_ptr=dy, ds_ptr=ds, weight_ptr=weight, stats_ptr=stats, dx_ptr=dx,
            parts_ptr=parts, slots_ptr=slots, stride_xm=stride_xm, stride_dym=stride_dym,
            stride_dsm=stride_dsm, M=m, N=n, CENTRED=centred, EVEN=held % block == 0,
            CHUNKS=-(-held // block), BLOCK_N=block, **config,
        )  # fmt: skip
    else:
        config = sums_of_rows.pick(device, n=n, itemsize=itemsize)
        sums = empty(x, (1 + centred, m, SPLITS), torch.float32)
        launch(
            _norm_backward_sums_kernel, (-(-m // config["BLOCK_M"]), SPLITS),
            x_ptr=x, dy_ptr=dy, weight_ptr=weight, stats_ptr=stats, sums_ptr=sums,
            stride_xm=stride_xm, stride_dym=stride_dym, M=m, N=n,
            CENTRED=centred, EVEN=n % config["BLOCK_N"] == 0, SPLITS=SPLITS, **config,
        )  # fmt: skip
        config = tiles.pick(device, n=n, itemsize=itemsize)
        columns = -(-n // config["BLOCK_N"])
        programs = -(-TILE_PROGRAMS * sm_count(device) // columns)
        programs = min(programs, -(-m // config["BLOCK_M"]))
        parts = empty(x, (1 + centred, programs, n), torch.float32)
        launch(
            _norm_backward_tile_kernel, (columns, programs),
            x_ptr=x, dy_ptr=dy, ds_ptr=ds, weight_ptr=weight, stats_ptr=stats, sums_ptr=sums,
            dx_ptr=dx, parts_ptr=parts, stride_xm=stride_xm, stride_dym=stride_dym,
            stride_dsm=stride_dsm, M=m, N=n, CENTRED=centred, EVEN=n % config["BLOCK_N"] == 0,
            SPLITS=SPLITS, **config,
        )  # fmt: skip
    shares = next((most for most in SHARES if programs <= most), SHARES[-1])
    config = sum_parts.pick(device, n=n, itemsize=itemsize, shares=shares)
    launch(
        _norm_sum_parts_kernel, (-(-n // config["BLOCK_N"]), 1 + centred),
        parts_ptr=parts, dw_ptr=dw, db_ptr=db, P=programs, N=n, **config,
    )  # fmt: skip
    return dx, dw, db


def _shares(n, itemsize, config, device):
    """How many rows are held at a time, 0 where they cannot be; the columns that a program holds of
    one, and the elements of a block of them."""
    holders = config["HOLDERS"]
    held = -(-n // holders)
    whole, block = _blocks(held, UNDIVIDED if holders == 1 else 0)
    # By the rule two rows of each tensor are on their way.
    fits = held * itemsize <= ROW_BYTES and 6 * held * itemsize <= shared_bytes(device)
    if not (whole and fits) or (
        holders > 1 and (n % (holders * block) or not side_by_side(device))
    ):
        return 0, held, block
    return config["PER_SM"] * sm_count(device) // holders, held, block


def _blocks(n, undivided):
    """Whether a program may keep n elements of a row, and the elements of a block of them. Where
    more than `undivided` fill no power of two, three blocks do; masks take the registers it would
    need. Of one element a block has two: a mask that is a constant keeps nothing from fusing."""
    power = max(2, 1 << (n - 1).bit_length())
    if n <= undivided or n == power:
        return True, power
    return n % (power // 4) == 0, power // 4

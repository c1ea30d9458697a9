"""Kernels of the backward pass of layer norm and RMS norm that read x and dy twice.

The formulas are those of `_norm_backward.py`. Where nothing else fits, one kernel takes mean(g h)
and mean g of all rows, and a second one computes dx, dw and db tile by tile: 10 bytes an element of
16 bits where 6 are needed.
"""

import triton
import triton.language as tl

from kernels._tile import load_f32, store_as

# Programs that share the columns of a row where sums along it are taken.
SPLITS = 8
# Programs for each multiprocessor that share the columns and the rows.
TILE_PROGRAMS = 8
TILE_CANDIDATES = tuple(
    {"BLOCK_M": rows, "BLOCK_N": columns, "STAGES": stages, "num_warps": 4}
    for rows, columns in ((4, 512), (8, 256), (8, 512), (16, 256))
    for stages in (1, 3)
)
# The fastest of them for a layer norm, and for an RMS norm, whose sums take fewer registers.
TILE, RMS_TILE = (
    {"BLOCK_M": 8, "BLOCK_N": columns, "STAGES": stages, "num_warps": 4}
    for columns, stages in ((256, 3), (512, 1))
)


@triton.jit
def _norm_backward_sums_kernel(
    x_ptr, dy_ptr, weight_ptr, stats_ptr, sums_ptr, stride_xm, stride_dym, M, N,
    CENTRED: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    rstd = tl.load(stats_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
    along = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    level = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if CENTRED:
        mean = tl.load(stats_ptr + M + offs_m, mask=mask_m, other=0.0)[:, None]
    span = tl.cdiv(tl.cdiv(N, BLOCK_N), SPLITS) * BLOCK_N
    last = tl.minimum((split + 1) * span, N)
    for start in tl.range(split * span, last, BLOCK_N, num_stages=STAGES):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = (offs_n < N) | EVEN
        mask = mask_m[:, None] & mask_n[None, :]
        x = load_f32(x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :], mask)
        dy = load_f32(dy_ptr + offs_m[:, None] * stride_dym + offs_n[None, :], mask)
        g = load_f32(weight_ptr + offs_n, mask_n)[None, :] * dy
        if CENTRED:
            x -= mean
            level += g
        along += g * (x * rstd)
    tl.store(sums_ptr + offs_m * SPLITS + split, tl.sum(along, 1), mask=mask_m)
    if CENTRED:
        offs = (M + offs_m) * SPLITS + split
        tl.store(sums_ptr + offs, tl.sum(level, 1), mask=mask_m)


@triton.jit
def _norm_backward_tile_kernel(
    x_ptr, dy_ptr, ds_ptr, weight_ptr, stats_ptr, sums_ptr, dx_ptr, parts_ptr,
    stride_xm, stride_dym, stride_dsm, M, N,
    CENTRED: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = (offs_n < N) | EVEN
    splits = tl.arange(0, SPLITS)
    weight = load_f32(weight_ptr + offs_n, mask_n)[None, :]
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    share = tl.cdiv(tl.cdiv(M, BLOCK_M), tl.num_programs(1)) * BLOCK_M
    begin = tl.program_id(1).to(tl.int64) * share
    end = tl.minimum(begin + share, M)
    for start in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        offs_m = start + tl.arange(0, BLOCK_M)
        rows = offs_m[:, None]
        mask_m = offs_m < end
        mask = mask_m[:, None] & mask_n[None, :]
        x = load_f32(x_ptr + rows * stride_xm + offs_n[None, :], mask)
        dy = load_f32(dy_ptr + rows * stride_dym + offs_n[None, :], mask)
        rstd = tl.load(stats_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        sums = sums_ptr + rows * SPLITS + splits[None, :]
        along = tl.sum(tl.load(sums, mask=mask_m[:, None], other=0.0), 1)[:, None] / N
        if CENTRED:
            x -= tl.load(stats_ptr + M + offs_m, mask=mask_m, other=0.0)[:, None]
            db += dy
        hat = x * rstd
        dx = weight * dy - hat * along
        if CENTRED:
            sums += M * SPLITS
            dx -= tl.sum(tl.load(sums, mask=mask_m[:, None], other=0.0), 1)[:, None] / N
        dx *= rstd
        if ds_ptr is not None:
            dx += load_f32(ds_ptr + rows * stride_dsm + offs_n[None, :], mask)
        store_as(dx_ptr + rows * N + offs_n[None, :], dx, mask)
        dw += dy * hat
    parts_ptr += tl.program_id(1).to(tl.int64) * N + offs_n
    tl.store(parts_ptr, tl.sum(dw, 0), mask=mask_n)
    if CENTRED:
        tl.store(parts_ptr + tl.num_programs(1).to(tl.int64) * N, tl.sum(db, 0), mask=mask_n)

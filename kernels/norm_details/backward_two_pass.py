"""Kernels of the backward pass of layer norm and RMS norm that read x and dy twice.

They are right for rows of any length. One kernel computes parts of the sums c1 and c2 of all rows.
A second one computes dx, dw and db tile by tile. They move 10 bytes for each element of 16 bits;
kernels that read x and dy once move 6. The formulas are those of `norm_details/gradients.py`.
"""

import triton
import triton.language as tl

from .._triton.memory import load_f32, store_as
from .statistics import with_offset


@triton.jit
def _norm_backward_sums_kernel(
    x_ptr, dy_ptr, weight_ptr, stats_ptr, sums_ptr, stride_xm, stride_dym, M, N,
    IS_LAYER_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, EVEN_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Parts of c1 N = sum of g xhat along each row, and of c2 N = sum of g in a layer norm.

    Grid: cdiv(M, BLOCK_M), NUM_SPLITS. A program owns BLOCK_M rows of one split of the columns, in
    blocks of BLOCK_N.

    Reads x, dy [M, N], in rows stride_xm and stride_dym apart, w [N] if its pointer is not None,
    and stats (rstd [M], then mean [M] of a layer norm). Writes sums, float32 [1 or 2, M,
    NUM_SPLITS].

    EVEN_N: N is a multiple of BLOCK_N, so columns need no mask. NUM_SPLITS: a power of two.
    STAGES: blocks loaded ahead, plus one.
    """
    split_id = tl.program_id(1)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    rstd = tl.load(stats_ptr + offs_m, mask=mask_m, other=0.0)[:, None]  # [BLOCK_M, 1]
    c1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    c2 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if IS_LAYER_NORM:
        mean = tl.load(stats_ptr + M + offs_m, mask=mask_m, other=0.0)[:, None]
    span = tl.cdiv(tl.cdiv(N, BLOCK_N), NUM_SPLITS) * BLOCK_N
    last = tl.minimum((split_id + 1) * span, N)
    for start in tl.range(split_id * span, last, BLOCK_N, num_stages=STAGES):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = (offs_n < N) | EVEN_N
        mask = mask_m[:, None] & mask_n[None, :]
        x = load_f32(x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :], mask)
        g = load_f32(dy_ptr + offs_m[:, None] * stride_dym + offs_n[None, :], mask)
        if weight_ptr is not None:
            weight = load_f32(weight_ptr + offs_n, mask_n)[None, :]
            g = with_offset(weight, UNIT_OFFSET) * g
        if IS_LAYER_NORM:
            x -= mean
            c2 += g
        c1 += g * (x * rstd)
    tl.store(sums_ptr + offs_m * NUM_SPLITS + split_id, tl.sum(c1, 1), mask=mask_m)
    if IS_LAYER_NORM:
        offs = (M + offs_m) * NUM_SPLITS + split_id
        tl.store(sums_ptr + offs, tl.sum(c2, 1), mask=mask_m)


@triton.jit
def _norm_backward_tile_kernel(
    x_ptr, dy_ptr, ds_ptr, weight_ptr, stats_ptr, sums_ptr, dx_ptr, dr_ptr, parts_ptr,
    stride_xm, stride_dym, stride_dsm, M, N,
    IS_LAYER_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx of all rows from the sums along them, and for each program its partial sums of dw and db.

        dx = rstd (g - xhat c1 - c2) + ds, with xhat = (x - mean) rstd and g = w dy
        dw = sum over rows of dy xhat, db = sum over rows of dy

    Grid: cdiv(N, BLOCK_N), programs. A program owns BLOCK_N columns of a range of rows, BLOCK_M
    rows at a time.

    Reads x, dy (and ds) [M, N], in rows stride_xm, stride_dym, stride_dsm apart, w [N], stats, and
    sums as `_norm_backward_sums_kernel` wrote them. Writes dx [M, N], the same to dr unless its
    pointer is None, and parts, float32: dw [programs, N] if there is a weight, then db [programs,
    N] if HAS_BIAS.

    EVEN_N: N is a multiple of BLOCK_N, so columns need no mask. NUM_SPLITS: that of sums. STAGES:
    tiles loaded ahead, plus one.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = (offs_n < N) | EVEN_N
    splits = tl.arange(0, NUM_SPLITS)
    if weight_ptr is not None:
        weight = with_offset(load_f32(weight_ptr + offs_n, mask_n)[None, :], UNIT_OFFSET)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    per_program = tl.cdiv(tl.cdiv(M, BLOCK_M), tl.num_programs(1)) * BLOCK_M
    begin = tl.program_id(1).to(tl.int64) * per_program
    end = tl.minimum(begin + per_program, M)
    for start in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        offs_m = start + tl.arange(0, BLOCK_M)
        rows = offs_m[:, None]  # [BLOCK_M, 1]
        mask_m = offs_m < end
        mask = mask_m[:, None] & mask_n[None, :]
        x = load_f32(x_ptr + rows * stride_xm + offs_n[None, :], mask)
        dy = load_f32(dy_ptr + rows * stride_dym + offs_n[None, :], mask)
        rstd = tl.load(stats_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        sums = sums_ptr + rows * NUM_SPLITS + splits[None, :]  # [BLOCK_M, NUM_SPLITS]
        c1 = tl.sum(tl.load(sums, mask=mask_m[:, None], other=0.0), 1)[:, None] / N
        if IS_LAYER_NORM:
            x -= tl.load(stats_ptr + M + offs_m, mask=mask_m, other=0.0)[:, None]
        if HAS_BIAS:
            db += dy
        xhat = x * rstd
        dx = dy - xhat * c1 if weight_ptr is None else weight * dy - xhat * c1
        if IS_LAYER_NORM:
            sums += M * NUM_SPLITS
            dx -= tl.sum(tl.load(sums, mask=mask_m[:, None], other=0.0), 1)[:, None] / N
        dx *= rstd
        if ds_ptr is not None:
            dx += load_f32(ds_ptr + rows * stride_dsm + offs_n[None, :], mask)
        store_as(dx_ptr + rows * N + offs_n[None, :], dx, mask)
        if dr_ptr is not None:
            store_as(dr_ptr + rows * N + offs_n[None, :], dx, mask)
        if weight_ptr is not None:
            dw += dy * xhat
    program = tl.program_id(1).to(tl.int64)
    if weight_ptr is not None:
        tl.store(parts_ptr + program * N + offs_n, tl.sum(dw, 0), mask=mask_n)
        program += tl.num_programs(1)
    if HAS_BIAS:
        tl.store(parts_ptr + program * N + offs_n, tl.sum(db, 0), mask=mask_n)

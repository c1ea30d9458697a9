"""Forward pass of layer norm and RMS norm, with or without a residual, for rows of any length.

A row of up to ROW_BYTES stays in registers in the dtype in which it came, in chunks, and is
widened anew for each use: a second copy in float32 would double the registers. The weights are
loaded after the statistics, so that they hold no registers before. Longer rows are walked twice,
the second time out of a cache; their means and squares run along lane by lane by the rule of
Welford (1962) and meet by that of Chan, Golub and LeVeque (1979).
"""

import torch
import triton
import triton.language as tl

from kernels._launch import launch
from kernels._layout import rows_of
from kernels._tile import load_f32_hinted, store_as, widened, zero_after
from kernels._tuned import Configs

# The longest row that one program keeps in its registers.
ROW_BYTES = 131072
ACCESS_BYTES = 16
MOST_CHUNKS = 16
# (longest row, rows of a program, most elements of a chunk, warps)
ROW_TILES = (
    (128, 8, 128, 4),
    (256, 4, 256, 4),
    (512, 2, 512, 4),
    (1024, 2, 1024, 4),
    (8192, 1, 2048, 4),
    (16384, 1, 4096, 8),
    (32768, 1, 8192, 16),
    (65536, 1, 8192, 32),
)
ROW_CANDIDATES = tuple(
    {"BLOCK_M": rows, "BLOCK_N": block, "num_warps": warps}
    for rows, blocks in ((1, (512, 1024, 2048, 4096, 8192, 16384)), (2, (1024, 2048)))
    for block in blocks
    for warps in (2, 4, 8, 16, 32)
    if 8 <= rows * block // (32 * warps) <= 32
)
LOOP_CANDIDATES = tuple(
    {"BLOCK_N": block, "num_warps": warps}
    for block in (2048, 4096, 8192, 16384)
    for warps in (4, 8, 16, 32)
    if 4 <= block // (32 * warps) <= 32
)


def forward_configs(family: str) -> tuple[Configs, Configs]:
    """The tiles of rows in registers and of rows walked in blocks, for the table of a family."""
    row = Configs(_norm_row_kernel, ROW_CANDIDATES, _choose_row, _suits_row, family)
    return row, Configs(_norm_loop_kernel, LOOP_CANDIDATES, _choose_loop, family=family)


def _choose_row(n, itemsize):
    rows, block, warps = next(tile for limit, *tile in ROW_TILES if n <= limit)
    block = min(block, max(16, triton.next_power_of_2(n)))
    return {"BLOCK_M": rows, "BLOCK_N": block, "num_warps": warps}


def _choose_loop(n, itemsize):
    return {"BLOCK_N": 8192, "num_warps": 16}


def _suits_row(candidate, n, itemsize):
    """Whether the tiles are full, and a thread holds 4 to 128 bytes a row: 32 registers."""
    rows, block = candidate["BLOCK_M"], candidate["BLOCK_N"]
    chunks = -(-n // block)
    held = rows * chunks * block * itemsize / (32 * candidate["num_warps"])
    whole = block <= max(128, triton.next_power_of_2(n)) and (rows == 1 or chunks == 1)
    return whole and chunks <= MOST_CHUNKS and ACCESS_BYTES <= held <= 128


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _norm_row_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr,
    stride_xm, stride_rm, M, N, eps,
    CENTRED: tl.constexpr, EVEN: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = (offs_m < M) | (BLOCK_M == 1)
    rows = offs_m[:, None]
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        offs = (chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = mask_m[:, None] & ((offs < N) | EVEN)
        x = tl.load(
            x_ptr + rows * stride_xm + offs, mask=mask, other=0.0, eviction_policy="evict_first"
        )
        if residual_ptr is not None:
            x = x.to(tl.float32) + load_f32_hinted(
                residual_ptr + rows * stride_rm + offs, mask, "evict_first"
            )
            x = x.to(x_ptr.dtype.element_ty)
            tl.store(total_ptr + rows * N + offs, x, mask=mask)
        chunks = chunks + (x,)  # noqa: RUF005
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if CENTRED:
        for chunk in tl.static_range(CHUNKS):
            first += chunks[chunk].to(tl.float32)
        mean = tl.sum(first, 1) / N
        zero = zero_after(mean)[:, None]
        first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            offs = (chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
            centred = widened(chunks[chunk], zero) - mean[:, None]
            centred = tl.where((offs < N) | EVEN, centred, 0.0)
            first += centred
            second += centred * centred
        # What rounding took from the mean would be a deviation in a row that hardly varies.
        lost, squares = tl.reduce((first, second), 1, add_pairs)
        lost /= N
        mean += lost
        square = squares / N - lost * lost
        if stats_ptr is not None:
            tl.store(stats_ptr + M + offs_m, mean, mask=mask_m)
    else:
        for chunk in tl.static_range(CHUNKS):
            x = chunks[chunk].to(tl.float32)
            first += x * x
        square = tl.sum(first, 1) / N
    rstd = tl.rsqrt(square + tl.cast(eps, tl.float32))
    if stats_ptr is not None:
        tl.store(stats_ptr + offs_m, rstd, mask=mask_m)
    zero = zero_after(rstd)[:, None]
    for chunk in tl.static_range(CHUNKS):
        offs_n = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = (offs_n < N) | EVEN
        x = widened(chunks[chunk], zero)
        weight = load_f32_hinted(weight_ptr + offs_n, mask_n, "evict_last")[None, :]
        if CENTRED:
            bias = load_f32_hinted(bias_ptr + offs_n, mask_n, "evict_last")[None, :]
            y = (x - mean[:, None]) * rstd[:, None] * weight + bias
        else:
            y = x * rstd[:, None] * weight
        store_as(y_ptr + rows * N + offs_n[None, :], y, mask_m[:, None] & mask_n[None, :])


@triton.jit
def _norm_loop_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr,
    stride_xm, stride_rm, M, N, eps,
    CENTRED: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    if residual_ptr is not None:
        residual_ptr += row * stride_rm
        total_ptr += row * N
    offs_n = tl.arange(0, BLOCK_N)
    # A mean and a sum of squares for each lane; the lanes meet once, after the walk.
    lane_mean = tl.zeros((BLOCK_N,), tl.float32)
    lane_squares = tl.zeros((BLOCK_N,), tl.float32)
    count = 0.0
    for start in range(0, N, BLOCK_N):
        offs = start + offs_n
        mask = (offs < N) | EVEN
        x = load_f32_hinted(x_ptr + offs, mask, "evict_last")
        if residual_ptr is not None:
            x += load_f32_hinted(residual_ptr + offs, mask, "evict_first")
            x = x.to(x_ptr.dtype.element_ty)
            tl.store(total_ptr + offs, x, mask=mask)
            x = x.to(tl.float32)
        if CENTRED:
            count += 1.0
            delta = tl.where(mask, x - lane_mean, 0.0)
            lane_mean += delta * (1.0 / count)
            lane_squares += delta * (x - lane_mean)
        else:
            lane_squares += x * x
    if CENTRED:
        lane_count = (N - offs_n + BLOCK_N - 1) // BLOCK_N
        mean = tl.sum(lane_mean * lane_count, 0) / N
        mean += tl.sum((lane_mean - mean) * lane_count, 0) / N
        apart = lane_mean - mean
        lane_squares += apart * apart * lane_count
        if stats_ptr is not None:
            tl.store(stats_ptr + M + row, mean)
    rstd = tl.rsqrt(tl.sum(lane_squares, 0) / N + tl.cast(eps, tl.float32))
    if stats_ptr is not None:
        tl.store(stats_ptr + row, rstd)
    if residual_ptr is not None:
        # The sum comes back to other threads than those that stored it.
        tl.debug_barrier()
        x_ptr = total_ptr
    for start in range(0, N, BLOCK_N):
        offs = start + offs_n
        mask = (offs < N) | EVEN
        x = load_f32_hinted(x_ptr + offs, mask, "evict_first")
        weight = load_f32_hinted(weight_ptr + offs, mask, "evict_last")
        if CENTRED:
            bias = load_f32_hinted(bias_ptr + offs, mask, "evict_last")
            y = (x - mean) * rstd * weight + bias
        else:
            y = x * rstd * weight
        store_as(y_ptr + offs, y, mask)


def norm_forward(tiles, x, residual, weight, bias, eps, keep):
    """Normalizes the rows of x, or of x + residual where there is one.

    tiles: as `forward_configs` returns them. x, residual: [..., N]; weight: [N]; bias: [N] for a
    layer norm, None for an RMS norm. keep: whether the statistics are wanted. Returns y, the sum
    (None without a residual), both contiguous, and the statistics: rstd, then mean of a layer
    norm, float32 [1 or 2, M], None where not kept.
    """
    n, shape, centred = x.shape[-1], x.shape, bias is not None
    x = rows_of(x)
    m = x.shape[0]
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    total = stats = None
    stride_rm = 0
    if residual is not None:
        residual = rows_of(residual)
        stride_rm = residual.stride(0)
        total = torch.empty(shape, dtype=x.dtype, device=x.device)
    if keep:
        stats = torch.empty((1 + centred, m), dtype=torch.float32, device=x.device)
    if m == 0 or n == 0:
        return y, total, stats
    in_registers = n * x.element_size() <= ROW_BYTES
    row, loop = tiles
    config = (row if in_registers else loop).pick(x.device, n=n, itemsize=x.element_size())
    even = n % config["BLOCK_N"] == 0
    if in_registers:
        launch(
            _norm_row_kernel, (triton.cdiv(m, config["BLOCK_M"]),),
            x_ptr=x, residual_ptr=residual, weight_ptr=weight, bias_ptr=bias, y_ptr=y,
            total_ptr=total, stats_ptr=stats, stride_xm=x.stride(0), stride_rm=stride_rm,
            M=m, N=n, eps=eps, CENTRED=centred, EVEN=even,
            CHUNKS=triton.cdiv(n, config["BLOCK_N"]), **config,
        )  # fmt: skip
    else:
        launch(
            _norm_loop_kernel, (m,),
            x_ptr=x, residual_ptr=residual, weight_ptr=weight, bias_ptr=bias, y_ptr=y,
            total_ptr=total, stats_ptr=stats, stride_xm=x.stride(0), stride_rm=stride_rm,
            M=m, N=n, eps=eps, CENTRED=centred, EVEN=even, **config,
        )  # fmt: skip
    return y, total, stats

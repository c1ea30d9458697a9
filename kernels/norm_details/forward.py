"""Forward pass of layer norm and RMS norm, with or without a residual, for rows of any length.

Three kernels, of which the launcher chooses one by the length of a row. `_norm_forward_loop_kernel`
reads a row twice, the second time out of a cache, and is right for any length.
`_norm_forward_row_kernel` keeps whole rows in registers, in chunks and in the dtype in which they
came, widened anew for each use: a second copy in float32 would double the registers. It loads the
weights after the statistics, so that they hold no registers before. A row that no single program
can keep is split among several (`norm_details/forward_split.py`). Which is the fastest depends on
the length (docs/lab/layer_norm.md); the sums are those of `norm_details/statistics.py`. Only the
last chunks of an uneven row have masks (`norm_details/columns.py`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .._runtime.call_cache import cached_launch
from .._runtime.configs import Configs
from .._runtime.layout import as_rows_2d
from .._triton.exchange import empty_slots, may_wait
from .._triton.memory import load_f32_hinted, opaque_zero, store_as, to_f32_rematerialized
from .checks import check_norm
from .columns import chunks_of
from .forward_split import _norm_forward_split_kernel
from .statistics import (
    head_mean,
    is_far,
    load_input,
    normalized,
    store_statistics,
    sum_chunks,
    sum_lanes,
)

# The longest row that one program keeps in its registers.
ROW_BYTES = 131072
# The shortest row that is worth reading twice.
LOOP_BYTES = 4096
ACCESS_BYTES = 16
MOST_CHUNKS = 8
# Columns at a time if the sums are taken again.
AGAIN = tl.constexpr(1024)


class Tile(NamedTuple):
    """What is chosen for rows of up to `size` bytes: the kernel by how often it reads a row, 1 or
    2, the programs of a row, the rows of a program, the most elements of a chunk, and warps."""

    size: float
    reads: int
    splits: int
    rows: int
    block: int
    warps: int


SHORT_TILES = (
    Tile(256, 1, 1, 8, 128, 4),
    Tile(512, 1, 1, 4, 256, 4),
    Tile(1024, 1, 1, 2, 512, 4),
    Tile(2048, 1, 1, 2, 1024, 4),
    Tile(4096, 1, 1, 1, 2048, 4),
)
LONG_TILES = (
    *(Tile(ROW_BYTES * 2**power, 1, 4 * 2**power, 1, 4096, 8) for power in (0, 1, 2, 3)),
    # No more splits: an H200 has no room for 64 in each of several launches (`may_wait`).
    Tile(ROW_BYTES * 16, 1, 32, 1, 4096, 8),
    Tile(float("inf"), 2, 1, 1, 4096, 16),
)
TILES = (
    *SHORT_TILES,
    Tile(8192, 2, 1, 1, 4096, 8),
    Tile(16384, 1, 1, 1, 2048, 4),
    Tile(32768, 2, 1, 1, 4096, 16),
    Tile(65536, 2, 1, 1, 4096, 32),
    Tile(ROW_BYTES, 1, 1, 1, 8192, 32),
    *LONG_TILES,
)
# An RMS norm reads one vector less, and a residual is read but once. The longest row of 16 warps
# depends on whether there is one.
RMS_TILES, RESIDUAL_TILES = (
    (
        *SHORT_TILES,
        Tile(8192, 2, 1, 1, 2048, 8),
        Tile(16384, 1, 1, 1, 2048, 4),
        Tile(most, 2, 1, 1, 4096, 16),
        Tile(65536, 2, 1, 1, 8192, 32),
        Tile(ROW_BYTES, 1, 1, 1, 16384, 32),
        *LONG_TILES,
    )
    for most in (24576, 32768)
)


def _loop_config(block, warps):
    return {"BLOCK_N": block, "num_warps": warps}


def _row_config(rows, block, warps):
    return {"BLOCK_M": rows, "BLOCK_N": block, "num_warps": warps}


def _split_config(block, splits, warps):
    return {"BLOCK_N": block, "NUM_SPLITS": splits, "num_warps": warps}


LOOP_CANDIDATES = tuple(
    _loop_config(block, warps)
    for block, warps in ((1024, 4), (2048, 8), (4096, 8), (4096, 16), (4096, 32), (8192, 32))
)
ROW_CANDIDATES = tuple(
    _row_config(rows, block, warps)
    for rows in (1, 2, 4, 8)
    for block in (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    for warps in (1, 2, 4, 8, 16, 32)
    if 8 <= rows * block // (32 * warps) <= (64 if block > 1024 else 32)
    and (rows == 1 or rows * block <= (2048 if block <= 1024 else 8192))
)
SPLIT_CANDIDATES = tuple(
    _split_config(block, splits, warps)
    for block, warps in ((2048, 8), (4096, 8), (4096, 16))
    for splits in (2, 4, 8, 16, 32)
)


def tile_of(tiles: tuple[Tile, ...], n: int, itemsize: int) -> Tile:
    """The tile of rows of n elements: the first of `tiles` that is for rows of their size."""
    size = n * itemsize
    for tile in tiles:
        # One program has no registers left for the masks of the longest rows.
        crowded = tile.size == ROW_BYTES and tile.splits == 1 and n % tile.block
        if size <= tile.size and not crowded:
            return tile
    raise ValueError(f"tiles: none for {size} bytes, expected a last one without a limit")


class Forward(NamedTuple):
    """The configurations of the forward kernels of a family, and the rule that chooses a kernel:
    (n, itemsize, residual) -> tile."""

    loop: Configs
    row: Configs
    split: Configs
    rule: object


def forward_configs(
    family: str,
    tiles: tuple[Tile, ...] = TILES,
    residual_tiles: tuple[Tile, ...] = RESIDUAL_TILES,
) -> Forward:
    """Return the tiles of the three kernels, for the table of a family; `tiles` is its rule,
    `residual_tiles` that of rows with a residual."""

    def rule(n, itemsize, residual):
        return tile_of(residual_tiles if residual else tiles, n, itemsize)

    def choose_loop(n, itemsize, residual):
        tile = rule(n, itemsize, residual)
        # A row that is to be split has this kernel too, if programs may not wait for each other.
        tile = tile if tile.reads == 2 else tiles[-1]
        return _loop_config(min(tile.block, _power(n)), tile.warps)

    def choose_row(n, itemsize, residual):
        tile = rule(n, itemsize, residual)
        return _row_config(tile.rows, min(tile.block, _power(n)), tile.warps)

    def choose_split(n, itemsize, residual):
        tile = rule(n, itemsize, residual)
        return _split_config(tile.block, tile.splits, tile.warps)

    return Forward(
        Configs(_norm_forward_loop_kernel, LOOP_CANDIDATES, choose_loop, _suits_loop, family),
        Configs(_norm_forward_row_kernel, ROW_CANDIDATES, choose_row, _suits_row, family),
        Configs(_norm_forward_split_kernel, SPLIT_CANDIDATES, choose_split, _suits_split, family),
        rule,
    )


def _power(n):
    return max(16, 1 << (n - 1).bit_length())


def _suits_loop(candidate, n, itemsize, residual):
    """Whether a row is worth reading twice, in eight blocks at most if it is short."""
    size, block = n * itemsize, candidate["BLOCK_N"]
    return size > LOOP_BYTES and block <= n and (n <= 8 * block or size > ROW_BYTES)


def _suits_row(candidate, n, itemsize, residual):
    """Whether blocks are full, and a thread holds up to 128 bytes: of long rows half that at
    least, of short ones an access."""
    rows, block, warps = candidate.values()
    size, whole = n * itemsize, max(128, _power(n))
    chunks, _ = chunks_of(n, 1, block)
    held = rows * chunks * block * itemsize / (32 * warps)
    full = block == whole if n <= 2048 else 2048 <= block <= whole
    shared = rows == 1 or (chunks == 1 and size <= 8192)
    least = ACCESS_BYTES if size <= 4096 else 64
    fits = size <= ROW_BYTES and chunks <= MOST_CHUNKS
    return fits and full and shared and least <= held <= 128


def _suits_split(candidate, n, itemsize, residual):
    """Whether a thread holds 64 to 128 bytes, and no split is shorter than a block."""
    block, splits, warps = candidate.values()
    chunks, full = chunks_of(n, splits, block)
    held = chunks * block * itemsize / (32 * warps)
    return n * itemsize > 32768 and full > 0 and chunks <= MOST_CHUNKS and 64 <= held <= 128


@triton.jit
def _sums_again(x_ptr, shift, N):
    """The sum of one row about `shift`, and that of its squares; scalars. Rarely needed, so it must
    not cost registers: its tile is small, and its loop is not unrolled."""
    first = tl.zeros((AGAIN,), tl.float32)
    second = tl.zeros((AGAIN,), tl.float32)
    for start in range(0, N, AGAIN):
        cols = start + tl.arange(0, AGAIN)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        apart = tl.where(cols < N, x - shift, 0.0)
        first += apart
        second += apart * apart
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _norm_forward_loop_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr,
    stride_xm, stride_rm, M, N, eps,
    IS_LAYER_NORM: tl.constexpr, EVEN_N: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = w (s - mean) rstd + b with s = x + residual; mean is 0 in an RMS norm. Any N.

    Grid: M. A program owns a row. It reads s in a loop over NUM_CHUNKS blocks of BLOCK_N for the
    statistics, and in a second loop for y, then from a cache if the row is still there.

    Reads x (and the residual) [M, N], in rows stride_xm and stride_rm apart, w and b [N], each
    1 and 0 if its pointer is None. Writes y [M, N], total_ptr (s, [M, N]) if there is a residual,
    and stats (rstd [M], then mean [M] of a layer norm) unless its pointer is None.

    NUM_CHUNKS = cdiv(N, BLOCK_N). EVEN_N: N is a multiple of BLOCK_N, so columns need no mask.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    if residual_ptr is not None:
        residual_ptr += row * stride_rm
        total_ptr += row * N
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    # 1. Mean and variance.
    mean = 0.0
    if IS_LAYER_NORM:
        mean = head_mean(x_ptr, residual_ptr, N)
    # Sums for each lane; the lanes meet once, after the loop. The number of its steps is constant,
    # so the loads of several are on their way at a time.
    first = tl.zeros((1, BLOCK_N), tl.float32)
    second = tl.zeros((1, BLOCK_N), tl.float32)
    for chunk in range(NUM_CHUNKS):
        cols = chunk * BLOCK_N + offs_n
        mask = (cols < N) | EVEN_N
        x = load_input(x_ptr, residual_ptr, cols, cols, mask, "evict_last")
        if residual_ptr is not None:
            tl.store(total_ptr + cols, x, mask=mask)
        apart = x.to(tl.float32)
        if IS_LAYER_NORM:
            apart = tl.where(mask, apart - mean, 0.0)
            first += apart
        second += apart * apart
    first, second = sum_lanes(first, second, IS_LAYER_NORM)
    if residual_ptr is not None:
        # The sum comes back to other threads than those that stored it.
        tl.debug_barrier()
        x_ptr = total_ptr
    if IS_LAYER_NORM:
        first, second = tl.sum(first, 0), tl.sum(second, 0)
        off = first / N
        variance = second / N
        if is_far(off, variance):
            mean += off
            first, second = _sums_again(x_ptr, mean, N)
            off = first / N
            variance = second / N
        mean += off + tl.zeros((1,), tl.float32)
        variance += tl.zeros((1,), tl.float32) - off * off
    else:
        mean = first
        variance = second / N
    offs_m = row + tl.arange(0, 1)
    rstd = store_statistics(stats_ptr, offs_m, offs_m < M, mean, variance, M, eps, IS_LAYER_NORM)
    # 2. Read again, normalize, store.
    for chunk in range(NUM_CHUNKS):
        cols = chunk * BLOCK_N + offs_n
        mask = (cols < N) | EVEN_N
        x = load_f32_hinted(x_ptr + cols, mask, "evict_first")
        y = normalized(x, mean, rstd, weight_ptr, bias_ptr, cols, mask, IS_LAYER_NORM)
        store_as(y_ptr + cols, y, mask)


@triton.jit
def _norm_forward_row_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr,
    stride_xm, stride_rm, M, N, eps,
    IS_LAYER_NORM: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = w (s - mean) rstd + b with s = x + residual; mean is 0 in an RMS norm. s is read once.

    Grid: cdiv(M, BLOCK_M). A program owns BLOCK_M rows. It keeps s in registers, in its dtype, as
    NUM_CHUNKS chunks of BLOCK_N columns.

    Reads x (and the residual) [M, N], in rows stride_xm and stride_rm apart, w and b [N], each
    1 and 0 if its pointer is None. Writes y [M, N], total_ptr (s, [M, N]) if there is a residual,
    and stats (rstd [M], then mean [M] of a layer norm) unless its pointer is None.

    NUM_CHUNKS = cdiv(N, BLOCK_N), 8 at most. NUM_FULL = N // BLOCK_N: the chunks without a mask.
    """
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = (offs_m < M) | (BLOCK_M == 1)
    rows = offs_m[:, None]  # [BLOCK_M, 1]
    # 1. Load the rows.
    chunks = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        cols = (chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]  # [1, BLOCK_N]
        mask = mask_m[:, None] & ((cols < N) | (chunk < NUM_FULL))
        x = load_input(
            x_ptr, residual_ptr, rows * stride_xm + cols, rows * stride_rm + cols, mask, ""
        )
        if residual_ptr is not None:
            tl.store(total_ptr + rows * N + cols, x, mask=mask)
        chunks = chunks + (x,)  # noqa: RUF005
    # 2. Mean and variance, about a shift: the mean of an eighth of the row at least.
    shift = tl.zeros((BLOCK_M,), tl.float32)
    if IS_LAYER_NORM:
        shift = tl.sum(chunks[0].to(tl.float32), 1) / tl.minimum(N, BLOCK_N)
    first, second = sum_chunks(
        chunks, shift, opaque_zero(shift)[:, None], 0, N,
        IS_LAYER_NORM, NUM_CHUNKS, NUM_FULL, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    mean = shift
    variance = second / N
    if IS_LAYER_NORM:
        off = first / N
        mean += off
        variance -= off * off
    rstd = store_statistics(stats_ptr, offs_m, mask_m, mean, variance, M, eps, IS_LAYER_NORM)
    # 3. Normalize and store.
    zero = opaque_zero(rstd)[:, None]
    for chunk in tl.static_range(NUM_CHUNKS):
        cols = (chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask_n = (cols < N) | (chunk < NUM_FULL)
        x = to_f32_rematerialized(chunks[chunk], zero)
        y = normalized(x, mean, rstd, weight_ptr, bias_ptr, cols, mask_n, IS_LAYER_NORM)
        store_as(y_ptr + rows * N + cols, y, mask_m[:, None] & mask_n)


def norm_forward(
    configs: Forward,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    layer: bool,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Normalize the rows of x, or of x + residual if there is one.

    configs: as `forward_configs` returns them. x, residual: [..., N]; weight, bias: [N], or None
    for ones and zeros. layer: whether the mean is taken off, as in a layer norm. keep: whether the
    statistics are wanted. Returns y, the sum (None without a residual), both contiguous, and the
    statistics: rstd, then mean of a layer norm, float32 [1 or 2, M]; None if they are not wanted or
    nothing is normalized. Raises TypeError or ValueError if the tensors do not belong together.
    """
    check_norm(x, residual, weight=weight, bias=bias)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    y, total, stats = torch.empty_like(x, memory_format=torch.contiguous_format), None, None
    n, elements, stride_rm = x.shape[-1], x.numel(), 0
    if residual is not None:
        total = torch.empty_like(y, memory_format=torch.contiguous_format)
        residual, stride_rm = spaced(residual, n)
    if elements == 0:
        return y, total, stats
    m = elements // n
    x, stride_xm = spaced(x, n)
    if keep:
        stats = x.new_empty((1 + layer, m), dtype=torch.float32)
    key = {"n": n, "itemsize": x.element_size(), "residual": residual is not None}
    tile = configs.rule(**key)
    arguments = {
        "x_ptr": x, "residual_ptr": residual, "weight_ptr": weight, "bias_ptr": bias, "y_ptr": y,
        "total_ptr": total, "stats_ptr": stats, "stride_xm": stride_xm, "stride_rm": stride_rm,
        "M": m, "N": n, "eps": eps, "IS_LAYER_NORM": layer,
    }  # fmt: skip
    if tile.reads == 1 and tile.splits == 1:
        config = configs.row.pick(x.device, **key)
        chunks, full = chunks_of(n, 1, config["BLOCK_N"])
        _norm_forward_row_kernel[(-(-m // config["BLOCK_M"]),)](
            NUM_CHUNKS=chunks, NUM_FULL=full, **arguments, **config,
        )  # fmt: skip
        return y, total, stats
    if tile.splits > 1:
        config = configs.split.pick(x.device, **key)
        splits = config["NUM_SPLITS"]
        if may_wait(x.device, splits):
            chunks, full = chunks_of(n, splits, config["BLOCK_N"])
            _norm_forward_split_kernel[(m * splits,)](
                slots_ptr=empty_slots(m, splits, x.device), NUM_CHUNKS=chunks, NUM_FULL=full,
                **arguments, **config,
            )  # fmt: skip
            return y, total, stats
    config = configs.loop.pick(x.device, **key)
    chunks, full = chunks_of(n, 1, config["BLOCK_N"])
    _norm_forward_loop_kernel[(m,)](
        EVEN_N=full == chunks, NUM_CHUNKS=chunks, **arguments, **config,
    )  # fmt: skip
    return y, total, stats


def spaced(x: torch.Tensor, n: int) -> tuple[torch.Tensor, int]:
    """x of shape [..., n], as it is or as `as_rows_2d` gives it, and how far apart its rows are."""
    if x.is_contiguous():
        return x, n
    x = as_rows_2d(x)
    return x, x.stride(0)


norm_forward = cached_launch(norm_forward)

"""Forward pass of layer norm and RMS norm, with or without a residual, for rows of any length.

There are three kernels, and the length of a row decides between them. `_norm_forward_loop_kernel`
reads a row twice, the second time from a cache, and is right for any length.
`_norm_forward_row_kernel` keeps whole rows in registers. Rows that no single program can keep are
split among several (`norm_details/forward_split.py`).

The rule that chooses a kernel is in `norm_details/forward_tiles.py`. The steps that the kernels
share are in `norm_details/statistics.py`. Only the last chunks of an uneven row have masks
(`norm_details/columns.py`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .._runtime.call_cache import cached_launch
from .._runtime.configs import Configs
from .._runtime.layout import rows_and_stride
from .._runtime.vector_access import access_items
from .._triton.exchange import empty_slots, may_wait, supports_spin_wait
from .._triton.memory import load_f32_hinted, opaque_zero, store_as
from .checks import check_norm
from .columns import chunks_of, multiple
from .forward_split import _norm_forward_split_kernel
from .statistics import (
    head_mean,
    is_far,
    load_input,
    load_rows,
    normalized,
    store_normalized,
    store_statistics,
    sum_chunks,
    sum_lanes,
)

# Columns of a block if a row is summed again.
RESUM_BLOCK = tl.constexpr(1024)


class Forward(NamedTuple):
    """The configurations of the forward kernels of a family, and the rule that chooses a kernel:
    (n, itemsize, residual) -> tile."""

    loop: Configs
    row: Configs
    split: Configs
    rule: object


def norm_forward(
    configs: Forward,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_layer_norm: bool,
    unit_offset: bool,
    save_stats: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Normalize the rows of x, or of x + residual if there is one.

    Args:
        configs: the result of `forward_configs`.
        x: `[..., N]`.
        residual: `[..., N]`, of the dtype of x or float32; or None.
        weight: `[N]`, or None for ones.
        bias: `[N]`, or None for zeros.
        eps: added to the variance.
        is_layer_norm: whether the mean is subtracted.
        unit_offset: whether 1 + weight stands in the place of the weight.
        save_stats: whether the statistics are returned.

    Returns:
        y, x + residual and the statistics. The first two are contiguous. y has the dtype of x, and
        the sum that of the residual; the sum is None without a residual. The statistics are
        float32, rstd [M] and then the mean [M] of a layer norm. They are None if they are not
        wanted, or if x is empty.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: the shape or the device of a tensor does not fit x.
    """
    check_norm(x, residual, weight=weight, bias=bias)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    y, x_plus_residual, stats = (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        None,
        None,
    )
    n, elements, itemsize, stride_rm = x.shape[-1], x.numel(), x.element_size(), 0
    if residual is not None:
        x_plus_residual = torch.empty_like(residual, memory_format=torch.contiguous_format)
        # A program holds the sum, whose entries may be wider than those of x.
        itemsize = residual.element_size()
        residual, stride_rm = rows_and_stride(residual)
    if elements == 0:
        return y, x_plus_residual, stats
    m = elements // n
    x, stride_xm = rows_and_stride(x)
    if save_stats:
        stats = x.new_empty((1 + is_layer_norm, m), dtype=torch.float32)
    key = {"n": n, "itemsize": itemsize, "residual": residual is not None}
    tile = configs.rule(**key)
    arguments = {
        "x_ptr": x, "residual_ptr": residual, "weight_ptr": weight, "bias_ptr": bias, "y_ptr": y,
        "x_plus_residual_ptr": x_plus_residual, "stats_ptr": stats,
        "stride_xm": stride_xm, "stride_rm": stride_rm, "M": m, "N": n, "eps": eps,
        "IS_LAYER_NORM": is_layer_norm, "UNIT_OFFSET": unit_offset,
        "ITEMS": access_items(x.element_size(), n, stride_xm, stride_rm),
    }  # fmt: skip
    if tile.reads == 1 and tile.splits == 1:
        config = configs.row.pick(x.device, **key)
        chunks, full = chunks_of(n, 1, config["BLOCK_N"])
        _norm_forward_row_kernel[(-(-m // config["BLOCK_M"]),)](
            HAS_PTX=supports_spin_wait(x.device), NUM_CHUNKS=chunks, NUM_FULL=full,
            **arguments, **config,
        )  # fmt: skip
        return y, x_plus_residual, stats
    if tile.splits > 1:
        config = configs.split.pick(x.device, **key)
        splits = config["NUM_SPLITS"]
        if may_wait(x.device, splits):
            chunks, full = chunks_of(n, splits, config["BLOCK_N"])
            _norm_forward_split_kernel[(m * splits,)](
                slots_ptr=empty_slots(m, splits, x.device), HAS_PTX=supports_spin_wait(x.device),
                NUM_CHUNKS=chunks, NUM_FULL=full, **arguments, **config,
            )  # fmt: skip
            return y, x_plus_residual, stats
    config = configs.loop.pick(x.device, **key)
    chunks, full = chunks_of(n, 1, config["BLOCK_N"])
    _norm_forward_loop_kernel[(m,)](
        EVEN_N=full == chunks, NUM_CHUNKS=chunks, **arguments, **config,
    )  # fmt: skip
    return y, x_plus_residual, stats


@triton.jit
def _norm_forward_loop_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, x_plus_residual_ptr, stats_ptr,
    stride_xm, stride_rm, M, N, eps,
    IS_LAYER_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, ITEMS: tl.constexpr,
    EVEN_N: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = w (s - mean) rstd + b with s = x + residual; mean is 0 in an RMS norm. Any N.

    Grid: M. A program owns a row. It reads s in NUM_CHUNKS blocks of BLOCK_N columns, in one loop
    for the statistics and in a second one for y. The second loop finds the row in a cache if it is
    still there.

    Reads x (and the residual) [M, N], in rows stride_xm and stride_rm apart, w and b [N], each
    1 and 0 if its pointer is None. Writes y [M, N], and s [M, N], in the dtype of the residual, if
    there is one. Writes stats (rstd [M], then mean [M] of a layer norm) unless its pointer is None.
    UNIT_OFFSET: 1 + w stands in the place of w.

    N and the strides are multiples of ITEMS. NUM_CHUNKS = cdiv(N, BLOCK_N). EVEN_N: N is a multiple
    of BLOCK_N, so columns need no mask.
    """
    N, stride_xm = multiple(N, ITEMS), multiple(stride_xm, ITEMS)
    stride_rm = multiple(stride_rm, ITEMS)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    if residual_ptr is not None:
        residual_ptr += row * stride_rm
        x_plus_residual_ptr += row * N
    offs_n = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    # 1. Mean and variance, about a shift.
    mean = 0.0
    if IS_LAYER_NORM:
        mean = head_mean(x_ptr, residual_ptr, N)
    # Each lane has its own sums, which are added after the loop. The number of steps is constant,
    # so the loads of several steps are in flight at a time.
    sum_d = tl.zeros((1, BLOCK_N), tl.float32)
    sum_d2 = tl.zeros((1, BLOCK_N), tl.float32)
    for chunk in range(NUM_CHUNKS):
        cols = chunk * BLOCK_N + offs_n
        mask = (cols < N) | EVEN_N
        x = load_input(x_ptr, residual_ptr, cols, cols, mask, "evict_last")
        if residual_ptr is not None:
            tl.store(x_plus_residual_ptr + cols, x, mask=mask)
        d = x.to(tl.float32)
        if IS_LAYER_NORM:
            d = tl.where(mask, d - mean, 0.0)
            sum_d += d
        sum_d2 += d * d
    sum_d, sum_d2 = sum_lanes(sum_d, sum_d2, IS_LAYER_NORM)  # [1]
    if residual_ptr is not None:
        # Other threads read s again than those that stored it.
        tl.debug_barrier()
        x_ptr = x_plus_residual_ptr
    if IS_LAYER_NORM:
        sum_d, sum_d2 = tl.sum(sum_d, 0), tl.sum(sum_d2, 0)
        delta = sum_d / N
        variance = sum_d2 / N
        if is_far(delta, variance):
            mean += delta
            sum_d, sum_d2 = _sum_again(x_ptr, mean, N)
            delta = sum_d / N
            variance = sum_d2 / N
        mean += delta + tl.zeros((1,), tl.float32)
        variance += tl.zeros((1,), tl.float32) - delta * delta
    else:
        mean = sum_d
        variance = sum_d2 / N
    offs_m = row + tl.arange(0, 1)
    rstd = store_statistics(stats_ptr, offs_m, offs_m < M, mean, variance, M, eps, IS_LAYER_NORM)
    # 2. Read again, normalize, store.
    for chunk in range(NUM_CHUNKS):
        cols = chunk * BLOCK_N + offs_n
        mask = (cols < N) | EVEN_N
        x = load_f32_hinted(x_ptr + cols, mask, "evict_first")
        y = normalized(x, mean, rstd, weight_ptr, bias_ptr, cols, mask, IS_LAYER_NORM, UNIT_OFFSET)
        store_as(y_ptr + cols, y, mask)


@triton.jit
def _sum_again(x_ptr, shift, N):
    """The sums of d and of d² along one row, with d = x - shift; scalars.

    A row rarely needs it, so it must not cost registers. The block is small, and the loop is not
    unrolled.
    """
    sum_d = tl.zeros((RESUM_BLOCK,), tl.float32)
    sum_d2 = tl.zeros((RESUM_BLOCK,), tl.float32)
    for start in range(0, N, RESUM_BLOCK):
        cols = start + tl.arange(0, RESUM_BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        d = tl.where(cols < N, x - shift, 0.0)
        sum_d += d
        sum_d2 += d * d
    return tl.sum(sum_d, 0), tl.sum(sum_d2, 0)


@triton.jit
def _norm_forward_row_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, x_plus_residual_ptr, stats_ptr,
    stride_xm, stride_rm, M, N, eps,
    IS_LAYER_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, ITEMS: tl.constexpr,
    HAS_PTX: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = w (s - mean) rstd + b with s = x + residual; mean is 0 in an RMS norm. s is read once.

    Grid: cdiv(M, BLOCK_M). A program owns BLOCK_M rows. It keeps s in registers, in its dtype, as
    NUM_CHUNKS chunks of BLOCK_N columns. It loads the weights after the statistics, so that they
    hold no registers before.

    Reads x (and the residual) [M, N], in rows stride_xm and stride_rm apart, w and b [N], each
    1 and 0 if its pointer is None. Writes y [M, N], and s [M, N], in the dtype of the residual, if
    there is one. Writes stats (rstd [M], then mean [M] of a layer norm) unless its pointer is None.
    UNIT_OFFSET: 1 + w stands in the place of w. HAS_PTX: the GPU is NVIDIA's.

    N and the strides are multiples of ITEMS. NUM_CHUNKS = cdiv(N, BLOCK_N), 8 at most. NUM_FULL =
    N // BLOCK_N: the chunks without a mask.
    """
    N, stride_xm = multiple(N, ITEMS), multiple(stride_xm, ITEMS)
    stride_rm = multiple(stride_rm, ITEMS)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = (offs_m < M) | (BLOCK_M == 1)
    # 1. Load the rows.
    chunks = load_rows(
        x_ptr, residual_ptr, x_plus_residual_ptr, offs_m, mask_m, stride_xm, stride_rm, N, 0, N,
        NUM_CHUNKS, NUM_FULL, BLOCK_N,
    )  # fmt: skip
    # 2. Mean and variance, about a shift: the mean of an eighth of the row at least.
    shift = tl.zeros((BLOCK_M,), tl.float32)
    if IS_LAYER_NORM:
        shift = tl.sum(chunks[0].to(tl.float32), 1) / tl.minimum(N, BLOCK_N)
    sum_d, sum_d2 = sum_chunks(
        chunks, shift, opaque_zero(shift)[:, None], 0, N,
        IS_LAYER_NORM, HAS_PTX, NUM_CHUNKS, NUM_FULL, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    mean = shift
    variance = sum_d2 / N
    if IS_LAYER_NORM:
        delta = sum_d / N
        mean += delta
        variance -= delta * delta
    rstd = store_statistics(stats_ptr, offs_m, mask_m, mean, variance, M, eps, IS_LAYER_NORM)
    # 3. Normalize and store.
    store_normalized(
        y_ptr, chunks, weight_ptr, bias_ptr, offs_m, mask_m, mean, rstd, N, 0, N,
        IS_LAYER_NORM, UNIT_OFFSET, HAS_PTX, NUM_CHUNKS, NUM_FULL, BLOCK_N,
    )  # fmt: skip


norm_forward = cached_launch(norm_forward)

"""The forward kernel of the norms for rows that several programs hold, each its own columns.

A row that fits the registers of no single program is cut into splits (`norm_details/columns.py`),
one program each, which take the sums along the row together (`_triton/exchange.py`). If such a
row were read twice, it would come from memory both times.
"""

import triton
import triton.language as tl

from .._triton.exchange import exchange_partials
from .._triton.memory import opaque_zero
from .columns import multiple, owned_columns
from .statistics import (
    head_mean,
    is_far,
    load_rows,
    store_normalized,
    store_statistics,
    sum_chunks,
)


@triton.jit
def _norm_forward_split_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, x_plus_residual_ptr, stats_ptr,
    slots_ptr, stride_xm, stride_rm, M, N, eps,
    IS_LAYER_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, ITEMS: tl.constexpr,
    HAS_PTX: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """y = w (s - mean) rstd + b with s = x + residual; mean is 0 in an RMS norm. s is read once.

    Grid: M * NUM_SPLITS. A program owns the columns [begin, end) of a row. It keeps s in registers,
    in its dtype, as NUM_CHUNKS chunks of BLOCK_N columns.

    Reads x (and the residual) [M, N], in rows stride_xm and stride_rm apart, w and b [N], each
    1 and 0 if its pointer is None. Writes y [M, N], and s [M, N], in the dtype of the residual, if
    there is one. Writes stats (rstd [M], then mean [M] of a layer norm) unless its pointer is None.
    UNIT_OFFSET: 1 + w stands in the place of w. HAS_PTX: the GPU is NVIDIA's.

    Preconditions: NUM_SPLITS programs at least are resident at once (`may_wait`), and slots holds a
    pair for each split and row, empty. N and the strides are multiples of ITEMS. NUM_CHUNKS,
    NUM_FULL: as `chunks_of` returns them.
    """
    N, stride_xm = multiple(N, ITEMS), multiple(stride_xm, ITEMS)
    stride_rm = multiple(stride_rm, ITEMS)
    BLOCK_M: tl.constexpr = 1
    split_id = tl.program_id(0) % NUM_SPLITS
    begin, end = owned_columns(split_id, N, NUM_CHUNKS, NUM_FULL, BLOCK_N, NUM_SPLITS)
    offs_m = (tl.program_id(0) // NUM_SPLITS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = (offs_m < M) | (BLOCK_M == 1)
    # 1. Load the columns of the row.
    chunks = load_rows(
        x_ptr, residual_ptr, x_plus_residual_ptr, offs_m, mask_m, stride_xm, stride_rm, N,
        begin, end, NUM_CHUNKS, NUM_FULL, BLOCK_N,
    )  # fmt: skip
    # 2. Mean and variance, about a shift of each split.
    shift = tl.zeros((BLOCK_M,), tl.float32)
    if IS_LAYER_NORM:
        row = (tl.program_id(0) // NUM_SPLITS).to(tl.int64)
        split_residual_ptr = residual_ptr
        if residual_ptr is not None:
            split_residual_ptr += row * stride_rm + begin
        shift += head_mean(x_ptr + row * stride_xm + begin, split_residual_ptr, end - begin)
    zero = opaque_zero(shift)[:, None]
    sum_d, sum_d2 = sum_chunks(
        chunks, shift, zero, begin, end, IS_LAYER_NORM, HAS_PTX,
        NUM_CHUNKS, NUM_FULL, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    slots_ptr += (tl.program_id(0) // NUM_SPLITS).to(tl.int64) * (2 * NUM_SPLITS)
    if IS_LAYER_NORM:
        count = tl.maximum(end - begin, 1)
        sum_d, sum_d2 = tl.sum(sum_d, 0), tl.sum(sum_d2, 0)
        delta = sum_d / count
        if is_far(delta, sum_d2 / count):
            # A new zero, or the compiler would keep the chunks in float32 for this.
            shift += delta
            sum_d, sum_d2 = sum_chunks(
                chunks, shift, opaque_zero(shift)[:, None], begin, end, IS_LAYER_NORM,
                HAS_PTX, NUM_CHUNKS, NUM_FULL, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            sum_d, sum_d2 = tl.sum(sum_d, 0), tl.sum(sum_d2, 0)
            delta = sum_d / count
        means, squares = exchange_partials(
            slots_ptr, split_id, tl.sum(shift, 0) + delta, sum_d2 - sum_d * delta, NUM_SPLITS
        )
        # Chan, Golub and LeVeque: squares about the mean of each split, and of these means.
        splits = tl.arange(0, NUM_SPLITS)
        span = tl.maximum(owned_columns(1, N, NUM_CHUNKS, NUM_FULL, BLOCK_N, NUM_SPLITS)[0], 1)
        counts = tl.minimum(tl.maximum(N - splits * span, 0), span)
        first_mean = tl.sum(tl.where(splits == 0, means, 0.0), 0)
        deltas = means - first_mean  # [NUM_SPLITS]
        delta = tl.sum(counts * deltas, 0) / N
        deltas -= delta
        mean = first_mean + delta + tl.zeros((BLOCK_M,), tl.float32)
        square = tl.sum(squares + counts * deltas * deltas, 0)
    else:
        _, squares = exchange_partials(
            slots_ptr, split_id, tl.sum(sum_d, 0), tl.sum(sum_d2, 0), NUM_SPLITS
        )
        mean = shift
        square = tl.sum(squares, 0)
    variance = (square + tl.zeros((BLOCK_M,), tl.float32)) / N
    rstd = store_statistics(
        stats_ptr, offs_m, mask_m & (split_id == 0), mean, variance, M, eps, IS_LAYER_NORM
    )
    # 3. Normalize and store.
    store_normalized(
        y_ptr, chunks, weight_ptr, bias_ptr, offs_m, mask_m, mean, rstd, N, begin, end,
        IS_LAYER_NORM, UNIT_OFFSET, HAS_PTX, NUM_CHUNKS, NUM_FULL, BLOCK_N,
    )  # fmt: skip

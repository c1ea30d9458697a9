"""The forward kernel of the norms for rows that several programs hold, each its own columns.

A row that fits the registers of no single program is cut into splits (`norm_details/columns.py`),
one program each, which take the sums along the row together (`_triton/exchange.py`). Read twice,
such a row would come from memory both times.
"""

import triton
import triton.language as tl

from .._triton.exchange import exchange_partials
from .._triton.memory import opaque_zero, store_as, to_f32_rematerialized
from .columns import owned_columns
from .statistics import head_mean, is_far, load_input, normalized, store_statistics, sum_chunks


@triton.jit
def _norm_forward_split_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr, slots_ptr,
    stride_xm, stride_rm, M, N, eps,
    IS_LAYER_NORM: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr,
    BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """y = w (s - mean) rstd + b with s = x + residual; mean is 0 in an RMS norm. s is read once.

    Grid: M * NUM_SPLITS. A program owns the columns [begin, end) of a row. It keeps s in registers,
    in its dtype, as NUM_CHUNKS chunks of BLOCK_N columns.

    Reads x (and the residual) [M, N], in rows stride_xm and stride_rm apart, w and b [N], each
    1 and 0 if its pointer is None. Writes y [M, N], total_ptr (s, [M, N]) if there is a residual,
    and stats (rstd [M], then mean [M] of a layer norm) unless its pointer is None.

    Preconditions: NUM_SPLITS programs at least are resident at once (`may_wait`), and slots holds a
    pair for each split and row, empty. NUM_CHUNKS, NUM_FULL: as `chunks_of` returns them.
    """
    BLOCK_M: tl.constexpr = 1
    split_id = tl.program_id(0) % NUM_SPLITS
    begin, end = owned_columns(split_id, N, NUM_CHUNKS, NUM_FULL, BLOCK_N, NUM_SPLITS)
    offs_m = (tl.program_id(0) // NUM_SPLITS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = (offs_m < M) | (BLOCK_M == 1)
    rows = offs_m[:, None]  # [BLOCK_M, 1]
    # 1. Load the rows.
    chunks = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        cols = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]  # [1, BLOCK_N]
        mask = mask_m[:, None] & ((cols < end) | (chunk < NUM_FULL))
        x = load_input(
            x_ptr, residual_ptr, rows * stride_xm + cols, rows * stride_rm + cols, mask, ""
        )
        if residual_ptr is not None:
            tl.store(total_ptr + rows * N + cols, x, mask=mask)
        chunks = chunks + (x,)  # noqa: RUF005
    # 2. Mean and variance.
    shift = tl.zeros((BLOCK_M,), tl.float32)
    if IS_LAYER_NORM:
        row = (tl.program_id(0) // NUM_SPLITS).to(tl.int64)
        own_r = residual_ptr
        if residual_ptr is not None:
            own_r += row * stride_rm + begin
        shift += head_mean(x_ptr + row * stride_xm + begin, own_r, end - begin)
    zero = opaque_zero(shift)[:, None]
    first, second = sum_chunks(
        chunks, shift, zero, begin, end, IS_LAYER_NORM, NUM_CHUNKS, NUM_FULL, BLOCK_M, BLOCK_N
    )
    slots_ptr += (tl.program_id(0) // NUM_SPLITS).to(tl.int64) * (2 * NUM_SPLITS)
    if IS_LAYER_NORM:
        own = tl.maximum(end - begin, 1)
        first, second = tl.sum(first, 0), tl.sum(second, 0)
        off = first / own
        if is_far(off, second / own):
            # A new zero, or the compiler would keep the chunks in float32 for this.
            shift += off
            first, second = sum_chunks(
                chunks, shift, opaque_zero(shift)[:, None], begin, end, IS_LAYER_NORM,
                NUM_CHUNKS, NUM_FULL, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            first, second = tl.sum(first, 0), tl.sum(second, 0)
            off = first / own
        means, seconds = exchange_partials(
            slots_ptr, split_id, tl.sum(shift, 0) + off, second - first * off, NUM_SPLITS
        )
        # Chan, Golub and LeVeque: squares about the mean of each part, and of these means.
        splits = tl.arange(0, NUM_SPLITS)
        span = tl.maximum(owned_columns(1, N, NUM_CHUNKS, NUM_FULL, BLOCK_N, NUM_SPLITS)[0], 1)
        counts = tl.minimum(tl.maximum(N - splits * span, 0), span)
        pivot = tl.sum(tl.where(splits == 0, means, 0.0), 0)
        apart = means - pivot
        off = tl.sum(counts * apart, 0) / N
        apart -= off
        mean = pivot + off + tl.zeros((BLOCK_M,), tl.float32)
        square = tl.sum(seconds + counts * apart * apart, 0)
    else:
        _, seconds = exchange_partials(
            slots_ptr, split_id, tl.sum(first, 0), tl.sum(second, 0), NUM_SPLITS
        )
        mean = shift
        square = tl.sum(seconds, 0)
    variance = (square + tl.zeros((BLOCK_M,), tl.float32)) / N
    rstd = store_statistics(
        stats_ptr, offs_m, mask_m & (split_id == 0), mean, variance, M, eps, IS_LAYER_NORM
    )
    # 3. Normalize and store.
    zero = opaque_zero(rstd)[:, None]
    for chunk in tl.static_range(NUM_CHUNKS):
        cols = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask_n = (cols < end) | (chunk < NUM_FULL)
        x = to_f32_rematerialized(chunks[chunk], zero)
        y = normalized(x, mean, rstd, weight_ptr, bias_ptr, cols, mask_n, IS_LAYER_NORM)
        store_as(y_ptr + rows * N + cols, y, mask_m[:, None] & mask_n)

"""The backward kernel of the norms for rows that several programs hold, each its own columns.

A row that fits the registers of no single program is cut into splits (`norm_details/columns.py`).
The programs of a group hold one split each, of the same rows, and take the sums along a row
together (`_triton/exchange.py`). The formulas are those of `norm_details/gradients.py`.
"""

import triton
import triton.language as tl

from .._triton.exchange import exchange_partials
from .._triton.memory import opaque_zero
from .columns import multiple, owned_columns
from .gradients import accumulate, load_chunks, store_dx, store_sums, zero_chunks
from .statistics import add_pairs


@triton.jit
def _norm_backward_split_kernel(
    x_ptr, dy_ptr, ds_ptr, weight_ptr, stats_ptr, dx_ptr, dr_ptr, parts_ptr, slots_ptr,
    stride_xm, stride_dym, stride_dsm, M, N,
    IS_LAYER_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_PTX: tl.constexpr, ITEMS: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PER_SM: tl.constexpr,
    NUM_SPLITS: tl.constexpr, IN_TURN: tl.constexpr,
):  # fmt: skip
    """dx of rows in splits, and for each group of programs its partial sums of dw and db.

        dx = rstd (g - xhat c1 - c2) + ds, with xhat = (x - mean) rstd, g = w dy,
             c1 = mean(g xhat) and c2 = mean(g); mean and c2 are 0 in an RMS norm
        dw = sum over rows of dy xhat, db = sum over rows of dy

    Grid: num_groups * NUM_SPLITS. Split `split_id` of a group owns the columns [begin, end) of
    every num_groups-th row if IN_TURN, else of a range of them, as NUM_CHUNKS chunks of BLOCK_N. It
    keeps x, dy, w and its part of dw and db in registers.

    Reads x, dy (and ds) [M, N] once, in rows stride_xm, stride_dym, stride_dsm apart, w [N] and
    stats (rstd [M], then mean [M] of a layer norm). Writes dx [M, N], the same to dr unless its
    pointer is None, and parts, float32: dw [num_groups, N] if there is a weight, then db
    [num_groups, N] if HAS_BIAS. UNIT_OFFSET: 1 + w stands in the place of w.

    Preconditions: all programs of a group are resident at once (`may_wait`), and slots holds a pair
    for each split and row, empty. N and the strides are multiples of ITEMS. NUM_CHUNKS, NUM_FULL:
    as `chunks_of` returns them. STAGES: rows loaded ahead, plus one. PER_SM: used by the host.
    HAS_PTX: the GPU is NVIDIA's.
    """
    N, stride_xm = multiple(N, ITEMS), multiple(stride_xm, ITEMS)
    stride_dym, stride_dsm = multiple(stride_dym, ITEMS), multiple(stride_dsm, ITEMS)
    split_id = tl.program_id(0) % NUM_SPLITS
    begin, end = owned_columns(split_id, N, NUM_CHUNKS, NUM_FULL, BLOCK_N, NUM_SPLITS)
    group = (tl.program_id(0) // NUM_SPLITS).to(tl.int64)
    num_groups = tl.num_programs(0) // NUM_SPLITS
    lanes = tl.arange(0, BLOCK_N)
    inside = tl.full((1,), 1, tl.int1)
    HAS_WEIGHT: tl.constexpr = weight_ptr is not None
    weights, dw, db = (), (), ()
    if HAS_WEIGHT:
        weights = load_chunks(weight_ptr, begin, end, lanes, inside, NUM_CHUNKS, NUM_FULL, BLOCK_N)
        dw = zero_chunks(0, NUM_CHUNKS, BLOCK_N)
    if HAS_BIAS:
        db = zero_chunks(0, NUM_CHUNKS, BLOCK_N)
    if IN_TURN:
        first_row, last_row, step = group, M, num_groups
    else:
        per_group = tl.cdiv(M, num_groups)
        first_row = group * per_group
        last_row, step = tl.minimum(first_row + per_group, M), 1
    for row in tl.range(first_row, last_row, step, num_stages=STAGES):
        # 1. Load the columns of the row.
        xs = load_chunks(
            x_ptr + row * stride_xm, begin, end, lanes, inside, NUM_CHUNKS, NUM_FULL, BLOCK_N
        )
        dys = load_chunks(
            dy_ptr + row * stride_dym, begin, end, lanes, inside, NUM_CHUNKS, NUM_FULL, BLOCK_N
        )
        rstd = tl.load(stats_ptr + row)
        mean = 0.0
        if IS_LAYER_NORM:
            mean = tl.load(stats_ptr + M + row)
        # 2. Sum along them, and into dw and db; take the sums of the row with the other splits.
        lanes_c1, lanes_c2, dw, db = accumulate(
            xs, dys, weights, dw, db, mean, rstd, opaque_zero(tl.cast(row, tl.int32)),
            IS_LAYER_NORM, UNIT_OFFSET, HAS_WEIGHT, HAS_BIAS, HAS_PTX, NUM_CHUNKS,
        )  # fmt: skip
        if IS_LAYER_NORM:
            c1, c2 = tl.reduce((lanes_c1, lanes_c2), 0, add_pairs)
        else:
            c1, c2 = tl.sum(lanes_c1, 0), 0.0
        parts_c1, parts_c2 = exchange_partials(
            slots_ptr + row * (2 * NUM_SPLITS), split_id, c1, tl.cast(c2, tl.float32), NUM_SPLITS
        )
        c1, c2 = tl.sum(parts_c1, 0), tl.sum(parts_c2, 0)
        # 3. Store dx.
        ds_row_ptr, dr_row_ptr = ds_ptr, dr_ptr
        if ds_ptr is not None:
            ds_row_ptr += row * stride_dsm
        if dr_ptr is not None:
            dr_row_ptr += row * N
        store_dx(
            dx_ptr + row * N, dr_row_ptr, ds_row_ptr, xs, dys, weights, c1 / N, c2 / N, mean, rstd,
            opaque_zero(c1), begin, end, lanes, inside,
            IS_LAYER_NORM, UNIT_OFFSET, HAS_WEIGHT, HAS_PTX, NUM_CHUNKS, NUM_FULL, BLOCK_N,
        )  # fmt: skip
    if HAS_WEIGHT:
        store_sums(parts_ptr + group * N, dw, begin, end, lanes, NUM_CHUNKS, NUM_FULL, BLOCK_N)
        group += num_groups
    if HAS_BIAS:
        store_sums(parts_ptr + group * N, db, begin, end, lanes, NUM_CHUNKS, NUM_FULL, BLOCK_N)

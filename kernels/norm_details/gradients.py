"""The gradients of a row that one program holds, for the backward kernels of the norms.

    xhat = (x - mean) rstd, g = w dy, c1 = mean(g xhat), c2 = mean(g)
    dx = rstd (g - xhat c1 - c2) + ds, dw = sum over rows of dy xhat, db = sum over rows of dy

Here rstd = 1 / sqrt(variance + eps), and ds is the gradient of the fused sum x + residual, if there
is one. An RMS norm has mean = c2 = 0. With UNIT_OFFSET, 1 + w stands in the place of w.

A row, or a split of one, is a tuple of NUM_CHUNKS chunks of BLOCK_N columns, packed as they came
from memory. `lanes` is 0 to BLOCK_N - 1, of the shape of a chunk: [1, BLOCK_N] or [BLOCK_N]. The
NUM_FULL leading chunks lie within [begin, end), so they need no mask.

Numbers of 16 bits are widened anew for each use: a second copy in float32 would double the
registers. An instruction counts here: at 16384 columns a multiprocessor takes 3.1 us to move a row
and 2.6 us to issue 36 instructions an element (docs/lab/layer_norm.md).
"""

import triton
import triton.language as tl

from .._triton.memory import pairs_to_f32_rematerialized, store_as
from .statistics import with_offset


@triton.jit
def load_chunks(
    row_ptr, begin, end, lanes, mask_m,
    NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The columns [begin, end) of the rows at row_ptr, as a tuple of chunks."""
    chunks = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        cols = begin + chunk * BLOCK_N + lanes
        mask = mask_m & ((cols < end) | (chunk < NUM_FULL))
        chunks += (tl.load(row_ptr + cols, mask=mask, other=0.0),)
    return chunks


@triton.jit
def zero_chunks(BLOCK_M: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Chunks of zeros in float32, [BLOCK_M, BLOCK_N], or [BLOCK_N] if BLOCK_M is 0."""
    chunks = ()
    for _ in tl.static_range(NUM_CHUNKS):
        if BLOCK_M:
            chunks += (tl.zeros((BLOCK_M, BLOCK_N), tl.float32),)
        else:
            chunks += (tl.zeros((BLOCK_N,), tl.float32),)
    return chunks


@triton.jit
def accumulate(
    xs, dys, weights, dw, db, mean, rstd, zero,
    IS_LAYER_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_PTX: tl.constexpr, NUM_CHUNKS: tl.constexpr,
):  # fmt: skip
    """The sums of g xhat and of g in each lane, and dw and db with the rows added to them.

    zero: an `opaque_zero` that is new in each row, so the weights stay packed from row to row.
    """
    lanes_c1 = tl.zeros(xs[0].shape, tl.float32)
    lanes_c2 = tl.zeros(xs[0].shape, tl.float32)
    new_dw, new_db = (), ()
    for chunk in tl.static_range(NUM_CHUNKS):
        x = pairs_to_f32_rematerialized(xs[chunk], None, HAS_PTX)
        dy = pairs_to_f32_rematerialized(dys[chunk], None, HAS_PTX)
        if IS_LAYER_NORM:
            x -= mean
        xhat = x * rstd
        g = dy
        if HAS_WEIGHT:
            weight = pairs_to_f32_rematerialized(weights[chunk], zero, HAS_PTX)
            g = with_offset(weight, UNIT_OFFSET) * dy
            new_dw += (dw[chunk] + dy * xhat,)
        lanes_c1 += g * xhat
        if IS_LAYER_NORM:
            lanes_c2 += g
        if HAS_BIAS:
            new_db += (db[chunk] + dy,)
    return lanes_c1, lanes_c2, new_dw, new_db


@triton.jit
def store_dx(
    dx_ptr, dr_ptr, ds_ptr, xs, dys, weights, c1, c2, mean, rstd, zero, begin, end, lanes, mask_m,
    IS_LAYER_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_PTX: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store dx of the rows that begin at dx_ptr, and the same at dr_ptr unless it is None.

    Their ds, if any, begin at ds_ptr.

    zero: `opaque_zero(c1)`, so packed numbers are widened after the sums and not kept wide.
    """
    c1_rstd = c1 * rstd
    for chunk in tl.static_range(NUM_CHUNKS):
        cols = begin + chunk * BLOCK_N + lanes
        mask = mask_m & ((cols < end) | (chunk < NUM_FULL))
        x = pairs_to_f32_rematerialized(xs[chunk], zero, HAS_PTX)
        g = pairs_to_f32_rematerialized(dys[chunk], zero, HAS_PTX)
        if HAS_WEIGHT:
            weight = pairs_to_f32_rematerialized(weights[chunk], zero, HAS_PTX)
            g = with_offset(weight, UNIT_OFFSET) * g
            if chunk >= NUM_FULL:
                # The compiler would fuse the product with the difference and not round it. Then
                # the only element of a row would not cancel.
                g = tl.where(mask, g, 0.0)
        if IS_LAYER_NORM:
            x -= mean
            g -= c2
        dx = (g - x * c1_rstd) * rstd
        if ds_ptr is not None:
            dx += pairs_to_f32_rematerialized(
                tl.load(ds_ptr + cols, mask=mask, other=0.0), zero, HAS_PTX
            )
        store_as(dx_ptr + cols, dx, mask)
        if dr_ptr is not None:
            store_as(dr_ptr + cols, dx, mask)


@triton.jit
def store_sums(
    parts_ptr, sums, begin, end, lanes,
    NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the columns [begin, end) of dw or db; each chunk has the shape of lanes."""
    for chunk in tl.static_range(NUM_CHUNKS):
        cols = begin + chunk * BLOCK_N + lanes
        total = sums[chunk]
        if len(total.shape) == 2:
            total = tl.sum(total, 0)[None, :]
        tl.store(parts_ptr + cols, total, mask=(cols < end) | (chunk < NUM_FULL))

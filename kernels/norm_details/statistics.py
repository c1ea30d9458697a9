"""Loads, sums, statistics and outputs of rows, for the forward kernels of the norms.

Mean and variance of a layer norm come from one pass over the deviations d = s - shift:

    mean = shift + delta, variance = sum(d²) / N - delta², delta = sum(d) / N

A row in one program has the mean of its first chunk as its shift. That chunk is an eighth of the
row or more, so at most 8 variances cancel. Splits, and rows that are read twice, have the mean of
128 entries, which is there before the others. If it lies further than two standard deviations from
the mean, the sums are taken again about the mean. Splits are combined by the pairwise formula of
Chan, Golub and LeVeque. An RMS norm has neither shift nor mean.

A row, or a split of one, is a tuple of NUM_CHUNKS chunks [BLOCK_M, BLOCK_N], in the dtype in which
they came from memory. Each use widens them anew, because a second copy in float32 would double the
registers.

Source: Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (1983).
"""

import triton
import triton.language as tl

from .._triton.memory import load_f32_hinted, opaque_zero, pairs_to_f32_rematerialized, store_as

# The entries whose mean is the shift, and how many of them a warp takes at a time.
HEAD = tl.constexpr(128)
LANES = tl.constexpr(32)
# Squares about a shift cancel if delta² is more than this many variances.
FAR = tl.constexpr(4)


@triton.jit
def add_pairs(a, b, c, d):
    """The elementwise sum of the pairs (a, b) and (c, d), for `tl.reduce`."""
    return a + c, b + d


@triton.jit
def load_input(x_ptr, residual_ptr, offs_x, offs_r, mask, POLICY: tl.constexpr):
    """x, or x + residual where there is one, in the dtype of the residual."""
    x = tl.load(x_ptr + offs_x, mask=mask, other=0.0, eviction_policy=POLICY)
    if residual_ptr is not None:
        residual = load_f32_hinted(residual_ptr + offs_r, mask, "evict_first")
        x = (x.to(tl.float32) + residual).to(residual_ptr.dtype.element_ty)
    return x


@triton.jit
def load_rows(
    x_ptr, residual_ptr, x_plus_residual_ptr, offs_m, mask_m, stride_xm, stride_rm, N, begin, end,
    NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The columns [begin, end) of the rows offs_m, as chunks; stores x + residual, if any."""
    rows = offs_m[:, None]  # [BLOCK_M, 1]
    chunks = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        cols = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]  # [1, BLOCK_N]
        mask = mask_m[:, None] & ((cols < end) | (chunk < NUM_FULL))
        x = load_input(
            x_ptr, residual_ptr, rows * stride_xm + cols, rows * stride_rm + cols, mask, ""
        )
        if residual_ptr is not None:
            tl.store(x_plus_residual_ptr + rows * N + cols, x, mask=mask)
        chunks = chunks + (x,)  # noqa: RUF005
    return chunks


@triton.jit
def head_mean(x_ptr, residual_ptr, N):
    """The mean of the first HEAD of N entries. Each warp takes it for itself, without a barrier."""
    head = tl.zeros((LANES,), tl.float32)
    for part in tl.static_range(HEAD // LANES):
        offs = part * LANES + tl.arange(0, LANES)
        x = load_input(x_ptr, residual_ptr, offs, offs, offs < N, "evict_last")
        head += x.to(tl.float32)
    return tl.sum(head, 0) / tl.maximum(tl.minimum(N, HEAD), 1)


@triton.jit
def sum_lanes(sum_d, sum_d2, IS_LAYER_NORM: tl.constexpr):
    """The sums along rows, [BLOCK_M], of lanes [BLOCK_M, BLOCK_N]."""
    if IS_LAYER_NORM:
        return tl.reduce((sum_d, sum_d2), 1, add_pairs)
    return tl.zeros((sum_d.shape[0],), tl.float32), tl.sum(sum_d2, 1)


@triton.jit
def is_far(delta, square):
    """Whether squares about a shift cancel; scalars, false if either is NaN.

    delta: the mean of the row minus the shift. square: the mean of d².
    """
    return delta * delta > FAR * (square - delta * delta)


@triton.jit
def sum_chunks(
    chunks, shift, zero, begin, end, IS_LAYER_NORM: tl.constexpr, HAS_PTX: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums of d (0 in an RMS norm) and of d² along the rows of chunks, [BLOCK_M] each.

    zero: int32 of `opaque_zero`, or None at the first use of the chunks.
    """
    sum_d = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    sum_d2 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        d = pairs_to_f32_rematerialized(chunks[chunk], zero, HAS_PTX)
        if IS_LAYER_NORM:
            cols = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]  # [1, BLOCK_N]
            inside = (cols < end) | (chunk < NUM_FULL)
            d = tl.where(inside, d - shift[:, None], 0.0)
            sum_d += d
        sum_d2 += d * d
    return sum_lanes(sum_d, sum_d2, IS_LAYER_NORM)


@triton.jit
def store_statistics(
    stats_ptr, offs_m, mask_m, mean, variance, M, eps, IS_LAYER_NORM: tl.constexpr
):
    """rstd, [BLOCK_M]; stores it, and the mean of a layer norm, unless stats_ptr is None."""
    if IS_LAYER_NORM and stats_ptr is not None:
        tl.store(stats_ptr + M + offs_m, mean, mask=mask_m)
    rstd = tl.rsqrt(variance + tl.cast(eps, tl.float32))
    if stats_ptr is not None:
        tl.store(stats_ptr + offs_m, rstd, mask=mask_m)
    return rstd


@triton.jit
def with_offset(weight, UNIT_OFFSET: tl.constexpr):
    """The factor of a column in float32: weight, or 1 + weight if UNIT_OFFSET."""
    return 1.0 + weight if UNIT_OFFSET else weight


@triton.jit
def normalized(
    x, mean, rstd, weight_ptr, bias_ptr, cols, mask_n,
    IS_LAYER_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """The tile of y, [BLOCK_M, BLOCK_N], float32; UNIT_OFFSET: the factor is 1 + weight."""
    if weight_ptr is not None:
        weight = load_f32_hinted(weight_ptr + cols, mask_n, "evict_last")
    if bias_ptr is not None:
        bias = load_f32_hinted(bias_ptr + cols, mask_n, "evict_last")
    if IS_LAYER_NORM:
        x -= mean[:, None]
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y *= with_offset(weight, UNIT_OFFSET)
    if bias_ptr is not None:
        y += bias
    return y


@triton.jit
def store_normalized(
    y_ptr, chunks, weight_ptr, bias_ptr, offs_m, mask_m, mean, rstd, N, begin, end,
    IS_LAYER_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, HAS_PTX: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the columns [begin, end) of y in the rows offs_m."""
    rows = offs_m[:, None]  # [BLOCK_M, 1]
    zero = opaque_zero(rstd)[:, None]
    for chunk in tl.static_range(NUM_CHUNKS):
        cols = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]  # [1, BLOCK_N]
        mask_n = (cols < end) | (chunk < NUM_FULL)
        x = pairs_to_f32_rematerialized(chunks[chunk], zero, HAS_PTX)
        y = normalized(
            x, mean, rstd, weight_ptr, bias_ptr, cols, mask_n, IS_LAYER_NORM, UNIT_OFFSET
        )
        store_as(y_ptr + rows * N + cols, y, mask_m[:, None] & mask_n)

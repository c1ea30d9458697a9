"""Sums, statistics and outputs of a row, for the forward kernels of the norms.

Mean and variance of a layer norm come from one pass over deviations from a shift (Chan, Golub and
LeVeque, "Algorithms for computing the sample variance", 1983). A row in one program is shifted by
the mean of its first chunk, an eighth of it or more, so at most 8 variances cancel. Splits, and
rows that are read twice, are shifted by the mean of 128 entries, which is there before the others.
If it lies further than two standard deviations from the mean, the sums are taken again about the
mean. Splits are combined by the pairwise formula of the same authors.
"""

import triton
import triton.language as tl

from .._triton.memory import load_f32_hinted, to_f32_rematerialized

# The entries whose mean the others are set apart from, and how many of them a warp takes at a time.
HEAD = tl.constexpr(128)
LANES = tl.constexpr(32)
# Squares about a shift cancel if that lies, squared, so many variances from the mean.
FAR = tl.constexpr(4)


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def load_input(x_ptr, residual_ptr, offs_x, offs_r, mask, POLICY: tl.constexpr):
    """x, or x + residual where there is one, in the dtype of x."""
    x = tl.load(x_ptr + offs_x, mask=mask, other=0.0, eviction_policy=POLICY)
    if residual_ptr is not None:
        residual = load_f32_hinted(residual_ptr + offs_r, mask, "evict_first")
        x = (x.to(tl.float32) + residual).to(x_ptr.dtype.element_ty)
    return x


@triton.jit
def head_mean(x_ptr, residual_ptr, N):
    """The mean of the first entries of N. Each warp takes it for itself, without a barrier."""
    head = tl.zeros((LANES,), tl.float32)
    for part in tl.static_range(HEAD // LANES):
        offs = part * LANES + tl.arange(0, LANES)
        x = load_input(x_ptr, residual_ptr, offs, offs, offs < N, "evict_last")
        head += x.to(tl.float32)
    return tl.sum(head, 0) / tl.maximum(tl.minimum(N, HEAD), 1)


@triton.jit
def sum_lanes(first, second, IS_LAYER_NORM: tl.constexpr):
    """The sums along rows, [BLOCK_M], of lanes [BLOCK_M, BLOCK_N]."""
    if IS_LAYER_NORM:
        return tl.reduce((first, second), 1, add_pairs)
    return tl.zeros((first.shape[0],), tl.float32), tl.sum(second, 1)


@triton.jit
def is_far(off, square):
    """Whether squares about a shift cancel: it lies `off` from the mean of the row; `square` is the
    mean square about it. Scalars; false if either is NaN."""
    return off * off > FAR * (square - off * off)


@triton.jit
def store_statistics(
    stats_ptr, offs_m, mask_m, mean, variance, M, eps, IS_LAYER_NORM: tl.constexpr
):
    """Returns rstd; stores it, and the mean of a layer norm, if they are wanted."""
    if IS_LAYER_NORM and stats_ptr is not None:
        tl.store(stats_ptr + M + offs_m, mean, mask=mask_m)
    rstd = tl.rsqrt(variance + tl.cast(eps, tl.float32))
    if stats_ptr is not None:
        tl.store(stats_ptr + offs_m, rstd, mask=mask_m)
    return rstd


@triton.jit
def normalized(x, mean, rstd, weight_ptr, bias_ptr, cols, mask_n, IS_LAYER_NORM: tl.constexpr):
    """The tile of y, [BLOCK_M, BLOCK_N], float32."""
    if weight_ptr is not None:
        weight = load_f32_hinted(weight_ptr + cols, mask_n, "evict_last")
    if bias_ptr is not None:
        bias = load_f32_hinted(bias_ptr + cols, mask_n, "evict_last")
    if IS_LAYER_NORM:
        x -= mean[:, None]
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y *= weight
    if bias_ptr is not None:
        y += bias
    return y


@triton.jit
def sum_chunks(
    chunks, shift, zero, begin, end, IS_LAYER_NORM: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    NUM_FULL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums along rows of kept chunks, about `shift` if a layer norm, and of their squares."""
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        apart = to_f32_rematerialized(chunks[chunk], zero)
        if IS_LAYER_NORM:
            cols = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
            inside = (cols < end) | (chunk < NUM_FULL)
            apart = tl.where(inside, apart - shift[:, None], 0.0)
            first += apart
        second += apart * apart
    return sum_lanes(first, second, IS_LAYER_NORM)

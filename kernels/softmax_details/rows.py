"""Rows of a softmax, [B, H, Q, N]: loads up to the diagonal, the steps of the formula, the mask."""

import torch
import triton
import triton.language as tl

from .._runtime.autograd import needs_grad
from .._runtime.checks import check_that
from .._triton.memory import load_f32


@triton.jit
def row_max(x):
    """Return the maxima [M, 1] of rows [M, N], or a scalar if M is 1.

    A scalar has no layout that could spread to the row.
    """
    return tl.max(x) if x.shape[0] == 1 else tl.max(x, 1)[:, None]


@triton.jit
def row_sum(x):
    """Return the sums [M, 1] of rows [M, N], or a scalar if M is 1."""
    return tl.sum(x) if x.shape[0] == 1 else tl.sum(x, 1)[:, None]


@triton.jit
def exp_numerators(x, m, scale_log2e):
    """Return exp2((x - m) scale_log2e) in float32.

    Numbers of 16 bits take one fused multiply-add. For float32 the difference comes first: it is
    exact near the maximum, and the interpreter does not fuse.
    """
    if x.dtype == tl.float32:
        return tl.exp2((x - m) * scale_log2e)
    else:
        return tl.exp2(x.to(tl.float32) * scale_log2e - m * scale_log2e)


@triton.jit
def inv_sum(l, dtype: tl.constexpr):
    """Return 1 / l, as near as results of this dtype can show.

    The plain division is off by up to two units in the last place. A step of Newton's method mends
    that. The division that rounds to nearest takes ninety instructions, for which each row waits.
    """
    inv_l = 1.0 / l
    if dtype == tl.float32:
        inv_l = tl.fma(inv_l, tl.fma(-l, inv_l, 1.0), inv_l)
    return inv_l


@triton.jit
def finite_or_zero(m):
    """Return m, or zero if m is minus infinity, which must not be subtracted from itself."""
    return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def num_visible(rows, N, Q, CAUSAL: tl.constexpr):
    """Return how many keys a row sees, at most."""
    end = N
    if CAUSAL:
        end = (rows % Q).to(tl.int32) + (N - Q + 1)
    return end


@triton.jit
def visible_mask(columns, inside, end, CAUSAL: tl.constexpr):
    """Return which columns to read, and which of them the row sees.

    The columns to read end at a multiple of 16 elements, so that accesses stay wide.
    """
    read, seen = inside, inside
    if CAUSAL:
        read = inside & (columns < (end + 15) // 16 * 16)
        seen = inside & (columns < end)
    return read, seen


@triton.jit
def load_visible(ptr, columns, inside, end, CAUSAL: tl.constexpr, POLICY: tl.constexpr):
    """Return the elements in the dtype of the tensor, zero if not seen."""
    read, seen = visible_mask(columns, inside, end, CAUSAL)
    value = tl.load(ptr + columns, mask=read, other=0.0, eviction_policy=POLICY)
    if CAUSAL:
        value = tl.where(seen, value, 0.0)
    return value


@triton.jit
def load_scaled(
    x_ptr, mask_ptr, columns, inside, end, scale,
    SCALE_IN_EXP2: tl.constexpr, CAUSAL: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Return x in its dtype if SCALE_IN_EXP2, else scale x + mask in float32.

    Elements that are not seen are minus infinity.
    """
    read, seen = visible_mask(columns, inside, end, CAUSAL)
    x = tl.load(x_ptr + columns, mask=read, other=-float("inf"), eviction_policy=POLICY)
    if not SCALE_IN_EXP2:
        x = x.to(tl.float32) * scale
        if mask_ptr is not None:
            x += load_f32(mask_ptr + columns, read)
    if CAUSAL or not SCALE_IN_EXP2:
        x = tl.where(seen, x, tl.cast(-float("inf"), x.dtype))
    return x


@triton.jit
def mask_row_ptr(mask_ptr, rows, stride_kb, stride_kh, stride_kq, H, Q):
    """Return the address of the mask of a row; a stride is zero if the mask is broadcast there."""
    heads = rows // Q
    return mask_ptr + heads // H * stride_kb + heads % H * stride_kh + rows % Q * stride_kq


@triton.jit
def num_blocks(N, end, CAUSAL: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the number of blocks of a row, and the end of a loop over the columns that are seen.

    NUM_BLOCKS: their number as a constant, with which the compiler starts the loads of several
    blocks at once; 0 if there are too many blocks for that.
    """
    blocks = NUM_BLOCKS
    if NUM_BLOCKS == 0:
        blocks = tl.cdiv(N, BLOCK_N)
    stop = blocks * BLOCK_N
    if CAUSAL:
        stop = end
    return blocks, stop


def broadcast_mask(mask, x, heads, queries):
    """Return the mask as [B, H, Q, N], with contiguous columns; copy it only if it must be.

    Raise ValueError for a shape that does not broadcast to that of x, another device or a mask that
    requires a gradient. Raise TypeError for another dtype than that of x and float32.
    """
    n = x.shape[-1]
    fits = 0 < mask.dim() <= x.dim() and all(
        own in (1, size) for own, size in zip(mask.shape[::-1], x.shape[::-1], strict=False)
    )
    check_that(fits, f"mask: shape {tuple(mask.shape)}, expected to broadcast to {tuple(x.shape)}")
    if mask.dtype not in (x.dtype, torch.float32):
        of_x = "" if x.dtype == torch.float32 else f"{x.dtype} or "
        raise TypeError(f"mask: {mask.dtype}, expected {of_x}torch.float32, which is added to x")
    check_that(mask.device == x.device, f"mask: on {mask.device}, expected {x.device}")
    check_that(not needs_grad(mask), "mask: requires a gradient, expected a constant")
    if mask.stride(-1) != 1 or mask.shape[-1] != n:
        mask = mask.expand(*mask.shape[:-1], n).contiguous()
    return mask.expand(x.shape).reshape(-1, heads, queries, n)

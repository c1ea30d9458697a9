"""Rows of scores [B, H, Q, N] as a softmax reads them: scaled, with a mask, up to the diagonal."""

import torch
import triton
import triton.language as tl

from .._runtime.autograd import needs_grad
from .._runtime.checks import check_that
from .._triton.memory import load_f32


@triton.jit
def keys(rows, N, Q, CAUSAL: tl.constexpr):
    """How many keys a row sees, at most."""
    end = N
    if CAUSAL:
        end = (rows % Q).to(tl.int32) + (N - Q + 1)
    return end


@triton.jit
def steps_of(N, end, CAUSAL: tl.constexpr, STEPS: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many steps a walk along a row has, and where it ends that reads what is seen alone.

    STEPS: their number as a constant, with which the compiler has the loads of several steps on
    their way; 0 where they are too many for that.
    """
    steps = STEPS
    if STEPS == 0:
        steps = tl.cdiv(N, BLOCK_N)
    stop = steps * BLOCK_N
    if CAUSAL:
        stop = end
    return steps, stop


@triton.jit
def visible(columns, inside, end, CAUSAL: tl.constexpr):
    """What is read, which ends at a multiple of 16 elements for the sake of wide accesses, and
    what of it is seen."""
    read, seen = inside, inside
    if CAUSAL:
        read = inside & (columns < (end + 15) // 16 * 16)
        seen = inside & (columns < end)
    return read, seen


@triton.jit
def mask_of(mask_ptr, rows, stride_kb, stride_kh, stride_kq, H, Q):
    """Where the mask of a row starts: its strides are zero where it is broadcast."""
    heads = rows // Q
    return mask_ptr + heads // H * stride_kb + heads % H * stride_kh + rows % Q * stride_kq


@triton.jit
def scores(
    x_ptr, mask_ptr, columns, inside, end, scale,
    FOLD: tl.constexpr, CAUSAL: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """x as it came, where FOLD; else in float32, times the scale and with the mask. Minus infinity
    if not seen."""
    read, seen = visible(columns, inside, end, CAUSAL)
    x = tl.load(x_ptr + columns, mask=read, other=-float("inf"), eviction_policy=POLICY)
    if not FOLD:
        x = x.to(tl.float32) * scale
        if mask_ptr is not None:
            x += load_f32(mask_ptr + columns, read)
    if CAUSAL or not FOLD:
        x = tl.where(seen, x, tl.cast(-float("inf"), x.dtype))
    return x


@triton.jit
def finite_or_zero(top):
    """What is subtracted: who has seen only minus infinity must not subtract it from itself."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def weights_of(x, highest, slope):
    """exp2((x - highest) slope). Of 16 bits in one step, since the GPU fuses it; of float32 the
    difference, which is exact where it counts, comes first, for those who do not."""
    if x.dtype == tl.float32:
        return tl.exp2((x - highest) * slope)
    else:
        return tl.exp2(x.to(tl.float32) * slope - highest * slope)


@triton.jit
def row_max(x):
    """The maxima of rows [M, N], [M, 1]; of one row a scalar, which has no layout that could spread
    to the row."""
    return tl.max(x) if x.shape[0] == 1 else tl.max(x, 1)[:, None]


@triton.jit
def row_sum(x):
    """The sums of rows, as `row_max`."""
    return tl.sum(x) if x.shape[0] == 1 else tl.sum(x, 1)[:, None]


@triton.jit
def share_of(total, dtype: tl.constexpr):
    """1 / total, as near as results of this dtype can show: the plain division is off by up to two
    units in the last place, which a step of Newton's method mends. The one that rounds to nearest
    is a call of ninety instructions, for which every row waits."""
    share = 1.0 / total
    if dtype == tl.float32:
        share = tl.fma(share, tl.fma(-total, share, 1.0), share)
    return share


@triton.jit
def seen_of(ptr, columns, inside, end, CAUSAL: tl.constexpr, POLICY: tl.constexpr):
    """The elements in the dtype in which they came, zero if not seen."""
    read, seen = visible(columns, inside, end, CAUSAL)
    value = tl.load(ptr + columns, mask=read, other=0.0, eviction_policy=POLICY)
    if CAUSAL:
        value = tl.where(seen, value, 0.0)
    return value


def broadcast_mask(mask, x, heads, queries):
    """The mask as [B, H, Q, N]: a view, unless it is strange in N or x has five dimensions.

    ValueError for a shape that does not broadcast to that of x, another device or a mask that
    learns; TypeError for another dtype than that of x and float32.
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

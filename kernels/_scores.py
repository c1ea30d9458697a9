"""Rows of scores [B, H, Q, N] as a softmax reads them: scaled, with a mask, up to the diagonal."""

import torch
import triton
import triton.language as tl

from kernels._checks import require
from kernels._launch import needs_grad
from kernels._tile import load_f32


@triton.jit
def keys(rows, N, Q, CAUSAL: tl.constexpr):
    """How many keys a row sees, at most."""
    end = N
    if CAUSAL:
        end = (rows % Q).to(tl.int32) + (N - Q + 1)
    return end


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
    """x in float32, times the scale and with the mask unless FOLD; minus infinity if not seen."""
    read, seen = visible(columns, inside, end, CAUSAL)
    x = tl.load(x_ptr + columns, mask=read, other=-float("inf"), eviction_policy=POLICY)
    x = x.to(tl.float32)
    if not FOLD:
        x *= scale
    if mask_ptr is not None:
        x += load_f32(mask_ptr + columns, read)
    if CAUSAL or not FOLD:
        x = tl.where(seen, x, -float("inf"))
    return x


@triton.jit
def gradients(
    y_ptr, dy_ptr, columns, inside, end, CAUSAL: tl.constexpr, POLICY: tl.constexpr
):  # fmt: skip
    """y and dy, zero if not seen."""
    read, seen = visible(columns, inside, end, CAUSAL)
    y = tl.load(y_ptr + columns, mask=read, other=0.0, eviction_policy=POLICY)
    dy = tl.load(dy_ptr + columns, mask=read, other=0.0, eviction_policy=POLICY)
    if CAUSAL:
        y, dy = tl.where(seen, y, 0.0), tl.where(seen, dy, 0.0)
    return y, dy


def broadcast_mask(mask, x, heads, queries):
    """The mask as [B, H, Q, N]: a view, unless it is strange in N or x has five dimensions."""
    n = x.shape[-1]
    fits = 0 < mask.dim() <= x.dim() and all(
        own in (1, size) for own, size in zip(mask.shape[::-1], x.shape[::-1], strict=False)
    )
    require(fits, f"mask: shape {tuple(mask.shape)}, expected to broadcast to {tuple(x.shape)}")
    require(
        mask.dtype in (x.dtype, torch.float32) and mask.device == x.device,
        f"mask: {mask.dtype} on {mask.device}, expected {x.dtype} or float32 on {x.device}",
    )
    require(not needs_grad(mask), "mask: requires a gradient, expected a constant")
    if mask.stride(-1) != 1 or mask.shape[-1] != n:
        mask = mask.expand(*mask.shape[:-1], n).contiguous()
    return mask.expand(x.shape).reshape(-1, heads, queries, n)

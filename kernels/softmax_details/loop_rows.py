"""Softmax of rows that a program reads in a loop, because its registers do not hold them.

The forward pass reads a row three times and the backward pass twice. The first cache serves the
later readings, if the rows of a multiprocessor fit into it.
"""

import torch
import triton
import triton.language as tl

from .._runtime.configs import Configs
from .._triton.math import LOG2E
from .._triton.memory import store_as
from .._triton.row_access import body_ptr, peeled_columns, vector_body
from .configs import LOOP_CANDIDATES, choose_backward_loop, choose_loop, constant_num_blocks
from .rows import (
    exp_numerators,
    finite_or_zero,
    inv_sum,
    load_scaled,
    load_visible,
    mask_row_ptr,
    num_blocks,
    num_visible,
)


def forward_loop(
    x: torch.Tensor,
    y: torch.Tensor,
    stride: int,
    scale: float,
    causal: bool,
    heads: int | None,
    queries: int | None,
    mask: torch.Tensor | None,
    *,
    scale_in_exp2: bool,
    peeled: bool,
    held: int,
) -> None:
    """Write softmax(scale x + mask) to y; the arguments are those of `forward_general`."""
    n = x.shape[-1]
    kb, kh, kq = (None, None, None) if mask is None else mask.stride()[:3]
    config = FORWARD_LOOP.pick(x.device, n=held, itemsize=x.element_size())
    block = config["BLOCK_N"]
    _forward_loop_kernel[(y.numel() // n,)](
        x_ptr=x, y_ptr=y, mask_ptr=mask,
        stride_xm=stride, stride_kb=kb, stride_kh=kh, stride_kq=kq,
        N=n, H=heads, Q=queries, scale=scale, SCALE_IN_EXP2=scale_in_exp2, CAUSAL=causal,
        EVEN_N=not peeled and n % block == 0, PEELED=peeled,
        NUM_BLOCKS=constant_num_blocks(held, block), **config,
    )  # fmt: skip


def backward_loop(
    y: torch.Tensor,
    dy: torch.Tensor,
    dx: torch.Tensor,
    strides: tuple[int, int],
    scale: float,
    causal: bool,
    queries: int | None,
    *,
    peeled: bool,
    held: int,
) -> None:
    """Write scale y (dy - sum y dy) to dx; rows of y and dy lie `strides` apart.

    queries, peeled, held: as in `forward_general`.
    """
    n = y.shape[-1]
    config = BACKWARD_LOOP.pick(y.device, n=held, itemsize=y.element_size())
    block = config["BLOCK_N"]
    _backward_loop_kernel[(dx.numel() // n,)](
        y_ptr=y, dy_ptr=dy, dx_ptr=dx,
        stride_ym=strides[0], stride_dym=strides[1], N=n, Q=queries, scale=scale,
        CAUSAL=causal, EVEN_N=not peeled and n % block == 0, PEELED=peeled,
        NUM_BLOCKS=constant_num_blocks(held, block), **config,
    )  # fmt: skip


@triton.jit
def _forward_loop_kernel(
    x_ptr, y_ptr, mask_ptr, stride_xm, stride_kb, stride_kh, stride_kq, N, H, Q, scale,
    SCALE_IN_EXP2: tl.constexpr, CAUSAL: tl.constexpr, EVEN_N: tl.constexpr, PEELED: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = exp(z - max z) / sum exp(z - max z), z = scale x + mask, of a row read three times.

    Grid: M. A program owns a row. It reads x and the mask in blocks of BLOCK_N columns, from left
    to right for the maximum and for the sum, and from right to left to write y.

    NUM_BLOCKS: the number of blocks, or 0 if the compiler is not to know it. The arguments, the
    strides and the other constexprs are those of `_forward_general_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    offs_n = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    scale_log2e = tl.cast(scale, tl.float32) * LOG2E if SCALE_IN_EXP2 else LOG2E
    end = num_visible(row, N, Q, CAUSAL)
    mask_row = None
    if mask_ptr is not None:
        mask_row = mask_row_ptr(mask_ptr, row, stride_kb, stride_kh, stride_kq, H, Q)
    width, seen = N, end
    if PEELED:
        lead, width = vector_body(x_ptr, N)
        peel_cols, peel_mask = peeled_columns(lead, width, N, x_ptr.dtype)
        peel = load_scaled(
            x_ptr, mask_row, peel_cols, peel_mask, end, scale, SCALE_IN_EXP2, CAUSAL, ""
        )
        x_ptr, seen = body_ptr(x_ptr, lead), end - lead
        if mask_ptr is not None:
            mask_row += lead
    blocks, stop = num_blocks(width, seen, CAUSAL, NUM_BLOCKS, BLOCK_N)
    m_lanes = tl.full((1, BLOCK_N), -float("inf"), tl.float32)
    for start in range(0, stop, BLOCK_N):
        columns = start + offs_n
        inside = (columns < width) | EVEN_N
        x = load_scaled(
            x_ptr, mask_row, columns, inside, seen, scale, SCALE_IN_EXP2, CAUSAL, "evict_last"
        )
        m_lanes = tl.maximum(m_lanes, x.to(tl.float32))
    m = tl.max(m_lanes)  # scalar
    if PEELED:
        m = tl.maximum(m, tl.max(peel.to(tl.float32)))
    m = finite_or_zero(m)
    l_lanes = tl.zeros((1, BLOCK_N), tl.float32)
    for start in range(0, stop, BLOCK_N):
        columns = start + offs_n
        inside = (columns < width) | EVEN_N
        x = load_scaled(
            x_ptr, mask_row, columns, inside, seen, scale, SCALE_IN_EXP2, CAUSAL, "evict_last"
        )
        l_lanes += exp_numerators(x, m, scale_log2e)
    l = tl.sum(l_lanes)  # scalar
    if PEELED:
        at_peel = exp_numerators(peel, m, scale_log2e)
        l += tl.sum(at_peel)
    inv_l = inv_sum(l, y_ptr.dtype.element_ty)
    if CAUSAL:
        inv_l = tl.where(end > 0, inv_l, 0.0)
    if PEELED:
        store_as(y_ptr + peel_cols, at_peel * inv_l, peel_mask)
        y_ptr = body_ptr(y_ptr, lead)
    # From right to left, because the cache still has the blocks that were read last.
    for block in range(blocks):
        columns = (blocks - 1 - block) * BLOCK_N + offs_n
        inside = (columns < width) | EVEN_N
        x = load_scaled(
            x_ptr, mask_row, columns, inside, seen, scale, SCALE_IN_EXP2, CAUSAL, "evict_first"
        )
        y = exp_numerators(x, m, scale_log2e) * inv_l
        store_as(y_ptr + columns, y, inside)


@triton.jit
def _backward_loop_kernel(
    y_ptr, dy_ptr, dx_ptr, stride_ym, stride_dym, N, Q, scale,
    CAUSAL: tl.constexpr, EVEN_N: tl.constexpr, PEELED: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx = scale y (dy - sum y dy), of a row that a program reads twice.

    Grid: M. A program owns a row in blocks of BLOCK_N columns. It reads y and dy once for the sum
    and once to write dx. Their rows lie stride_ym and stride_dym apart, those of dx lie N apart.

    The constexprs are those of `_forward_loop_kernel`; `needs_peeling` holds for y, dy and dx.
    """
    row = tl.program_id(0).to(tl.int64)
    y_ptr += row * stride_ym
    dy_ptr += row * stride_dym
    dx_ptr += row * N
    offs_n = tl.arange(0, BLOCK_N)
    end = num_visible(row, N, Q, CAUSAL)
    width, seen = N, end
    if PEELED:
        lead, width = vector_body(y_ptr, N)
        peel_cols, peel_mask = peeled_columns(lead, width, N, y_ptr.dtype)
        y_peel = load_visible(y_ptr, peel_cols, peel_mask, end, CAUSAL, "").to(tl.float32)
        dy_peel = load_visible(dy_ptr, peel_cols, peel_mask, end, CAUSAL, "").to(tl.float32)
        y_ptr, dy_ptr, seen = body_ptr(y_ptr, lead), body_ptr(dy_ptr, lead), end - lead
    blocks, stop = num_blocks(width, seen, CAUSAL, NUM_BLOCKS, BLOCK_N)
    products = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, stop, BLOCK_N):
        offs = start + offs_n
        inside = (offs < width) | EVEN_N
        y = load_visible(y_ptr, offs, inside, seen, CAUSAL, "evict_last")
        dy = load_visible(dy_ptr, offs, inside, seen, CAUSAL, "evict_last")
        products += y.to(tl.float32) * dy.to(tl.float32)
    delta = tl.sum(products, 0)  # scalar
    if PEELED:
        delta += tl.sum(y_peel * dy_peel, 0)
        store_as(dx_ptr + peel_cols, y_peel * (dy_peel - delta) * scale, peel_mask)
        dx_ptr = body_ptr(dx_ptr, lead)
    for block in range(blocks):
        offs = block * BLOCK_N + offs_n
        inside = (offs < width) | EVEN_N
        y = load_visible(y_ptr, offs, inside, seen, CAUSAL, "evict_first")
        dy = load_visible(dy_ptr, offs, inside, seen, CAUSAL, "evict_first")
        dx = y.to(tl.float32) * (dy.to(tl.float32) - delta) * scale
        store_as(dx_ptr + offs, dx, inside)


FORWARD_LOOP = Configs(_forward_loop_kernel, LOOP_CANDIDATES, choose_loop, family="softmax")
BACKWARD_LOOP = Configs(
    _backward_loop_kernel, LOOP_CANDIDATES, choose_backward_loop, family="softmax"
)

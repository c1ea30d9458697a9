"""Softmax of short rows that begin at any element: a warp takes several, one after the other.

Rows of a few hundred elements share a program, or its start would take longer than they do. A tile
of several rows would have their peeled elements (`_triton/row_access.py`) in a tile of another
layout, whose sums and maxima pass through shared memory. Here each row is a tile of its own, and a
thread has a line of it. The first threads have a peeled element each, so a row is reduced once.
"""

import torch
import triton
import triton.language as tl

from .._runtime.layout import ACCESS_BYTES
from .._triton.math import LOG2E
from .._triton.memory import store_as
from .._triton.row_access import body_ptr, max_body, peeled_columns_of, vector_body
from .rows import exp_numerators, finite_or_zero, inv_sum

# The longest rows that share a program, and the bytes of a tensor that a program takes.
SHORT_BYTES, PROGRAM_BYTES = 1024, 2048
# One thread for each peeled element, in one warp.
LEAST_LANES = 32


@triton.jit
def _columns(LANES: tl.constexpr, ACCESS: tl.constexpr):
    """Return the columns [LANES, ACCESS]; a thread has a line of them."""
    return tl.arange(0, LANES)[:, None] * ACCESS + tl.arange(0, ACCESS)[None, :]


@triton.jit
def _forward_short_kernel(
    x_ptr, y_ptr, stride_xm, M, N, scale,
    ROWS: tl.constexpr, LANES: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """y = exp(scale x - max scale x) / sum exp(scale x - max scale x) of rows of N elements.

    Grid: cdiv(M, ROWS). A program, one warp, owns ROWS rows. It reads x, whose rows lie stride_xm
    apart, and writes y, whose rows lie N apart.

    scale is positive and normal, and `needs_peeling` holds for x and y. ACCESS: the elements of
    16 bytes. LANES: a power of two and 32 or more; LANES ACCESS covers the body of a row.
    """
    scale_log2e = tl.cast(scale, tl.float32) * LOG2E
    first = tl.program_id(0).to(tl.int64) * ROWS
    columns = _columns(LANES, ACCESS)
    xs, ends = (), ()
    for i in tl.static_range(ROWS):
        x_row = x_ptr + (first + i) * stride_xm
        lead, width = vector_body(x_row, N)
        peel_cols, peel_mask = peeled_columns_of(tl.arange(0, LANES), lead, width, N)
        mask = (columns < width) & (first + i < M)
        ends += (tl.load(x_row + peel_cols, mask=peel_mask & (first + i < M), other=-float("inf")),)
        xs += (tl.load(body_ptr(x_row, lead) + columns, mask=mask, other=-float("inf")),)
    for i in tl.static_range(ROWS):
        lead, width = vector_body(x_ptr + (first + i) * stride_xm, N)
        peel_cols, peel_mask = peeled_columns_of(tl.arange(0, LANES), lead, width, N)
        m_lanes = tl.maximum(tl.max(xs[i].to(tl.float32), 1), ends[i].to(tl.float32))
        m = finite_or_zero(tl.max(m_lanes, 0))
        numerators = exp_numerators(xs[i], m, scale_log2e)
        at_ends = exp_numerators(ends[i], m, scale_log2e)
        inv_l = inv_sum(tl.sum(tl.sum(numerators, 1) + at_ends, 0), y_ptr.dtype.element_ty)
        y_row = y_ptr + (first + i) * N
        store_as(y_row + peel_cols, at_ends * inv_l, peel_mask & (first + i < M))
        mask = (columns < width) & (first + i < M)
        store_as(body_ptr(y_row, lead) + columns, numerators * inv_l, mask)


@triton.jit
def _backward_short_kernel(
    y_ptr, dy_ptr, dx_ptr, stride_ym, stride_dym, M, N, scale,
    ROWS: tl.constexpr, LANES: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """dx = scale y (dy - sum y dy) of rows of N elements.

    Grid: cdiv(M, ROWS). A program, one warp, owns ROWS rows. It reads y and dy, whose rows lie
    stride_ym and stride_dym apart, and writes dx, whose rows lie N apart.

    The constexprs are those of `_forward_short_kernel`; `needs_peeling` holds for y, dy and dx.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    columns = _columns(LANES, ACCESS)
    ys, dys, y_ends, dy_ends = (), (), (), ()
    for i in tl.static_range(ROWS):
        y_row, dy_row = y_ptr + (first + i) * stride_ym, dy_ptr + (first + i) * stride_dym
        lead, width = vector_body(y_row, N)
        peel_cols, peel_mask = peeled_columns_of(tl.arange(0, LANES), lead, width, N)
        peel_mask &= first + i < M
        mask = (columns < width) & (first + i < M)
        y_ends += (tl.load(y_row + peel_cols, mask=peel_mask, other=0.0),)
        dy_ends += (tl.load(dy_row + peel_cols, mask=peel_mask, other=0.0),)
        ys += (tl.load(body_ptr(y_row, lead) + columns, mask=mask, other=0.0),)
        dys += (tl.load(body_ptr(dy_row, lead) + columns, mask=mask, other=0.0),)
    for i in tl.static_range(ROWS):
        lead, width = vector_body(y_ptr + (first + i) * stride_ym, N)
        peel_cols, peel_mask = peeled_columns_of(tl.arange(0, LANES), lead, width, N)
        y, dy = ys[i].to(tl.float32), dys[i].to(tl.float32)
        y_end, dy_end = y_ends[i].to(tl.float32), dy_ends[i].to(tl.float32)
        delta = tl.sum(tl.sum(y * dy, 1) + y_end * dy_end, 0)
        dx_row = dx_ptr + (first + i) * N
        at_end = y_end * (dy_end - delta) * scale
        store_as(dx_row + peel_cols, at_end, peel_mask & (first + i < M))
        mask = (columns < width) & (first + i < M)
        store_as(body_ptr(dx_row, lead) + columns, y * (dy - delta) * scale, mask)


def short(n: int, itemsize: int) -> bool:
    """Return whether rows of n elements share a program."""
    return max_body(n, itemsize) * itemsize <= SHORT_BYTES


def _sizes(n: int, itemsize: int) -> dict[str, int]:
    access = ACCESS_BYTES // itemsize
    lanes = max(LEAST_LANES, triton.next_power_of_2(max_body(n, itemsize) // access))
    rows = PROGRAM_BYTES // (lanes * ACCESS_BYTES)
    return {"ROWS": rows, "LANES": lanes, "ACCESS": access, "num_warps": 1}


def forward_short(x: torch.Tensor, y: torch.Tensor, stride: int, scale: float) -> None:
    """Write softmax(scale x) of rows [..., N] that lie `stride` apart to y; scale is positive."""
    n = x.shape[-1]
    m, sizes = y.numel() // n, _sizes(n, x.element_size())
    _forward_short_kernel[(-(-m // sizes["ROWS"]),)](
        x_ptr=x, y_ptr=y, stride_xm=stride, M=m,
        N=n, scale=scale, **sizes,
    )  # fmt: skip


def backward_short(
    y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, strides: tuple[int, int], scale: float
) -> None:
    """Write scale y (dy - sum y dy) to dx; rows of y and dy lie `strides` elements apart."""
    n = y.shape[-1]
    m, sizes = dx.numel() // n, _sizes(n, y.element_size())
    _backward_short_kernel[(-(-m // sizes["ROWS"]),)](
        y_ptr=y, dy_ptr=dy, dx_ptr=dx,
        stride_ym=strides[0], stride_dym=strides[1], M=m, N=n, scale=scale, **sizes,
    )  # fmt: skip

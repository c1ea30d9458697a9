"""Softmax of rows in registers with a mask, a diagonal, any scale, or rows that begin anywhere.

It computes as the main kernel in `kernels/softmax.py` does, one row or several to a program. The
main kernel is the case without a mask and a diagonal, of aligned rows and a positive scale.
"""

import torch
import triton
import triton.language as tl

from .._runtime.configs import Configs
from .._triton.math import LOG2E
from .._triton.memory import store_as
from .._triton.row_access import body_ptr, peeled_columns, vector_body
from .configs import ROW_CANDIDATES, choose_row, suits_forward_row
from .rows import (
    exp_numerators,
    finite_or_zero,
    inv_sum,
    load_scaled,
    mask_row_ptr,
    num_visible,
    row_max,
    row_sum,
)


def forward_general(
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
    """Write softmax(scale x + mask) of rows [..., N] that lie `stride` elements apart to y.

    heads, queries, mask: as in `softmax_fwd`. scale_in_exp2: as the kernel. peeled: whether the
    kernel splits the rows. held: how many elements of a row are in chunks.
    """
    n, itemsize = x.shape[-1], x.element_size()
    m = y.numel() // n
    kb, kh, kq = (None, None, None) if mask is None else mask.stride()[:3]
    config = FORWARD_GENERAL.pick(
        x.device, n=held, itemsize=itemsize, causal=causal, wide=not scale_in_exp2
    )
    block = config["BLOCK_N"]
    _forward_general_kernel[(-(-m // config["BLOCK_M"]),)](
        x_ptr=x, y_ptr=y, mask_ptr=mask,
        stride_xm=stride, stride_kb=kb, stride_kh=kh, stride_kq=kq,
        M=m, N=n, H=heads, Q=queries, scale=scale, SCALE_IN_EXP2=scale_in_exp2, CAUSAL=causal,
        EVEN_N=not peeled and n % block == 0, PEELED=peeled, NUM_CHUNKS=-(-held // block),
        **config,
    )  # fmt: skip


@triton.jit
def _forward_general_kernel(
    x_ptr, y_ptr, mask_ptr, stride_xm, stride_kb, stride_kh, stride_kq, M, N, H, Q, scale,
    SCALE_IN_EXP2: tl.constexpr, CAUSAL: tl.constexpr, EVEN_N: tl.constexpr, PEELED: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = exp(z - max z) / sum exp(z - max z), z = scale x + mask, of rows that registers hold.

    Grid: cdiv(M, BLOCK_M). A program owns BLOCK_M rows in NUM_CHUNKS chunks of BLOCK_N columns.
    It reads x, whose rows lie stride_xm apart, and the mask unless that is None. The strides of the
    mask are those of batch, head and query. It writes y, whose rows lie N apart.

    SCALE_IN_EXP2: mask_ptr is None, and scale is positive and normal, so max z = scale max x.
    CAUSAL: row r sees only its first N - Q + 1 + r % Q keys. EVEN_N: BLOCK_N divides N, and PEELED
    is false. PEELED: `needs_peeling` of `_triton/row_access.py` holds for x and y, and the chunks
    cover the bodies of their rows. Otherwise NUM_CHUNKS BLOCK_N >= N.
    """
    scale_log2e = tl.cast(scale, tl.float32) * LOG2E if SCALE_IN_EXP2 else LOG2E
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    rows = (first + tl.arange(0, BLOCK_M))[:, None]  # [BLOCK_M, 1]
    offs_n = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    end = num_visible(rows, N, Q, CAUSAL)
    mask_row = None
    if mask_ptr is not None:
        mask_row = mask_row_ptr(mask_ptr, rows, stride_kb, stride_kh, stride_kq, H, Q)
    x_row = x_ptr + rows * stride_xm
    width, seen = N, end
    if PEELED:
        if BLOCK_M == 1:
            # A scalar, as `body_ptr` asks of one row.
            x_row = x_ptr + tl.program_id(0).to(tl.int64) * stride_xm
        lead, width = vector_body(x_row, N)
        peel_cols, peel_mask = peeled_columns(lead, width, N, x_row.dtype)
        if BLOCK_M == 1:
            peel_cols, peel_mask = peel_cols[None, :], peel_mask[None, :]
        peel_mask &= rows < M
        peel = load_scaled(
            x_row, mask_row, peel_cols, peel_mask, end, scale, SCALE_IN_EXP2, CAUSAL, ""
        )
        x_row, seen = body_ptr(x_row, lead), end - lead
        if mask_ptr is not None:
            mask_row += lead
    chunks = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        columns = chunk * BLOCK_N + offs_n
        inside = (rows < M) & ((columns < width) | EVEN_N)
        loaded = load_scaled(
            x_row, mask_row, columns, inside, seen, scale, SCALE_IN_EXP2, CAUSAL, ""
        )
        chunks = chunks + (loaded,)  # noqa: RUF005
    m_lanes = chunks[0].to(tl.float32)
    for chunk in tl.static_range(1, NUM_CHUNKS):
        m_lanes = tl.maximum(m_lanes, chunks[chunk].to(tl.float32))
    m = row_max(m_lanes)  # [BLOCK_M, 1]
    if PEELED:
        m = tl.maximum(m, row_max(peel.to(tl.float32)))
    m = finite_or_zero(m)
    l_lanes = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    numerators = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        numerator = exp_numerators(chunks[chunk], m, scale_log2e)
        l_lanes += numerator
        numerators = numerators + (numerator,)  # noqa: RUF005
    l = row_sum(l_lanes)  # [BLOCK_M, 1]
    if PEELED:
        at_peel = exp_numerators(peel, m, scale_log2e)
        l += row_sum(at_peel)
    inv_l = inv_sum(l, y_ptr.dtype.element_ty)
    if CAUSAL:
        # Keys that are not seen have numerators of zero, so l is zero if a row sees none.
        inv_l = tl.where(end > 0, inv_l, 0.0)
    y_row = y_ptr + rows * N
    if PEELED:
        if BLOCK_M == 1:
            y_row = y_ptr + tl.program_id(0).to(tl.int64) * N
        store_as(y_row + peel_cols, at_peel * inv_l, peel_mask)
        y_row = body_ptr(y_row, lead)
    for chunk in tl.static_range(NUM_CHUNKS):
        columns = chunk * BLOCK_N + offs_n
        inside = (rows < M) & ((columns < width) | EVEN_N)
        store_as(y_row + columns, numerators[chunk] * inv_l, inside)


FORWARD_GENERAL = Configs(
    _forward_general_kernel, ROW_CANDIDATES, choose_row, suits_forward_row, "softmax"
)

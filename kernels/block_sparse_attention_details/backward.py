"""The backward pass of block-sparse attention: dq by rows of blocks, dk and dv by columns.

The formulas are those of `attention_details/backward.py`. Each gradient has one owner, which walks
the kept blocks of its row or column and sums in registers. So nothing is added in memory, and
results do not vary. The first kernel also computes delta for the second. On Hopper the form in
`backward_hopper.py` takes their place where results may vary.
"""

import torch
import triton
import triton.language as tl

from .._runtime.call_cache import cached_launch
from .._runtime.configs import Configs
from .._runtime.device import has_tensor_memory, shared_bytes
from .._triton.memory import store_as
from ..attention_details.backward import delta_of, load_rows
from ..attention_details.hopper_tiles import readable
from ..attention_details.launch import (
    SMALL,
    first_to_fit,
    in_rows,
    in_tensor_memory,
    like,
    strides_of,
    tile,
)
from ..attention_details.scores import factor_of, load_tile
from . import backward_hopper as hopper
from .forward_hopper import suits
from .launch import fitting, options_of
from .walk import dkdv_of_entries, dq_of_entries, key_entries, row_entries


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, dlse_ptr, stats_ptr, delta_ptr, dq_ptr,
    offsets_ptr, indices_ptr, order_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os,
    stride_dob, stride_doh, stride_dos, stride_dqb, stride_dqh, stride_dqs, stride_lb, stride_lh,
    H, GROUP, SQ, SK, blocks, right, scale, rows,
    CAUSAL: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq = scale dS k, and delta = rowsum(dO O) - dlse for the kernel of dk and dv.

    Grid: blocks * BLOCK / BLOCK_M * B * H programs. A program owns BLOCK_M rows of one head. It
    reads them in q, out, dout, dlse and stats, walks the kept blocks of their list, and writes them
    in dq and delta. dlse may be None. Delta is [B, H, SQ]. Other parameters are those of the
    forward kernel.
    """
    NATURAL: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    # torch.compile hands scalars over in float64.
    scale = tl.cast(scale, tl.float32)
    factor = factor_of(scale, NATURAL)
    PADDED: tl.constexpr = BLOCK_D != D
    PARTS: tl.constexpr = BLOCK // BLOCK_M
    tiles = blocks * PARTS
    tile, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    head = head.to(tl.int64)
    line = b * stride_lb + h * stride_lh
    block = tl.load(order_ptr + line * blocks + tile // PARTS)
    first = tl.load(offsets_ptr + line * (blocks + 1) + block)
    last = tl.load(offsets_ptr + line * (blocks + 1) + block + 1)
    start_m = block * BLOCK + tile % PARTS * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside, wide = offs_m < SQ, offs_d < D
    row, key = offs_m.to(tl.int64)[:, None], offs_n.to(tl.int64)[:, None]
    q_ptrs = q_ptr + b * stride_qb + h * stride_qh + row * stride_qs + offs_d[None, :]
    out_ptrs = out_ptr + b * stride_ob + h * stride_oh + row * stride_os + offs_d[None, :]
    dout_ptrs = dout_ptr + b * stride_dob + h * stride_doh + row * stride_dos + offs_d[None, :]
    k_ptrs = k_ptr + b * stride_kb + h // GROUP * stride_kh + key * stride_ks + offs_d[None, :]
    v_ptrs = v_ptr + b * stride_vb + h // GROUP * stride_vh + key * stride_vs + offs_d[None, :]
    place = head * SQ + offs_m
    q = load_tile(q_ptrs, inside[:, None], wide[None, :], True, PADDED)
    dout = load_tile(dout_ptrs, inside[:, None], wide[None, :], True, PADDED)
    # A row that is outside has weights of zero.
    m = load_rows(stats_ptr + place, inside, float("inf"), True, True)[:, None]
    log_l = load_rows(stats_ptr + rows + place, inside, 0.0, True, NATURAL)[:, None]
    whole, last = key_entries(
        indices_ptr, first, last, start_m, SK, right, CAUSAL, CUT, BLOCK, BLOCK_M
    )
    if NATURAL:
        # The rounded O would give another delta.
        sums = dq_of_entries(
            tl.zeros((BLOCK_M, 2), tl.float32), q, dout, None, m, log_l, k_ptrs, v_ptrs,
            indices_ptr, offs_m, wide, first, last, stride_ks, stride_vs, SQ, SK, right, factor,
            CAUSAL, True, PRECISION, PADDED, BLOCK, BLOCK_N,
        )  # fmt: skip
        delta = delta_of(sums)
    else:
        out = load_tile(out_ptrs, inside[:, None], wide[None, :], True, PADDED)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + place, mask=inside, other=0.0)
    tl.store(delta_ptr + place, delta, mask=inside)
    delta = delta[:, None]
    dq = dq_of_entries(
        tl.zeros((BLOCK_M, BLOCK_D), tl.float32), q, dout, delta, m, log_l, k_ptrs, v_ptrs,
        indices_ptr, offs_m, wide, first, whole, stride_ks, stride_vs, SQ, SK, right, factor,
        CAUSAL, False, PRECISION, PADDED, BLOCK, BLOCK_N,
    )  # fmt: skip
    if CUT:
        dq = dq_of_entries(
            dq, q, dout, delta, m, log_l, k_ptrs, v_ptrs, indices_ptr, offs_m, wide, whole, last,
            stride_ks, stride_vs, SQ, SK, right, factor,
            CAUSAL, True, PRECISION, PADDED, BLOCK, BLOCK_N,
        )  # fmt: skip
    dq_ptrs = dq_ptr + b * stride_dqb + h * stride_dqh + row * stride_dqs + offs_d[None, :]
    store_as(dq_ptrs, dq * scale, inside[:, None] & wide[None, :])


@triton.jit
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, stats_ptr, delta_ptr, dk_ptr, dv_ptr,
    offsets_ptr, indices_ptr, order_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_dob, stride_doh, stride_dos,
    stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs, stride_lb, stride_lh,
    H, GROUP, SQ, SK, blocks, right, scale, rows,
    CAUSAL: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dv = Pᵀ dO and dk = scale dSᵀ q, summed over the query heads of a key head.

    Grid: blocks * BLOCK / BLOCK_N * B * H / GROUP programs. A program owns BLOCK_N keys of one key
    head, reads them in k and v, and writes them in dk and dv. In each of the GROUP query heads it
    walks the kept blocks of the column's list, in q, dout, stats and delta.

    blocks, offsets, indices, order: those of columns. The order is that of the first query head.
    CUT: whether the diagonal or SQ cuts a block. Other parameters are those of the forward kernel.
    """
    NATURAL: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    scale = tl.cast(scale, tl.float32)
    factor = factor_of(scale, NATURAL)
    PADDED: tl.constexpr = BLOCK_D != D
    PARTS: tl.constexpr = BLOCK // BLOCK_N
    tiles = blocks * PARTS
    tile, key_head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    key_heads = H // GROUP
    b, key_head = (key_head // key_heads).to(tl.int64), (key_head % key_heads).to(tl.int64)
    line = b * stride_lb + key_head * GROUP * stride_lh
    block = tl.load(order_ptr + line * blocks + tile // PARTS)
    start_n = block * BLOCK + tile % PARTS * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    inside, wide = offs_n < SK, offs_d < D
    row, key = offs_m.to(tl.int64)[:, None], offs_n.to(tl.int64)[:, None]
    k_ptrs = k_ptr + b * stride_kb + key_head * stride_kh + key * stride_ks + offs_d[None, :]
    v_ptrs = v_ptr + b * stride_vb + key_head * stride_vh + key * stride_vs + offs_d[None, :]
    q_ptrs = q_ptr + b * stride_qb + row * stride_qs + offs_d[None, :]
    dout_ptrs = dout_ptr + b * stride_dob + row * stride_dos + offs_d[None, :]
    k = load_tile(k_ptrs, inside[:, None], wide[None, :], True, PADDED)
    v = load_tile(v_ptrs, inside[:, None], wide[None, :], True, PADDED)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for member in range(GROUP):
        h = key_head * GROUP + member
        head = b * H + h
        head_q_ptrs, head_dout_ptrs = q_ptrs + h * stride_qh, dout_ptrs + h * stride_doh
        list_ptr = offsets_ptr + (b * stride_lb + h * stride_lh) * (blocks + 1) + block
        first, last = tl.load(list_ptr), tl.load(list_ptr + 1)
        begin, whole, cut = row_entries(
            indices_ptr, first, last, start_n, SQ, right, CAUSAL, CUT, BLOCK, BLOCK_N
        )
        if CAUSAL:
            dk, dv = dkdv_of_entries(
                dk, dv, k, v, head_q_ptrs, head_dout_ptrs, stats_ptr, delta_ptr, indices_ptr,
                offs_n, wide, begin, whole, stride_qs, stride_dos, SQ, SK, right, factor, head,
                rows, CAUSAL, True, PRECISION, PADDED, BLOCK, BLOCK_M,
            )  # fmt: skip
        dk, dv = dkdv_of_entries(
            dk, dv, k, v, head_q_ptrs, head_dout_ptrs, stats_ptr, delta_ptr, indices_ptr,
            offs_n, wide, whole, cut, stride_qs, stride_dos, SQ, SK, right, factor, head,
            rows, CAUSAL, False, PRECISION, PADDED, BLOCK, BLOCK_M,
        )  # fmt: skip
        if CUT:
            dk, dv = dkdv_of_entries(
                dk, dv, k, v, head_q_ptrs, head_dout_ptrs, stats_ptr, delta_ptr, indices_ptr,
                offs_n, wide, cut, last, stride_qs, stride_dos, SQ, SK, right, factor, head,
                rows, CAUSAL, True, PRECISION, PADDED, BLOCK, BLOCK_M,
            )  # fmt: skip
    keep = inside[:, None] & wide[None, :]
    dk_ptrs = dk_ptr + b * stride_dkb + key_head * stride_dkh + key * stride_dks + offs_d[None, :]
    dv_ptrs = dv_ptr + b * stride_dvb + key_head * stride_dvh + key * stride_dvs + offs_d[None, :]
    store_as(dk_ptrs, dk * scale, keep)
    store_as(dv_ptrs, dv, keep)


def block_sparse_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    row_offsets: torch.Tensor,
    row_indices: torch.Tensor,
    row_order: torch.Tensor,
    column_offsets: torch.Tensor,
    column_indices: torch.Tensor,
    column_order: torch.Tensor,
    block_size: int,
    scale: float,
    causal: bool,
    keys: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return dq, dk and dv; the latter two are None unless `keys`.

    q, k, v, scale, causal: as `block_sparse_fwd` was given them. The out and stats are those that
    it returned. dout, dlse: the gradients of its results. The lists are those of a BlockMask.
    If deterministic, dq does not depend on an order of sums in memory.
    """
    q, k, v, dout = map(in_rows, (q, k, v, dout))
    if keys and not deterministic and q.numel() and suits(q, k, v, block_size) and readable(dout):
        config = HOPPER_BACKWARD.pick(q.device, d=q.shape[3], causal=causal)
        columns = column_offsets, column_indices, column_order
        return hopper.backward_hopper(
            q, k, v, out, stats, dout, dlse, *columns, block_size, scale, causal, config
        )
    b, h, sq, d = q.shape
    heads = k.shape[1]
    dq, dk, dv = like(q), like(k) if keys else None, like(v) if keys else None
    delta = torch.empty((b, h, sq), dtype=torch.float32, device=q.device)
    given = {
        "d": d, "itemsize": q.element_size(), "block": block_size,
        "shared": shared_bytes(q.device),
    }  # fmt: skip
    shared = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "dout_ptr": dout, "stats_ptr": stats,
        "delta_ptr": delta, "scale": scale, "rows": b * h * sq,
        **strides_of(q=q, k=k, v=v, do=dout),
    }  # fmt: skip
    if dq.numel():
        config = DQ.pick(q.device, **given)
        blocks = row_order.shape[2]
        _dq_kernel[(blocks * (block_size // config["BLOCK_M"]) * b * h,)](
            out_ptr=out, dlse_ptr=None if dlse is None else dlse.contiguous(), dq_ptr=dq,
            offsets_ptr=row_offsets, indices_ptr=row_indices, order_ptr=row_order,
            **shared, **strides_of(o=out, dq=dq),
            **options_of(q, k, row_order, block_size, causal, walked=k.shape[2]), **config,
        )  # fmt: skip
    if keys and dk.numel():
        config = DKDV.pick(q.device, **given, tensor_memory=has_tensor_memory(q.device))
        blocks = column_order.shape[2]
        _dkdv_kernel[(blocks * (block_size // config["BLOCK_N"]) * b * heads,)](
            dk_ptr=dk, dv_ptr=dv,
            offsets_ptr=column_offsets, indices_ptr=column_indices, order_ptr=column_order,
            **shared, **strides_of(dk=dk, dv=dv),
            **options_of(q, k, column_order, block_size, causal, walked=sq), **config,
        )  # fmt: skip
    return dq, dk, dv


# Those of attention, and such as suit blocks of 64.
DQ_CONFIGS = (tile(128, 64, 8, 2), tile(64, 64, 4, 2), tile(128, 32, 8, 2), tile(64, 32, 4, 2))
DKDV_CONFIGS = (tile(64, 128, 8, 2), tile(64, 64, 8, 2), tile(32, 64, 8, 2), tile(32, 64, 4, 2))
NARROW_DKDV = tile(64, 64, 4, 2)
MORE_DQ = (tile(128, 64, 8, 3), tile(64, 64, 4, 3))
MORE_DKDV = (tile(64, 128, 8, 3), tile(64, 64, 4, 3))


def _choose_dq(d, itemsize, block, shared):
    # Two tiles stay, q and the gradient of out, beside the stages of k and v.
    ranked = (*DQ_CONFIGS, *SMALL) if itemsize == 2 else SMALL
    return first_to_fit(fitting(ranked, block), ("BLOCK_M", "BLOCK_N"), 2, d, itemsize, shared)


def _choose_dkdv(d, itemsize, block, shared, tensor_memory):
    # Wide heads spill with more rows or keys, narrow ones do not with fewer warps.
    widest, *others = DKDV_CONFIGS
    ranked = (widest, NARROW_DKDV, *others) if d <= 64 else DKDV_CONFIGS[2 * (d > 128) :]
    ranked = (*ranked, *SMALL) if itemsize == 2 else SMALL
    ranked = in_tensor_memory(ranked, d, tensor_memory)
    return first_to_fit(fitting(ranked, block), ("BLOCK_N", "BLOCK_M"), 2, d, itemsize, shared)


def _suits(candidate, block, **key):
    return bool(fitting((candidate,), block))


FAMILY = "block_sparse_attention"
MOST_DQ = (*DQ_CONFIGS, *SMALL, *MORE_DQ)
MOST_DKDV = (*DKDV_CONFIGS, NARROW_DKDV, *SMALL, *MORE_DKDV)
DQ = Configs(_dq_kernel, MOST_DQ, _choose_dq, _suits, FAMILY)
DKDV = Configs(_dkdv_kernel, MOST_DKDV, _choose_dkdv, _suits, FAMILY)
HOPPER_BACKWARD = hopper.BACKWARD

block_sparse_bwd = cached_launch(block_sparse_bwd)

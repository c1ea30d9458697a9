"""The backward pass of attention: dq, dk and dv from the recomputed scores.

With P = softmax(S), S = scale q kᵀ + mask, O = P v:
    dv = Pᵀ dO,  dP = dO vᵀ,  dS = P (dP - delta),  dq = scale dS k,  dk = scale dSᵀ q,
delta = rowsum(dO O) - dlse, since the derivative of lse is P. With dropout P v and dO vᵀ are taken
of the entries that it keeps, over their share; delta stays (Dao, "FlashAttention-2", 2023). With a
softcap c, S is C + mask, C = c tanh(scale q kᵀ / c), and dS has the factor 1 - (C / c)².

FLOPs: 14 D a pair, of which 10 D are needed: the scores and dP are computed by both kernels. That
is the price of results that depend on no order: each gradient has one owner, which sums in
registers, and nothing is added in memory. Hopper has a faster form without that promise:
`backward_hopper.py`. The first kernel also computes delta for the second, so
that dO and O are not read once more for it.

The kernel of dk and dv holds its scores transposed, [keys, rows]. So Pᵀ and dSᵀ go from the
accumulator of one product to the factor of the next in registers.
"""

import torch
import triton
import triton.language as tl

from .._runtime.call_cache import cached_launch
from .._runtime.configs import Configs
from .._runtime.device import has_tensor_memory, shared_bytes
from .._triton.math import LOG2E
from .._triton.memory import store_as
from ..random_details.philox import boxed
from . import backward_hopper as hopper
from .forward_hopper import suits
from .hopper_tiles import readable
from .launch import (
    SMALL,
    first_to_fit,
    in_rows,
    in_tensor_memory,
    like,
    options_of,
    strides_of,
    strides_of_mask,
    tile,
)
from .scores import (
    capped,
    factor_of,
    kept_entries,
    key_range,
    load_tile,
    masked_scores,
    row_range,
    uncapped_gradient,
    unit,
)


@triton.jit
def weights_of(scores, factor, m, log_l, NATURAL: tl.constexpr):
    """The weights of rows with these statistics; log_l counts in float32 alone."""
    if NATURAL:
        return tl.exp2((scores * factor - m) * LOG2E - log_l)
    else:
        return tl.exp2(scores * factor - m)


@triton.jit
def sums_of_rows(p, dp):
    """rowsum(P dP) and rowsum(P) of a tile of weights, [rows, 2]."""
    return tl.join(tl.sum(p * dp, 1), tl.sum(p, 1))


@triton.jit
def delta_of(sums):
    """The mean of dP under the weights, from the sums of all tiles.

    Rounded weights add up to one but for an ulp. That ulp of delta would be the error of a dS that
    is the difference of two nearly equal numbers. A mean does not have it, and the mean of a row
    with a single weight is its dP, to the last bit.
    """
    weighted, total = tl.split(sums)
    # The weights of a row that sees no key are zeros.
    return weighted / tl.where(total > 0.0, total, 1.0)


@triton.jit
def load_rows(ptrs, inside, outside, MASKED: tl.constexpr, KEPT: tl.constexpr):
    """A number for each row; `outside` for rows outside, if MASKED; zeros if it is not KEPT."""
    if not KEPT:
        return tl.zeros(inside.shape, tl.float32)
    elif MASKED:
        return tl.load(ptrs, mask=inside, other=outside)
    else:
        return tl.load(ptrs)


@triton.jit
def _loop_keys(
    acc, q, dout, delta, m, log_l, k_ptrs, v_ptrs, mask_ptr, offs_m, wide, first, last,
    stride_ks, stride_vs, stride_mm, stride_mn,
    SQ, SK, left, right, scale, softcap, seed, dropped, inverse, head,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """acc with the keys from first to last: dq, not yet scaled, or without delta `sums_of_rows`."""
    NATURAL: tl.constexpr = q.dtype == tl.float32
    rest = unit(softcap, scale)
    offs_n = tl.arange(0, BLOCK_N)
    # A sequence length of one is a compile-time constant, and so is what follows from it.
    k_ptrs += tl.cast(first, tl.int64) * stride_ks
    v_ptrs += tl.cast(first, tl.int64) * stride_vs
    for start in range(first, last, BLOCK_N):
        inside = start + offs_n < SK
        k = load_tile(k_ptrs, inside[:, None], wide[None, :], MASKED, PADDED)
        v = load_tile(v_ptrs, inside[:, None], wide[None, :], MASKED, PADDED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        before = capped(scores, scale, softcap, NATURAL)
        scores = masked_scores(
            before, mask_ptr, offs_m[:, None], (start + offs_n)[None, :], stride_mm, stride_mn,
            SQ, SK, left, right, rest, LEFT, RIGHT, MASKED, NATURAL,
        )  # fmt: skip
        p = weights_of(scores, unit(mask_ptr, rest), m, log_l, NATURAL)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            kept = kept_entries(seed, dropped, head, offs_m, start, SQ, SK, BLOCK_M, BLOCK_N)
            dp = tl.where(kept, dp * inverse, 0.0)
        if delta is None:
            acc += sums_of_rows(p, dp)
        else:
            ds = uncapped_gradient(p * (dp - delta), before, softcap, NATURAL)
            acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
        k_ptrs += tl.cast(stride_ks, tl.int64) * BLOCK_N
        v_ptrs += tl.cast(stride_vs, tl.int64) * BLOCK_N
    return acc


@triton.jit
def _all_keys(
    acc, q, dout, delta, m, log_l, k_ptrs, v_ptrs, mask_ptr, offs_m, wide, start_m,
    stride_ks, stride_vs, stride_mm, stride_mn,
    SQ, SK, left, right, scale, softcap, seed, dropped, inverse, head,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """acc with all keys that the rows from start_m on see; see `_loop_keys`."""
    first, whole, cut, last = key_range(start_m, SK, left, right, LEFT, RIGHT, BLOCK_M, BLOCK_N)
    if LEFT:
        acc = _loop_keys(
            acc, q, dout, delta, m, log_l, k_ptrs, v_ptrs, mask_ptr, offs_m, wide,
            first, tl.minimum(whole, last), stride_ks, stride_vs, stride_mm, stride_mn,
            SQ, SK, left, right, scale, softcap, seed, dropped, inverse, head,
            LEFT, RIGHT, DROPOUT, True, PRECISION, PADDED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    acc = _loop_keys(
        acc, q, dout, delta, m, log_l, k_ptrs, v_ptrs, mask_ptr, offs_m, wide,
        whole, cut, stride_ks, stride_vs, stride_mm, stride_mn,
        SQ, SK, left, right, scale, softcap, seed, dropped, inverse, head,
        LEFT, RIGHT, DROPOUT, False, PRECISION, PADDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    return _loop_keys(
        acc, q, dout, delta, m, log_l, k_ptrs, v_ptrs, mask_ptr, offs_m, wide,
        cut, last, stride_ks, stride_vs, stride_mm, stride_mn,
        SQ, SK, left, right, scale, softcap, seed, dropped, inverse, head,
        LEFT, RIGHT, DROPOUT, True, PRECISION, PADDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def transposed_dot(a, b, PRECISION: tl.constexpr):
    """b aᵀ; of float32 it is rounded as a bᵀ is by the kernel of dq."""
    if a.dtype == tl.float32:
        return tl.trans(tl.dot(a, tl.trans(b), input_precision=PRECISION))
    else:
        return tl.dot(b, tl.trans(a), input_precision=PRECISION)


@triton.jit
def _loop_rows(
    dk, dv, k, v, q_ptrs, dout_ptrs, mask_ptr, stats_ptr, delta_ptr, offs_n, wide, first, last,
    stride_qs, stride_dos, stride_mm, stride_mn,
    SQ, SK, left, right, scale, softcap, seed, dropped, inverse, head, place, rows, start_n,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk, not yet scaled, and dv with the rows from first to last. first: a multiple of BLOCK_M.

    place: the index of the head's first row in stats and delta, int64.
    """
    q_ptrs += tl.cast(first, tl.int64) * stride_qs
    dout_ptrs += tl.cast(first, tl.int64) * stride_dos
    NATURAL: tl.constexpr = k.dtype == tl.float32
    rest = unit(softcap, scale)
    for start in range(first, last, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        inside = offs_m < SQ
        q = load_tile(q_ptrs, inside[:, None], wide[None, :], MASKED, PADDED)
        dout = load_tile(dout_ptrs, inside[:, None], wide[None, :], MASKED, PADDED)
        places = place + offs_m
        # A row that is outside has weights of zero.
        m = load_rows(stats_ptr + places, inside, float("inf"), MASKED, True)
        log_l = load_rows(stats_ptr + rows + places, inside, 0.0, MASKED, NATURAL)
        delta = load_rows(delta_ptr + places, inside, 0.0, MASKED, True)
        scores = transposed_dot(q, k, PRECISION)  # [BLOCK_N, BLOCK_M]
        before = capped(scores, scale, softcap, NATURAL)
        scores = masked_scores(
            before, mask_ptr, offs_m[None, :], offs_n[:, None], stride_mm, stride_mn,
            SQ, SK, left, right, rest, LEFT, RIGHT, MASKED, NATURAL,
        )  # fmt: skip
        p = weights_of(scores, unit(mask_ptr, rest), m[None, :], log_l[None, :], NATURAL)
        if DROPOUT:
            kept = kept_entries(seed, dropped, head, offs_m, start_n, SQ, SK, BLOCK_M, BLOCK_N)
            kept = tl.trans(kept)
            left_p = tl.where(kept, p * inverse, 0.0)
        else:
            left_p = p
        dv = tl.dot(left_p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        dp = transposed_dot(dout, v, PRECISION)
        if DROPOUT:
            dp = tl.where(kept, dp * inverse, 0.0)
        ds = uncapped_gradient(p * (dp - delta[None, :]), before, softcap, NATURAL)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        q_ptrs += tl.cast(stride_qs, tl.int64) * BLOCK_M
        dout_ptrs += tl.cast(stride_dos, tl.int64) * BLOCK_M
    return dk, dv


@triton.jit
def dq_tile(
    q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr, dout_ptr, dlse_ptr, stats_ptr, delta_ptr, dq_ptr,
    stride_qs, stride_ks, stride_vs, stride_os, stride_dos, stride_dqs, stride_mm, stride_mn,
    tile, head, place, SQ, SK, left, right, scale, softcap, seed, dropped, inverse, rows,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write dq and delta of a tile of BLOCK_M rows of one head of one sequence.

    Pointers are those of the head's first row or key. In dlse, stats and delta `place` is the index
    of that row, int64. Other parameters are those of `attend_tile`.
    """
    NATURAL: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    # torch.compile hands scalars over in float64.
    scale, inverse = tl.cast(scale, tl.float32), tl.cast(inverse, tl.float32)
    factor = factor_of(scale, NATURAL)
    PADDED: tl.constexpr = BLOCK_D != D
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside, wide = offs_m < SQ, offs_d < D
    row, key = offs_m.to(tl.int64)[:, None], offs_n.to(tl.int64)[:, None]
    q_ptrs = q_ptr + row * stride_qs + offs_d[None, :]
    out_ptrs = out_ptr + row * stride_os + offs_d[None, :]
    dout_ptrs = dout_ptr + row * stride_dos + offs_d[None, :]
    k_ptrs = k_ptr + key * stride_ks + offs_d[None, :]
    v_ptrs = v_ptr + key * stride_vs + offs_d[None, :]
    places = place + offs_m
    q = load_tile(q_ptrs, inside[:, None], wide[None, :], True, PADDED)
    dout = load_tile(dout_ptrs, inside[:, None], wide[None, :], True, PADDED)
    # A row that is outside has weights of zero.
    m = load_rows(stats_ptr + places, inside, float("inf"), True, True)[:, None]
    log_l = load_rows(stats_ptr + rows + places, inside, 0.0, True, NATURAL)[:, None]
    if NATURAL:
        # The rounded O would give another delta.
        sums = _all_keys(
            tl.zeros((BLOCK_M, 2), tl.float32), q, dout, None, m, log_l, k_ptrs, v_ptrs, mask_ptr,
            offs_m, wide, tile * BLOCK_M, stride_ks, stride_vs, stride_mm, stride_mn,
            SQ, SK, left, right, factor, softcap, seed, dropped, inverse, head,
            LEFT, RIGHT, DROPOUT, PRECISION, PADDED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        delta = delta_of(sums)
    else:
        out = load_tile(out_ptrs, inside[:, None], wide[None, :], True, PADDED)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + places, mask=inside, other=0.0)
    tl.store(delta_ptr + places, delta, mask=inside)
    dq = _all_keys(
        tl.zeros((BLOCK_M, BLOCK_D), tl.float32), q, dout, delta[:, None], m, log_l,
        k_ptrs, v_ptrs, mask_ptr, offs_m, wide, tile * BLOCK_M,
        stride_ks, stride_vs, stride_mm, stride_mn,
        SQ, SK, left, right, factor, softcap, seed, dropped, inverse, head,
        LEFT, RIGHT, DROPOUT, PRECISION, PADDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    dq_ptrs = dq_ptr + row * stride_dqs + offs_d[None, :]
    store_as(dq_ptrs, dq * scale, inside[:, None] & wide[None, :])


@triton.jit
def dkdv_tile(
    q_ptr, k_ptr, v_ptr, mask_ptr, dout_ptr, stats_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_qh, stride_qs, stride_ks, stride_vs, stride_doh, stride_dos, stride_dks, stride_dvs,
    stride_mh, stride_mm, stride_mn,
    tile, first_head, key_head, place, apart,
    GROUP, SQ, SK, left, right, scale, softcap, seed, dropped, inverse, rows,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of a tile of BLOCK_N keys of one key head of one sequence.

    The pointers of k, v, dk and dv are those of the head's first key. Those of q, dout and the mask
    belong to the first row of query head 0. In the stream of dropout that head is `first_head`. In
    stats and delta the index of its row is `place`, and a head is `apart` from the next. The
    numbers first_head, place and key_head are int64. Other parameters are those of `attend_tile`.
    """
    NATURAL: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    scale, inverse = tl.cast(scale, tl.float32), tl.cast(inverse, tl.float32)
    factor = factor_of(scale, NATURAL)
    PADDED: tl.constexpr = BLOCK_D != D
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    inside, wide = offs_n < SK, offs_d < D
    row, key = offs_m.to(tl.int64)[:, None], offs_n.to(tl.int64)[:, None]
    k_ptrs = k_ptr + key * stride_ks + offs_d[None, :]
    v_ptrs = v_ptr + key * stride_vs + offs_d[None, :]
    q_ptrs = q_ptr + row * stride_qs + offs_d[None, :]
    dout_ptrs = dout_ptr + row * stride_dos + offs_d[None, :]
    k = load_tile(k_ptrs, inside[:, None], wide[None, :], True, PADDED)
    v = load_tile(v_ptrs, inside[:, None], wide[None, :], True, PADDED)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    first, whole, cut, last = row_range(
        tile * BLOCK_N, SQ, left, right, LEFT, RIGHT, BLOCK_M, BLOCK_N
    )
    for member in range(GROUP):
        h = key_head * GROUP + member
        head, head_place = first_head + h, place + h * apart
        head_q_ptrs, head_dout_ptrs = q_ptrs + h * stride_qh, dout_ptrs + h * stride_doh
        head_mask_ptr = mask_ptr
        if mask_ptr is not None:
            head_mask_ptr += h * stride_mh
        if RIGHT:
            dk, dv = _loop_rows(
                dk, dv, k, v, head_q_ptrs, head_dout_ptrs, head_mask_ptr, stats_ptr, delta_ptr,
                offs_n, wide, first, tl.minimum(whole, last),
                stride_qs, stride_dos, stride_mm, stride_mn, SQ, SK, left, right, factor, softcap,
                seed, dropped, inverse, head, head_place, rows, tile * BLOCK_N,
                LEFT, RIGHT, DROPOUT, True, PRECISION, PADDED, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        dk, dv = _loop_rows(
            dk, dv, k, v, head_q_ptrs, head_dout_ptrs, head_mask_ptr, stats_ptr, delta_ptr,
            offs_n, wide, whole, cut,
            stride_qs, stride_dos, stride_mm, stride_mn, SQ, SK, left, right, factor, softcap,
            seed, dropped, inverse, head, head_place, rows, tile * BLOCK_N,
            LEFT, RIGHT, DROPOUT, False, PRECISION, PADDED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        dk, dv = _loop_rows(
            dk, dv, k, v, head_q_ptrs, head_dout_ptrs, head_mask_ptr, stats_ptr, delta_ptr,
            offs_n, wide, cut, last,
            stride_qs, stride_dos, stride_mm, stride_mn, SQ, SK, left, right, factor, softcap,
            seed, dropped, inverse, head, head_place, rows, tile * BLOCK_N,
            LEFT, RIGHT, DROPOUT, True, PRECISION, PADDED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    keep = inside[:, None] & wide[None, :]
    store_as(dk_ptr + key * stride_dks + offs_d[None, :], dk * scale, keep)
    store_as(dv_ptr + key * stride_dvs + offs_d[None, :], dv, keep)


@triton.jit(do_not_specialize=["seed", "dropped"])
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr, dout_ptr, dlse_ptr, stats_ptr, delta_ptr, dq_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os,
    stride_dob, stride_doh, stride_dos, stride_dqb, stride_dqh, stride_dqs,
    stride_mb, stride_mh, stride_mm, stride_mn,
    H, GROUP, SQ, SK, left, right, scale, softcap, seed, dropped, inverse, rows,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq = scale dS k, and delta = rowsum(dO O) - dlse for the kernel of dk and dv.

    Grid: cdiv(SQ, BLOCK_M) * B * H programs, tiles of one head side by side. A program owns BLOCK_M
    rows of one head. It reads them in q, out, dout, dlse and stats, walks the keys that they see,
    and writes them in dq and delta. The mask and dlse may be None. Delta is
    [B, H, SQ]. Other parameters are those of the forward kernel.
    """
    tiles = tl.cdiv(SQ, BLOCK_M)
    tile, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if RIGHT:
        tile = tiles - 1 - tile
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    head = head.to(tl.int64)
    if mask_ptr is not None:
        mask_ptr += b * stride_mb + h * stride_mh
    dq_tile(
        q_ptr + b * stride_qb + h * stride_qh, k_ptr + b * stride_kb + h // GROUP * stride_kh,
        v_ptr + b * stride_vb + h // GROUP * stride_vh, mask_ptr,
        out_ptr + b * stride_ob + h * stride_oh, dout_ptr + b * stride_dob + h * stride_doh,
        dlse_ptr, stats_ptr, delta_ptr, dq_ptr + b * stride_dqb + h * stride_dqh,
        stride_qs, stride_ks, stride_vs, stride_os, stride_dos, stride_dqs, stride_mm, stride_mn,
        tile, head, head * SQ, SQ, SK, left, right, scale, softcap, seed, dropped, inverse, rows,
        LEFT, RIGHT, DROPOUT, PRECISION, D, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip


@triton.jit(do_not_specialize=["seed", "dropped"])
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, dout_ptr, stats_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_dob, stride_doh, stride_dos,
    stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
    stride_mb, stride_mh, stride_mm, stride_mn,
    H, GROUP, SQ, SK, left, right, scale, softcap, seed, dropped, inverse, rows,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dv = Pᵀ dO and dk = scale dSᵀ q, summed over the query heads of a key head.

    Grid: cdiv(SK, BLOCK_N) * B * H / GROUP programs, tiles of one key head side by side; causal
    ones start with the keys that most rows see. A program owns BLOCK_N keys of one key head, reads
    them in k and v, and writes them in dk and dv. In each of the GROUP query heads it walks the
    rows that see them, in q, dout, stats and delta. Parameters are those of the forward kernel.
    """
    tiles = tl.cdiv(SK, BLOCK_N)
    tile, key_head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    key_heads = H // GROUP
    b, key_head = (key_head // key_heads).to(tl.int64), (key_head % key_heads).to(tl.int64)
    if mask_ptr is not None:
        mask_ptr += b * stride_mb
    dkdv_tile(
        q_ptr + b * stride_qb, k_ptr + b * stride_kb + key_head * stride_kh,
        v_ptr + b * stride_vb + key_head * stride_vh, mask_ptr, dout_ptr + b * stride_dob,
        stats_ptr, delta_ptr, dk_ptr + b * stride_dkb + key_head * stride_dkh,
        dv_ptr + b * stride_dvb + key_head * stride_dvh,
        stride_qh, stride_qs, stride_ks, stride_vs, stride_doh, stride_dos, stride_dks, stride_dvs,
        stride_mh, stride_mm, stride_mn, tile, b * H, key_head, b * H * SQ, SQ,
        GROUP, SQ, SK, left, right, scale, softcap, seed, dropped, inverse, rows,
        LEFT, RIGHT, DROPOUT, PRECISION, D, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip


def attention_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    mask: torch.Tensor | None,
    seed: int | torch.Tensor,
    scale: float,
    softcap: float,
    inverse: float,
    dropped: int,
    left: int | None,
    right: int | None,
    keys: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return dq, dk and dv; the latter two are None unless `keys`.

    q, k, v, mask, seed, scale to right: as `attention_fwd` was given them. The out and stats are
    those that it returned. dout, dlse: the gradients of its results. If deterministic, dq does not
    depend on an order of sums in memory.
    """
    q, k, v, dout = map(in_rows, (q, k, v, dout))
    plain = mask is None and not dropped and not softcap and keys and not deterministic
    if plain and q.numel() and suits(q, k, v) and readable(dout):
        config = HOPPER_BACKWARD.pick(q.device, d=q.shape[3], causal=right is not None)
        return hopper.backward_hopper(q, k, v, out, stats, dout, dlse, scale, left, right, config)
    b, h, sq, d = q.shape
    heads, sk = k.shape[1:3]
    dq, dk, dv = like(q), like(k) if keys else None, like(v) if keys else None
    delta = torch.empty((b, h, sq), dtype=torch.float32, device=q.device)
    given = {"d": d, "itemsize": q.element_size(), "shared": shared_bytes(q.device)}
    shared = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "mask_ptr": mask, "dout_ptr": dout, "stats_ptr": stats,
        "delta_ptr": delta, "scale": scale, "softcap": softcap or None,
        "seed": boxed(seed, q.device), "rows": b * h * sq,
        **strides_of(q=q, k=k, v=v, do=dout), **strides_of_mask(mask, (b, h, sq, sk)),
        **options_of(q, k, left, right, dropped, inverse),
    }  # fmt: skip
    if dq.numel():
        config = DQ.pick(q.device, **given)
        _dq_kernel[(triton.cdiv(sq, config["BLOCK_M"]) * b * h,)](
            out_ptr=out, dlse_ptr=None if dlse is None else dlse.contiguous(), dq_ptr=dq,
            **shared, **strides_of(o=out, dq=dq), **config,
        )  # fmt: skip
    if keys and dk.numel():
        config = DKDV.pick(q.device, **given, tensor_memory=has_tensor_memory(q.device))
        _dkdv_kernel[(triton.cdiv(sk, config["BLOCK_N"]) * b * heads,)](
            dk_ptr=dk, dv_ptr=dv, **shared, **strides_of(dk=dk, dv=dv), **config
        )
    return dq, dk, dv


# The largest first, of those that a rule may fall back to for want of shared memory.
DQ_CONFIGS = (tile(128, 64, 8, 2), tile(128, 32, 8, 2), tile(64, 32, 4, 2), *SMALL)
DKDV_CONFIGS = (tile(64, 128, 8, 2), tile(32, 64, 8, 2), tile(32, 64, 4, 2), *SMALL)
MORE_DQ = (tile(128, 64, 8, 3), tile(64, 64, 4, 2), tile(64, 64, 4, 3))
MORE_DKDV = (tile(64, 128, 8, 3), tile(64, 64, 4, 2), tile(64, 64, 4, 3))


def _choose_dq(d, itemsize, shared):
    # Two tiles stay, q and the gradient of out, beside the stages of k and v.
    ranked = DQ_CONFIGS if itemsize == 2 else SMALL
    return first_to_fit(ranked, ("BLOCK_M", "BLOCK_N"), 2, d, itemsize, shared)


def _choose_dkdv(d, itemsize, shared, tensor_memory):
    # Wider heads spill with more rows or keys.
    ranked = DKDV_CONFIGS[d > 128 :] if itemsize == 2 else SMALL
    ranked = in_tensor_memory(ranked, d, tensor_memory)
    return first_to_fit(ranked, ("BLOCK_N", "BLOCK_M"), 2, d, itemsize, shared)


DQ = Configs(_dq_kernel, DQ_CONFIGS + MORE_DQ, _choose_dq, family="attention")
DKDV = Configs(_dkdv_kernel, DKDV_CONFIGS + MORE_DKDV, _choose_dkdv, family="attention")
HOPPER_BACKWARD = Configs(
    hopper.backward_hopper_kernel, hopper.CONFIGS, hopper.choose, family="attention"
)

attention_bwd = cached_launch(attention_bwd)

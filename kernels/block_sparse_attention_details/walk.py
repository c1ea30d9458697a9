"""Device functions that walk the lists of a block mask.

A list is ascending, so the blocks that the diagonal or the end of the sequence cuts stand together
at an end of it. `entries_below` finds where. All other blocks are walked without a mask of entries.
A block is walked in tiles. One loop runs over the tiles of all blocks, so the loads of the next
block begin while the last tile of this one is computed.
"""

import triton
import triton.language as tl

from ..attention_details.backward import load_rows, sums_of_rows, transposed_dot, weights_of
from ..attention_details.scores import add_values, load_tile, masked_scores, online_softmax

# Entries of a list that are compared at once.
AT_ONCE = tl.constexpr(128)


@triton.jit
def entries_below(indices_ptr, first, last, limit):
    """The place, from first to last, at which a list reaches `limit`."""
    found = first
    for start in range(first, last, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        index = tl.load(indices_ptr + at, mask=at < last, other=limit)
        found += tl.sum((index < limit).to(tl.int32), 0)
    return found


@triton.jit
def key_entries(
    indices_ptr, first, last, start_m, SK, right,
    CAUSAL: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The entries of a row's list that a tile of rows from start_m on walks: whole, last.

    All its rows see all keys of the entries from first to whole. Those from whole to last need a
    mask, and no row sees later ones. CUT: whether any block can be cut.
    """
    whole = last
    if CUT:
        limit = SK // BLOCK
        if CAUSAL:
            limit = tl.minimum(limit, tl.maximum(0, start_m + 1 + right) // BLOCK)
            seen = tl.cdiv(tl.maximum(0, start_m + BLOCK_M + right), BLOCK)
            last = entries_below(indices_ptr, first, last, seen)
        whole = entries_below(indices_ptr, first, last, limit)
    return whole, last


@triton.jit
def row_entries(
    indices_ptr, first, last, start_n, SQ, right,
    CAUSAL: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The entries of a column's list that a tile of keys from start_n on walks: begin, whole, cut.

    All rows of the entries from whole to cut see all its keys. Those from begin to whole and from
    cut to last need a mask, and no row of earlier ones sees any.
    """
    begin = first
    whole = first
    cut = last
    if CUT:
        if CAUSAL:
            unseen = tl.maximum(0, start_n - right) // BLOCK
            begin = entries_below(indices_ptr, first, last, unseen)
            full = tl.cdiv(tl.maximum(0, start_n + BLOCK_N - 1 - right), BLOCK)
            whole = entries_below(indices_ptr, begin, last, full)
        cut = entries_below(indices_ptr, whole, last, SQ // BLOCK)
    return begin, whole, cut


@triton.jit
def attend_entries(
    acc, l, m, q, k_ptrs, v_ptrs, indices_ptr, offs_m, wide, first, last,
    stride_ks, stride_vs, SQ, SK, right, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Take the keys of the entries from first to last into acc, l and m, as `attend_keys` does."""
    NATURAL: tl.constexpr = q.dtype == tl.float32
    PARTS: tl.constexpr = BLOCK // BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    index = tl.load(indices_ptr + first, mask=first < last, other=0)
    for at in range(first * PARTS, last * PARTS):
        start = index * BLOCK + at % PARTS * BLOCK_N
        following = (at + 1) // PARTS
        index = tl.load(indices_ptr + following, mask=following < last, other=0)
        inside = start + offs_n < SK
        k_tile = k_ptrs + start.to(tl.int64) * stride_ks
        k = load_tile(k_tile, inside[:, None], wide[None, :], MASKED, PADDED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        scores = masked_scores(
            scores, None, offs_m[:, None], (start + offs_n)[None, :], 0, 0,
            SQ, SK, 0, right, scale, False, CAUSAL, MASKED, NATURAL,
        )  # fmt: skip
        p, acc, l, m = online_softmax(acc, l, m, scores, scale, NATURAL)
        v_tile = v_ptrs + start.to(tl.int64) * stride_vs
        v = load_tile(v_tile, inside[:, None], wide[None, :], MASKED, PADDED)
        acc = add_values(acc, p, v, PRECISION)
    return acc, l, m


@triton.jit
def dq_of_entries(
    acc, q, dout, delta, m, log_l, k_ptrs, v_ptrs, indices_ptr, offs_m, wide, first, last,
    stride_ks, stride_vs, SQ, SK, right, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """acc with the keys of the entries: dq, not yet scaled, or without delta `sums_of_rows`."""
    NATURAL: tl.constexpr = q.dtype == tl.float32
    PARTS: tl.constexpr = BLOCK // BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    index = tl.load(indices_ptr + first, mask=first < last, other=0)
    for at in range(first * PARTS, last * PARTS):
        start = index * BLOCK + at % PARTS * BLOCK_N
        following = (at + 1) // PARTS
        index = tl.load(indices_ptr + following, mask=following < last, other=0)
        inside = start + offs_n < SK
        k_tile = k_ptrs + start.to(tl.int64) * stride_ks
        v_tile = v_ptrs + start.to(tl.int64) * stride_vs
        k = load_tile(k_tile, inside[:, None], wide[None, :], MASKED, PADDED)
        v = load_tile(v_tile, inside[:, None], wide[None, :], MASKED, PADDED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        scores = masked_scores(
            scores, None, offs_m[:, None], (start + offs_n)[None, :], 0, 0,
            SQ, SK, 0, right, scale, False, CAUSAL, MASKED, NATURAL,
        )  # fmt: skip
        p = weights_of(scores, scale, m, log_l, NATURAL)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        if delta is None:
            acc += sums_of_rows(p, dp)
        else:
            ds = p * (dp - delta)
            acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    return acc


@triton.jit
def dkdv_of_entries(
    dk, dv, k, v, q_ptrs, dout_ptrs, stats_ptr, delta_ptr, indices_ptr, offs_n, wide, first, last,
    stride_qs, stride_dos, SQ, SK, right, scale, head, rows,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dk, not yet scaled, and dv with the rows of the entries from first to last.

    The scores are transposed, [BLOCK_N, BLOCK_M], as in `attention_details/backward.py`.
    """
    NATURAL: tl.constexpr = k.dtype == tl.float32
    PARTS: tl.constexpr = BLOCK // BLOCK_M
    index = tl.load(indices_ptr + first, mask=first < last, other=0)
    for at in range(first * PARTS, last * PARTS):
        start = index * BLOCK + at % PARTS * BLOCK_M
        following = (at + 1) // PARTS
        index = tl.load(indices_ptr + following, mask=following < last, other=0)
        offs_m = start + tl.arange(0, BLOCK_M)
        inside = offs_m < SQ
        q_tile = q_ptrs + start.to(tl.int64) * stride_qs
        dout_tile = dout_ptrs + start.to(tl.int64) * stride_dos
        q = load_tile(q_tile, inside[:, None], wide[None, :], MASKED, PADDED)
        dout = load_tile(dout_tile, inside[:, None], wide[None, :], MASKED, PADDED)
        place = head * SQ + offs_m
        # A row that is outside has weights of zero.
        m = load_rows(stats_ptr + place, inside, float("inf"), MASKED, True)
        log_l = load_rows(stats_ptr + rows + place, inside, 0.0, MASKED, NATURAL)
        delta = load_rows(delta_ptr + place, inside, 0.0, MASKED, True)
        scores = transposed_dot(q, k, PRECISION)  # [BLOCK_N, BLOCK_M]
        scores = masked_scores(
            scores, None, offs_m[None, :], offs_n[:, None], 0, 0,
            SQ, SK, 0, right, scale, False, CAUSAL, MASKED, NATURAL,
        )  # fmt: skip
        p = weights_of(scores, scale, m[None, :], log_l[None, :], NATURAL)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        dp = transposed_dot(dout, v, PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv

"""Device functions that the kernels of attention share.

They say which keys a row sees, cap scores, apply the mask, draw the bits of dropout, and compute a
tile of rows of the forward pass. Offsets of rows and of keys come with two dimensions, so a tile
may be [rows, keys] or its transpose.

Row i stands at position p = i + Sk - Sq of the keys: the last row stands at the last key. A bounded
row sees the keys from i + left to i + right. So `left` is Sk - Sq less the window's left size, and
`right` is Sk - Sq plus its right size. The right size is zero if the attention is causal.

Scores of 16 bits, and m with them, are in base 2: scale and log2(e) fold into one factor. Scores of
float32 are natural. There the rounding of that factor would show, and a large score that is m shall
be subtracted from itself before anything is rounded.
"""

import triton
import triton.language as tl

from .._triton.math import LN2, LOG2E, tanh_of
from .._triton.memory import store_as
from ..random_details.philox import MULTIPLIER_0, MULTIPLIER_1, ROUNDS, STEP_0, STEP_1, number

# Elements that one call of the generator serves: each takes half a word of four.
PER_CALL = tl.constexpr(8)
# Values of a tile below the one are multiplied by the other: both are powers of two.
TINY, LIFT = tl.constexpr(2.0**-60), tl.constexpr(2.0**60)


@triton.jit
def load_tile(ptrs, inside, wide, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """A tile of q, k, v or a gradient, zero outside.

    inside: rows within the sequence, asked if MASKED. wide: columns within the head, asked if
    PADDED.
    """
    if MASKED and PADDED:
        return tl.load(ptrs, mask=inside & wide, other=0.0)
    elif MASKED:
        return tl.load(ptrs, mask=inside, other=0.0)
    elif PADDED:
        return tl.load(ptrs, mask=wide, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def key_range(
    start_m, SK, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The keys that a tile of rows from start_m on sees: first, whole, cut, last.

    All its rows see the keys from whole to cut. Keys from first to whole and from cut to last need
    a mask. All but last are multiples of BLOCK_N.
    """
    first, last = 0, SK
    cut = SK
    if RIGHT:
        last = tl.maximum(0, tl.minimum(SK, start_m + BLOCK_M + right))
        cut = tl.maximum(0, tl.minimum(SK, start_m + 1 + right))
    whole = first
    if LEFT:
        first = tl.maximum(0, start_m + left) // BLOCK_N * BLOCK_N
        whole = tl.cdiv(tl.maximum(0, start_m + BLOCK_M - 1 + left), BLOCK_N) * BLOCK_N
        # A window narrower than the tile has no key that all rows see.
        whole = tl.minimum(whole, tl.cdiv(last, BLOCK_N) * BLOCK_N)
        whole = tl.maximum(first, whole)
    cut = tl.maximum(whole, cut // BLOCK_N * BLOCK_N)
    return first, whole, cut, last


@triton.jit
def row_range(
    start_n, SQ, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The rows that see a tile of keys from start_n on: first, whole, cut, last.

    As `key_range` with rows and keys in each other's place; all but last are multiples of BLOCK_M.
    """
    first, last = 0, SQ
    cut = SQ
    if LEFT:
        last = tl.maximum(0, tl.minimum(SQ, start_n + BLOCK_N - left))
        cut = tl.maximum(0, tl.minimum(SQ, start_n + 1 - left))
    whole = first
    if RIGHT:
        first = tl.maximum(0, start_n - right) // BLOCK_M * BLOCK_M
        whole = tl.cdiv(tl.maximum(0, start_n + BLOCK_N - 1 - right), BLOCK_M) * BLOCK_M
        whole = tl.minimum(whole, tl.cdiv(last, BLOCK_M) * BLOCK_M)
        whole = tl.maximum(first, whole)
    cut = tl.maximum(whole, cut // BLOCK_M * BLOCK_M)
    return first, whole, cut, last


@triton.jit
def masked_scores(
    scores, mask_ptr, rows, keys, stride_mm, stride_mn, SQ, SK, left, right, scale,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Scores with the mask added, and minus infinity for keys that a row does not see.

    scores holds what `capped` returns. mask_ptr is that of this head, or None. scale is the factor
    that capping left. It is applied only if there is a mask; `unit` says what remains to do.
    """
    if mask_ptr is not None:
        ptrs = mask_ptr + rows.to(tl.int64) * stride_mm + keys.to(tl.int64) * stride_mn
        mask = tl.load(ptrs, mask=(rows < SQ) & (keys < SK), other=0)
        if mask.dtype.is_floating():
            mask = mask.to(tl.float32)
            scores = scores * scale + (mask if NATURAL else mask * LOG2E)
        else:
            scores = tl.where(mask != 0, scores * scale, -float("inf"))
    if MASKED:
        keep = keys < SK
        if RIGHT:
            keep = keep & (keys <= rows + right)
        if LEFT:
            keep = keep & (keys >= rows + left)
        scores = tl.where(keep, scores, -float("inf"))
    return scores


@triton.jit
def factor_of(scale, NATURAL: tl.constexpr):
    """The factor of scores: the scale, natural or for base 2."""
    # torch.compile hands scalars over in float64.
    scale = tl.cast(scale, tl.float32)
    return scale if NATURAL else scale * LOG2E


@triton.jit
def power(x, base, NATURAL: tl.constexpr):
    """exp(x - base), or 2**(x - base)."""
    if NATURAL:
        return tl.exp2((x - base) * LOG2E)
    else:
        return tl.exp2(x - base)


@triton.jit
def unit(applied, scale):
    """The factor that is left to apply: one after a softcap or a mask, the scale if it is None."""
    if applied is None:
        return scale
    else:
        return 1.0


@triton.jit
def capped(scores, scale, softcap, NATURAL: tl.constexpr):
    """softcap tanh(scale scores / softcap); the scores as they are if softcap is None.

    scale: that of `factor_of`, so the result is natural or in base 2. `unit(softcap, scale)` is the
    factor that is left to apply.
    """
    if softcap is None:
        return scores
    else:
        softcap = factor_of(softcap, NATURAL)
        return softcap * tanh_of(scores * (scale / softcap), NATURAL)


@triton.jit
def uncapped_gradient(ds, scores, softcap, NATURAL: tl.constexpr):
    """The gradient of scores before the cap from ds, that behind it. scores: those of `capped`."""
    if softcap is None:
        return ds
    else:
        # The derivative of tanh is 1 - tanh².
        share = scores * (1 / factor_of(softcap, NATURAL))
        return ds * (1 - share * share)


@triton.jit
def kept_entries(
    seed, dropped, head, offs_m, start_n, SQ, SK,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Whether dropout keeps an entry: [BLOCK_M, BLOCK_N], from row offs_m[0] and key start_n on.

    head: batch * H + head, int64. Each row of scores takes ceil(SK / 8) calls of the stream of the
    seed, so an entry has its bits by its place alone. An entry is kept if its half word is at least
    `dropped`.
    """
    calls = (head * SQ + offs_m.to(tl.int64)) * tl.cdiv(SK, PER_CALL)
    calls = calls[:, None] + start_n // PER_CALL + tl.arange(0, BLOCK_N // PER_CALL)[None, :]
    seed = number(seed)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = (calls & 0xFFFFFFFF).to(tl.uint32), (calls >> 32).to(tl.uint32)
    c2 = tl.zeros((BLOCK_M, BLOCK_N // PER_CALL), tl.uint32)
    c3 = c2
    for _ in tl.static_range(ROUNDS):
        p0, p1 = c0.to(tl.uint64) * MULTIPLIER_0, c2.to(tl.uint64) * MULTIPLIER_1
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0, k1 = k0 + STEP_0, k1 + STEP_1
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    # At the top of a word, what is below 16 bits decides nothing. Zero less one is the greatest.
    bound = (tl.cast(dropped, tl.uint32) << 16) - 1
    return tl.join(words << 16, words).reshape(BLOCK_M, BLOCK_N) > bound


@triton.jit
def online_softmax(acc, l, m, scores, factor, NATURAL: tl.constexpr):
    """The weights p of a tile [BLOCK_M, BLOCK_N] of scores; acc, l and m with it in their scale."""
    m_new = tl.maximum(m, tl.max(scores, 1) * factor)
    # A row that has only seen minus infinity must not subtract it from itself.
    base = tl.where(m_new == -float("inf"), 0.0, m_new)
    p = power(scores * factor, base[:, None], NATURAL)
    shrink = power(m, base, NATURAL)
    l = l * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    return p, acc, l, m_new


@triton.jit
def add_values(acc, p, v, PRECISION: tl.constexpr):
    """acc + p v."""
    if v.dtype == tl.float32:
        # A float32 product is made of parts of its factors, which are subnormal, and lost on the
        # tensor cores, long before the factors are.
        lift = tl.where(tl.max(tl.abs(v)) < TINY, LIFT, 1.0)
        return acc + tl.dot(p, v * lift, input_precision=PRECISION) / lift
    else:
        return tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)


@triton.jit
def store_sums(l, m, lse_ptr, stats_ptr, places, rows, inside, NATURAL: tl.constexpr):
    """Write lse and stats of rows, each unless it is None; return the sums that divide acc."""
    # A row that sees no key has a sum of zero.
    empty = l == 0.0
    log_l = tl.log2(tl.where(empty, 1.0, l))
    if lse_ptr is not None:
        lse = m + log_l * LN2 if NATURAL else (m + log_l) * LN2
        tl.store(lse_ptr + places, lse, mask=inside)
    if stats_ptr is not None:
        # To the backward pass it is a row whose weights are all zero.
        m = tl.where(empty, float("inf"), m)
        if NATURAL:
            tl.store(stats_ptr + rows + places, log_l, mask=inside)
        else:
            m += log_l
        tl.store(stats_ptr + places, m, mask=inside)
    return tl.where(empty, 1.0, l)


@triton.jit
def attend_keys(
    acc, l, m, q, k_ptrs, v_ptrs, mask_ptr, offs_m, wide, first, last,
    stride_ks, stride_vs, stride_mm, stride_mn,
    SQ, SK, left, right, scale, softcap, seed, dropped, head,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Take the keys from first to last into acc, l and m. first: a multiple of BLOCK_N."""
    offs_n = tl.arange(0, BLOCK_N)
    # A sequence length of one is a compile-time constant, and so is what follows from it.
    k_ptrs += tl.cast(first, tl.int64) * stride_ks
    v_ptrs += tl.cast(first, tl.int64) * stride_vs
    rest = unit(softcap, scale)
    factor = unit(mask_ptr, rest)
    NATURAL: tl.constexpr = q.dtype == tl.float32
    for start in range(first, last, BLOCK_N):
        inside = start + offs_n < SK
        k = load_tile(k_ptrs, inside[:, None], wide[None, :], MASKED, PADDED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        scores = capped(scores, scale, softcap, NATURAL)
        scores = masked_scores(
            scores, mask_ptr, offs_m[:, None], (start + offs_n)[None, :], stride_mm, stride_mn,
            SQ, SK, left, right, rest, LEFT, RIGHT, MASKED, NATURAL,
        )  # fmt: skip
        p, acc, l, m = online_softmax(acc, l, m, scores, factor, NATURAL)
        if DROPOUT:
            kept = kept_entries(seed, dropped, head, offs_m, start, SQ, SK, BLOCK_M, BLOCK_N)
            p = tl.where(kept, p, 0.0)
        v = load_tile(v_ptrs, inside[:, None], wide[None, :], MASKED, PADDED)
        acc = add_values(acc, p, v, PRECISION)
        k_ptrs += tl.cast(stride_ks, tl.int64) * BLOCK_N
        v_ptrs += tl.cast(stride_vs, tl.int64) * BLOCK_N
    return acc, l, m


@triton.jit
def attend_tile(
    q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr, lse_ptr, stats_ptr,
    stride_qs, stride_ks, stride_vs, stride_os, stride_mm, stride_mn,
    tile, head, place, SQ, SK, left, right, scale, softcap, seed, dropped, inverse, rows,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write out, lse and stats of a tile of BLOCK_M rows of one head of one sequence.

    Pointers are those of the head's first row or key. In lse and stats `place` is the index of that
    row. In the stream of dropout `head` is the place of the head. Both are int64. Other parameters
    are those of the forward kernel.
    """
    NATURAL: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    scale = factor_of(scale, NATURAL)
    PADDED: tl.constexpr = BLOCK_D != D
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside, wide = offs_m < SQ, offs_d < D
    row, key = offs_m.to(tl.int64)[:, None], offs_n.to(tl.int64)[:, None]
    q_ptrs = q_ptr + row * stride_qs + offs_d[None, :]
    k_ptrs = k_ptr + key * stride_ks + offs_d[None, :]
    v_ptrs = v_ptr + key * stride_vs + offs_d[None, :]
    q = load_tile(q_ptrs, inside[:, None], wide[None, :], True, PADDED)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    first, whole, cut, last = key_range(
        tile * BLOCK_M, SK, left, right, LEFT, RIGHT, BLOCK_M, BLOCK_N
    )
    if LEFT:
        acc, l, m = attend_keys(
            acc, l, m, q, k_ptrs, v_ptrs, mask_ptr, offs_m, wide, first, tl.minimum(whole, last),
            stride_ks, stride_vs, stride_mm, stride_mn,
            SQ, SK, left, right, scale, softcap, seed, dropped, head,
            LEFT, RIGHT, DROPOUT, True, PRECISION, PADDED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    acc, l, m = attend_keys(
        acc, l, m, q, k_ptrs, v_ptrs, mask_ptr, offs_m, wide, whole, cut,
        stride_ks, stride_vs, stride_mm, stride_mn,
        SQ, SK, left, right, scale, softcap, seed, dropped, head,
        LEFT, RIGHT, DROPOUT, False, PRECISION, PADDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    acc, l, m = attend_keys(
        acc, l, m, q, k_ptrs, v_ptrs, mask_ptr, offs_m, wide, cut, last,
        stride_ks, stride_vs, stride_mm, stride_mn,
        SQ, SK, left, right, scale, softcap, seed, dropped, head,
        LEFT, RIGHT, DROPOUT, True, PRECISION, PADDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    sums = store_sums(l, m, lse_ptr, stats_ptr, place + offs_m, rows, inside, NATURAL)
    out = acc / sums[:, None]
    if DROPOUT:
        out *= tl.cast(inverse, tl.float32)
    out_ptrs = out_ptr + row * stride_os + offs_d[None, :]
    store_as(out_ptrs, out, inside[:, None] & wide[None, :])

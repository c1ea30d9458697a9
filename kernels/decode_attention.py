"""Attention of one or a few new queries over a cache of keys and values: softmax(scale q kᵀ) v.

Bytes: the keys and values that count are read once, 2 B K S D items; the rest is small. FLOPs: 4 B
H Q S D, so memory decides. Query heads that share a key head are rows of one tile, so each key is
read once for all of them. One sequence has too few heads for a whole GPU. So the keys are split,
and each split gives its result and the logarithm of its sum of exponentials. A second kernel weighs
the results (Dao et al., "Flash-Decoding for long-context inference", 2023). The number of splits
depends on shapes alone, and each sum has one owner, so results do not vary.

A decoded token may come with its key and value, as in flash-attn's `flash_attn_with_kvcache` (Dao
et al.). The same launch then rotates the query and the new key, writes the token into the caches,
and attends it. It moves 4 B K D items more, two rows of angles, and nothing else. Each program
rotates its queries anew. The keys of the splits end before the new token. The last split takes it
from its own tensor and writes it, so no program reads what another one writes.
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import check_no_grad
from ._runtime.call_cache import cached_launch
from ._runtime.checks import (
    MOST_ITEMS,
    check_flag,
    check_integer,
    check_number,
    check_tensor,
    check_tensors,
    check_that,
)
from ._runtime.configs import Configs
from ._runtime.device import float32_dot, shared_bytes, sm_count
from ._runtime.layout import as_read
from ._triton.math import LN2, LOG2E
from ._triton.memory import store_as
from .attention_details.launch import (
    SCALES,
    cap_number,
    check_heads,
    first_to_fit,
    in_rows,
    padded,
    strides_of,
)
from .attention_details.scores import (
    attend_keys,
    capped,
    factor_of,
    load_tile,
    online_softmax,
    unit,
)
from .decode_attention_details.new_token import (
    angles_of,
    check_new_token,
    load_turned,
    note_writes,
)

ACCUMULATES = {"decode_attention": "float32"}
# Rows of a tile: `tl.dot` has at least the first.
LEAST_ROWS, MOST_ROWS = 16, 64
# Splits of one sequence, and how many of them the second kernel takes at once.
MOST_SPLITS, AT_ONCE = 128, 16
# Keys that a split has at least, if there are fewer programs than multiprocessors, and if there are
# more programs than fit. There the second kernel costs more than a short wave of programs.
LEAST_KEYS, LEAST_KEYS_OF_MANY = 256, 1024
# Rows of so many entries cost a program as much time to compute as to read.
NARROW = 64
# Programs that the registers of a multiprocessor hold, and shared memory that CUDA adds to each.
MOST_RESIDENT, RESERVED = 4, 1024
# Arguments of the first kernel for a new token: strides of key and value, sizes of the tables.
NEW = "stride_new_kb", "stride_new_kh", "stride_new_vb", "stride_new_vh", "L", "R"
# More splits are not worth it if this share of the work that they spread is spread without.
NEARLY = 0.95


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    new_k: torch.Tensor | None = None,
    new_v: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(scale q kᵀ) v of the last Q positions of each sequence over its cache.

    Query i stands at p = lengths - Q + i, and sees the keys to p. A query that sees no key gives
    zeros and a logarithm of minus infinity.

    With new_k and new_v, Q is 1, and the launch also does what comes before attention when a token
    is decoded. It writes them into k and v at position lengths - 1, in place. With cos and sin it
    rotates the query and new_k first, as `rotary` does at that position. Written entries have the
    bits that `rotary` gives.

    Args:
        q: `[B, H, Q, D]`; float32, float16 or bfloat16; D a multiple of 8 from 16 to 256. Any
            strides: a tensor is copied only if its last stride is not 1.
        k: the cache, `[B, K, S, D]` with the dtype of q; H is a multiple of K. Query head h reads
            key head h // (H / K). With new_k its last stride must be 1, its entries may not
            overlap, and it may share no memory with another argument.
        v: as k.
        lengths: `[B]`, int32 or int64: the keys of each sequence that count, the new ones among
            them; S if None. It is read on the device: less than 0 counts as 0, more than S as S.
            A sequence of length 0 gets no new token: nothing is written, and the result is zero.
        scale: factor of the scores, above zero; 1 / sqrt(D) if None.
        window: a query sees no key before p - window; no bound if None.
        softcap: a positive number c, which makes the scores c tanh(scores / c), as in Gemma 2.
        num_splits: the number of parts into which the keys are split, chosen if None. Results
            differ by rounding.
        return_lse: whether to return also the logarithm of the sum of exponentials.
        new_k: `[B, K, 1, D]` with the dtype of q, the key of the new token, which the lengths
            count already. Any strides, as q.
        new_v: as new_k, its value.
        cos: `[L, R]`, 0 < 2R <= D, float32, float16 or bfloat16: row p has the cosines of position
            p. Entry i is rotated with entry R + i, and entries from 2R on are kept. If the position
            has no row, all rotated entries are NaN, also those written. If that is known without
            waiting for a GPU, it is an error.
        sin: as cos, the sines.

    Returns:
        `[B, H, Q, D]`, contiguous. With return_lse also the natural logarithm of the sum of
        exponentials, `[B, H, Q]` in float32. Deterministic; without a gradient.

    Raises:
        TypeError: an argument is of another kind, or a tensor of another dtype.
        ValueError: shapes, devices or values do not fit, or a tensor requires a gradient. Only one
            of new_k and new_v, or of cos and sin, is given, or the latter without the former. A
            cache cannot be written in place.

    Source:
        Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference" (2023). The new
        token: `flash_attn_with_kvcache` of flash-attn (Dao et al.).

    Example:
        >>> q, k, v = (torch.randn(1, 2, s, 32, device="cuda") for s in (1, 50, 50))
        >>> decode_attention(q, k, v).shape
        torch.Size([1, 2, 1, 32])
    """
    check_tensors(q=q, k=k, v=v)
    check_no_grad(q=q, k=k, v=v)
    check_flag("return_lse", return_lse)
    check_heads(q, k, v)
    if lengths is not None:
        check_tensor("lengths", lengths)
        if lengths.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"lengths: {lengths.dtype}, expected int32 or int64")
        shape = tuple(lengths.shape)
        check_that(shape == (q.shape[0],), f"lengths: shape {shape}, expected ({q.shape[0]},)")
        on = f"lengths: on {lengths.device}, expected {q.device} as q is"
        check_that(lengths.device == q.device, on)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    scale = check_number("scale", scale, *SCALES)
    if window is not None:
        check_integer("window", window, 0, MOST_ITEMS)
    if num_splits is not None:
        check_integer("num_splits", num_splits, 1, MOST_SPLITS)
    cap = cap_number(softcap)
    written = not (new_k is None and new_v is None and cos is None and sin is None)
    if written:
        check_new_token(q, k, v, lengths, new_k, new_v, cos, sin)
    out, lse = decode_fwd(
        q, k, v, lengths, new_k, new_v, cos, sin, scale, cap, window, num_splits, return_lse
    )
    if written:
        note_writes(k, v)
    return (out, lse) if return_lse else out


@triton.jit
def _split_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, new_k_ptr, new_v_ptr, cos_ptr, sin_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_split, stride_lse, stride_length,
    stride_new_kb, stride_new_kh, stride_new_vb, stride_new_vh,
    K, GROUP, Q, S, L, splits, window, scale, softcap, R: tl.constexpr,
    LEFT: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out = softmax(scale q kᵀ) v and lse over the keys of one split.

    Grid: splits * cdiv(GROUP * Q, BLOCK_M) * B * K programs. A program owns BLOCK_M rows and one
    of `splits` parts of the keys that they see. The rows are the Q queries of the GROUP query heads
    of one key head. The program reads both, and writes rows of out and lse.

    out is [splits, B, K, GROUP, Q, D]; lse is [splits, B, K, GROUP, Q] or None. The strides of a
    split are given. The base of lse is 2, or e if this kernel is the LAST. The lengths may be None.
    A window is a bound if LEFT. softcap is a number or None. BLOCK_D is a power of two, at least D.

    new_k and new_v, [B, K, 1, D], are the token of position length - 1, or None; then Q is 1. The
    last split takes its key and value from there. Its first tile of rows writes them into k and v.
    If cos and sin, [L, R] with 0 < 2R <= D, are not None, they rotate q and new_k. Without them L
    and R are None, as are the strides of new_k and new_v without these.
    """
    NATURAL: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    scale = factor_of(scale, NATURAL)
    PADDED: tl.constexpr = BLOCK_D != D
    tiles = tl.cdiv(GROUP * Q, BLOCK_M)
    split, rest = tl.program_id(0) % splits, tl.program_id(0) // splits
    tile, group = rest % tiles, rest // tiles
    b, key_head = (group // K).to(tl.int64), (group % K).to(tl.int64)
    length = S
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + b * stride_length)
        length = tl.maximum(0, tl.minimum(S, length)).to(tl.int32)
    # The keys to read in the caches.
    old = length
    if new_k_ptr is not None:
        old = tl.maximum(0, length - 1)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside, wide = rows < GROUP * Q, offs_d < D
    offs_m, head = rows % Q, key_head * GROUP + (rows // Q).to(tl.int64)
    q_ptrs = q_ptr + b * stride_qb + head * stride_qh + offs_m.to(tl.int64) * stride_qs
    key = offs_n.to(tl.int64)
    k_ptrs = k_ptr + b * stride_kb + key_head * stride_kh
    k_ptrs += key[:, None] * stride_ks + offs_d[None, :]
    v_ptrs = v_ptr + b * stride_vb + key_head * stride_vh
    v_ptrs += key[:, None] * stride_vs + offs_d[None, :]
    if cos_ptr is None:
        q_ptrs = q_ptrs[:, None] + offs_d[None, :]
        q = load_tile(q_ptrs, inside[:, None], wide[None, :], True, PADDED)
    else:
        cos, sin = angles_of(cos_ptr, sin_ptr, length - 1, L, R, BLOCK_D)
        q = load_turned(q_ptrs[:, None], cos, sin, inside[:, None], D, R, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    if new_k_ptr is not None:
        # The last split has the fewest keys. The new one is its first, because q is at hand here.
        has_new = split == splits - 1
        new_k_ptr += b * stride_new_kb + key_head * stride_new_kh
        new_v_ptrs = new_v_ptr + b * stride_new_vb + key_head * stride_new_vh + offs_d[None, :]
        if cos_ptr is None:
            new_k = tl.load(new_k_ptr + offs_d[None, :], mask=has_new & wide[None, :], other=0.0)
        else:
            new_k = load_turned(new_k_ptr, cos, sin, has_new, D, R, BLOCK_D)  # [1, BLOCK_D]
        new_v = tl.load(new_v_ptrs, mask=has_new & wide[None, :], other=0.0)
        has_new &= length > 0
        scores = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1)[:, None]  # [BLOCK_M, 1]
        scores = capped(scores, scale, softcap, NATURAL)
        scores = tl.where(has_new, scores, -float("inf"))
        p, _, l, m = online_softmax(acc, l, m, scores, unit(softcap, scale), NATURAL)
        acc = p * tl.where(has_new, new_v.to(tl.float32), 0.0)
        # No program reads this position.
        writes, place = has_new & (tile == 0) & wide[None, :], tl.cast(old, tl.int64)
        new_ptrs = k_ptr + b * stride_kb + key_head * stride_kh + offs_d[None, :]
        tl.store(new_ptrs + place * stride_ks, new_k, mask=writes)
        new_ptrs = v_ptr + b * stride_vb + key_head * stride_vh + offs_d[None, :]
        tl.store(new_ptrs + place * stride_vs, new_v, mask=writes)
    # The keys that any row sees, from `start` on, in parts of whole tiles.
    right = length - Q
    left = right - window
    start = 0
    if LEFT:
        start = tl.maximum(0, left) // BLOCK_N * BLOCK_N
    part = tl.cdiv(tl.cdiv(old - start, splits), BLOCK_N) * BLOCK_N
    first = start + split * part
    last = tl.minimum(old, first + part)
    # The first row sees the keys to `right`, the last row those from `whole` on.
    whole = first
    if LEFT:
        whole = tl.cdiv(tl.maximum(0, left + Q - 1), BLOCK_N) * BLOCK_N
        whole = tl.maximum(first, tl.minimum(whole, tl.cdiv(last, BLOCK_N) * BLOCK_N))
    cut = tl.minimum(last, tl.maximum(0, right + 1)) // BLOCK_N * BLOCK_N
    cut = tl.maximum(whole, cut)
    if LEFT:
        acc, l, m = attend_keys(
            acc, l, m, q, k_ptrs, v_ptrs, None, offs_m, wide, first, tl.minimum(whole, last),
            stride_ks, stride_vs, 0, 0, Q, old, left, right, scale, softcap, 0, 0, 0,
            LEFT, True, False, True, PRECISION, PADDED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    acc, l, m = attend_keys(
        acc, l, m, q, k_ptrs, v_ptrs, None, offs_m, wide, whole, cut,
        stride_ks, stride_vs, 0, 0, Q, old, left, right, scale, softcap, 0, 0, 0,
        LEFT, True, False, False, PRECISION, PADDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    acc, l, m = attend_keys(
        acc, l, m, q, k_ptrs, v_ptrs, None, offs_m, wide, cut, last,
        stride_ks, stride_vs, 0, 0, Q, old, left, right, scale, softcap, 0, 0, 0,
        LEFT, True, False, True, PRECISION, PADDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    empty = l == 0.0
    place = group.to(tl.int64) * GROUP * Q + rows
    if lse_ptr is not None:
        lse = (m * LOG2E if NATURAL else m) + tl.log2(tl.where(empty, 1.0, l))
        if LAST:
            lse *= LN2
        tl.store(lse_ptr + split.to(tl.int64) * stride_lse + place, lse, mask=inside)
    out_ptrs = out_ptr + split.to(tl.int64) * stride_split + place[:, None] * D + offs_d[None, :]
    out = acc / tl.where(empty, 1.0, l)[:, None]
    store_as(out_ptrs, out, inside[:, None] & wide[None, :])


@triton.jit
def _combine_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, stride_split, stride_lse, splits,
    D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out = sum of part 2**(part_lse - lse), lse = log2 of the sum of 2**part_lse, over splits.

    Grid: one program for each row of out. It reads its row of part and part_lse in each split,
    BLOCK_S splits at once. It writes its row of out and, in natural logarithms, of lse, which may
    be None.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_s, offs_d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    wide = offs_d < D
    acc = tl.zeros((BLOCK_D,), tl.float32)
    m, l = -float("inf"), 0.0
    for start in range(0, splits, BLOCK_S):
        split = (start + offs_s).to(tl.int64)
        inside = split < splits
        lse = tl.load(part_lse_ptr + split * stride_lse + row, mask=inside, other=-float("inf"))
        m_new = tl.maximum(m, tl.max(lse, 0))
        base = tl.where(m_new == -float("inf"), 0.0, m_new)
        weights = tl.exp2(lse - base)
        shrink = tl.exp2(m - base)
        ptrs = part_ptr + split[:, None] * stride_split + row * D + offs_d[None, :]
        part = tl.load(ptrs, mask=inside[:, None] & wide[None, :], other=0.0)
        acc = acc * shrink + tl.sum(part * weights[:, None], 0)
        l = l * shrink + tl.sum(weights, 0)
        m = m_new
    empty = l == 0.0
    l_safe = tl.where(empty, 1.0, l)
    store_as(out_ptr + row * D + offs_d, acc / l_safe, wide)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, (m + tl.log2(l_safe)) * LN2)


def decode_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor | None,
    new_k: torch.Tensor | None,
    new_v: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    scale: float,
    softcap: float,
    window: int | None,
    num_splits: int | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out [B, H, Q, D], and lse [B, H, Q] if return_lse; write new_k and new_v into k and v.

    Arguments as `decode_attention` takes them; a softcap of zero is none.
    """
    q, k, v = map(in_rows, (q, k, v))
    new = dict.fromkeys(NEW)
    if new_k is not None:
        new_k, new_v = map(in_rows, (new_k, new_v))
        new |= strides_of("bh", new_k=new_k, new_v=new_v)
    if cos is not None:
        cos, sin = (as_read(x).contiguous() for x in (cos, sin))
        new |= {"L": cos.shape[0], "R": cos.shape[1]}
    (b, h, rows, d), heads, s = q.shape, k.shape[1], k.shape[2]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((b, h, rows), dtype=torch.float32) if return_lse else None
    if out.numel() == 0:
        return out, lse
    group = h // heads
    key = {"rows": group * rows, "d": d, "itemsize": q.element_size()}
    config = SPLIT.pick(q.device, **key, shared=shared_bytes(q.device))
    tiles = triton.cdiv(group * rows, config["BLOCK_M"])
    resident = _resident(config, d, key["itemsize"], shared_bytes(q.device))
    splits = num_splits or _splits(b * heads * tiles, s, d, sm_count(q.device), resident)
    part, part_lse = out, lse
    if splits > 1:
        part = q.new_empty((splits, b, h, rows, d), dtype=torch.float32)
        part_lse = q.new_empty((splits, b, h, rows), dtype=torch.float32)
    _split_kernel[(splits * tiles * b * heads,)](
        q_ptr=q, k_ptr=k, v_ptr=v, lengths_ptr=lengths, new_k_ptr=new_k, new_v_ptr=new_v,
        cos_ptr=cos, sin_ptr=sin, out_ptr=part, lse_ptr=part_lse, **strides_of(q=q, k=k, v=v),
        **new, stride_split=b * h * rows * d, stride_lse=b * h * rows,
        stride_length=0 if lengths is None else lengths.stride(0),
        K=heads, GROUP=group, Q=rows, S=s, splits=splits,
        # A larger one bounds nothing, and its sums with positions may pass 2**31.
        window=0 if window is None else min(window, s), scale=scale, softcap=softcap or None,
        LEFT=window is not None, LAST=splits == 1, D=d, BLOCK_D=padded(d),
        # Only float32 has anything to split.
        PRECISION=float32_dot() if q.dtype == torch.float32 else "ieee", **config,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(b * h * rows,)](
            part_ptr=part, part_lse_ptr=part_lse, out_ptr=out, lse_ptr=lse,
            stride_split=b * h * rows * d, stride_lse=b * h * rows, splits=splits,
            D=d, BLOCK_S=AT_ONCE, BLOCK_D=padded(d), num_warps=4,
        )  # fmt: skip
    return out, lse


def _resident(config, d: int, itemsize: int, shared: int) -> int:
    """How many programs a multiprocessor with so many bytes of shared memory holds.

    They hold the rows, and keys and values of all stages but the one that is computed. The parts of
    a float32 product are laid out anew, in half as much again, and fill the registers.
    """
    stages, most = config["num_stages"] - 1, MOST_RESIDENT
    if itemsize == 4:
        stages, most, itemsize = stages + 1, MOST_RESIDENT // 2, 6
    held = config["BLOCK_M"] + 2 * stages * config["BLOCK_N"]
    return max(1, min(most, shared // (held * padded(d) * itemsize + RESERVED)))


def _splits(programs: int, s: int, d: int, sms: int, resident: int) -> int:
    """The least number of splits that spreads the work nearly as evenly as any other.

    programs: how many there are with one split. resident: how many a multiprocessor holds. One or,
    if rows are narrow, two of them keep the memory busy. So as many programs as multiprocessors
    are even, and several on each. If not all programs begin at once, whole waves of them are even.
    flash-attn chooses by the same thought (its `num_splits_heuristic`).
    """
    room = resident * sms
    if sms <= programs <= room:
        return 1
    if programs < sms:
        slots = min(resident, 2 if d <= NARROW else 1) * sms
        most = min(s // LEAST_KEYS, room // programs)
    else:
        slots, most = room, s // LEAST_KEYS_OF_MANY
    possible = range(1, max(1, min(MOST_SPLITS, most)) + 1)
    shares = [n * programs / (-(-n * programs // slots) * slots) for n in possible]
    enough = NEARLY * max(shares)
    return next(n for n, share in enumerate(shares, 1) if share >= enough)


CONFIGS = tuple(
    {"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": 4, "num_stages": stages}
    for rows in (16, 32, 64)
    for keys in (16, 32, 64, 128)
    for stages in (1, 2, 3)
)


def _choose(rows, d, itemsize, shared):
    block_m = min(MOST_ROWS, max(LEAST_ROWS, 1 << (rows - 1).bit_length()))
    # Three programs share a multiprocessor: 64 keys of 128 entries of 16 bits, in three stages.
    keys = max(16, min(64, 2**14 // (padded(d) * itemsize)))
    config = {"BLOCK_M": block_m, "BLOCK_N": keys, "num_warps": 4, "num_stages": 3}
    ranked = [config | {"num_stages": stages} for stages in (3, 2, 1)]
    return first_to_fit(ranked, ("BLOCK_M", "BLOCK_N"), 1, d, itemsize, shared)


def _suits(candidate, rows, d, itemsize, shared):
    block_m = min(MOST_ROWS, max(LEAST_ROWS, 1 << (rows - 1).bit_length()))
    size = (block_m + 2 * candidate["num_stages"] * candidate["BLOCK_N"]) * padded(d) * itemsize
    return candidate["BLOCK_M"] == block_m and size <= shared


SPLIT = Configs(_split_kernel, CONFIGS, _choose, _suits)

decode_fwd = cached_launch(decode_fwd)

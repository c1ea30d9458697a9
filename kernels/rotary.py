"""Rotary position embedding of queries and keys, forward and backward.

The forward pass turns each pair (a, b) of a head into (a c - b s, a s + b c). The cosine c and the
sine s depend on the position of the token and the place of the pair. The backward pass has -s
instead, the rotation by the opposite angle. Pairs are the two halves of a head (as in GPT-NeoX and
Llama), or neighbours, `interleaved` (as in GPT-J and the original, Su et al., "RoFormer", 2021).
Entries beyond the rotated ones are copied.

Memory decides: `ops/rotary.py` counts bytes and FLOPs. The angles are small, and all heads of a
token share them. One launch rotates both tensors. A program takes some heads of q or of k at one
token, or, where a token has too few to fill a warp, all heads of several tokens. A thread loads the
angles of its pairs and 16 bytes of each half.

The tables of angles have a row for each place of a sequence, or for each token, or are looked up by
positions, as for packed sequences and caches. In place, a program writes what it alone has read,
and leaves the entries beyond the rotated ones where they are.
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import check_no_grad, needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import (
    check_flag,
    check_floating,
    check_same_device,
    check_same_dtype,
    check_tensors,
)
from ._runtime.configs import Configs
from ._runtime.layout import ACCESS_BYTES


def rotary(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    inplace: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first 2R entries of each head of q and k by the angles of its position.

    The computation is in float32.

    Args:
        q: `[B, S, H, D]`, float32, float16 or bfloat16; any strides, copied if the last is not 1.
        k: `[B, S, K, D]`, with the dtype and device of q; any strides, as q. None if only one
            tensor is to be rotated, which then may be queries or keys.
        cos: cosines of the angles, float32, float16 or bfloat16: `[S, R]` with 0 < 2R <= D, or
            `[B, S, R]`, or `[L, R]` if there are positions.
        sin: sines of the angles, with the shape of cos; float32, float16 or bfloat16.
        positions: `[S]` or `[B, S]`, int64 or int32: the row of cos and sin for each token, from 0
            to L - 1. On a GPU a position out of range makes the rotated entries of its token NaN,
            because no check waits for it.
        interleaved: pairs are neighbours (2i, 2i + 1); else entry i belongs to entry R + i.
        inplace: write over q and k, whose last stride must be 1, and which share no memory. A leaf
            that requires a gradient is refused; other tensors take part in a backward pass as after
            PyTorch's own operations in place. If a gradient is wanted, each tensor is rotated by a
            launch of its own.

    Returns:
        q and k rotated, new and contiguous, or in place q and k themselves; only the first without
        k. They are differentiable once in q and k.

    Raises:
        TypeError: an argument is no tensor or has another dtype, or a flag is no bool.
        ValueError: shapes or devices disagree, a tensor is not on a GPU, or cos or sin requires a
            gradient. In place: a tensor is a leaf that requires a gradient, has a stride of 0, or
            has entries that lie apart; or k is q. On a CPU also: a position is out of range.

    Source:
        Su et al., "RoFormer: Enhanced transformer with rotary position embedding" (2021).

    Example:
        >>> q, angles = torch.ones(1, 3, 2, 8, device="cuda"), torch.ones(3, 4, device="cuda")
        >>> rotary(q, q, angles.cos(), angles.sin())[0].shape
        torch.Size([1, 3, 2, 8])
    """
    check_flag("interleaved", interleaved)
    check_flag("inplace", inplace)
    if needs_grad(cos, sin):
        check_no_grad(cos=cos, sin=sin)
    angles = cos, sin, positions
    if inplace:
        return _rotated_in_place(q, k, *angles, interleaved)
    if needs_grad(q, k):
        return _Rotary.apply(q, k, *angles, interleaved, False)
    q_out, k_out = _rotate(q, k, *angles, interleaved, False, False)
    return q_out if k is None else (q_out, k_out)


def _rotated_in_place(q, k, cos, sin, positions, interleaved):
    """Return what `rotary` returns in place."""
    given = {"q": q} if k is None else {"q": q, "k": k}
    check_tensors(**given)
    for name, x in given.items():
        _check_writable(name, x)
    if k is q:
        raise ValueError(
            "k: the same tensor as q, which would be rotated twice; expected None to rotate it once"
        )
    if needs_grad(q, k):
        # Each launch checks its own tensor, and the first one writes before the second begins.
        check_tensors(cos=cos, sin=sin, **({} if positions is None else {"positions": positions}))
        _check(q, k, cos, sin, positions)
        # A view that is written in place must be the only output of its function.
        both = tuple(
            _Rotary.apply(x, None, cos, sin, positions, interleaved, True) for x in given.values()
        )
    else:
        _rotate(q, k, cos, sin, positions, interleaved, False, True)
        both = tuple(given.values())
        for x in both:
            if not (torch.compiler.is_compiling() or x.is_inference()):
                # Then autograd notices if it has saved what is overwritten here.
                torch.autograd.graph.increment_version(x)
    return both[0] if k is None else both


def _check_writable(name, x):
    """Raise ValueError unless x can be rotated in place."""
    if needs_grad(x) and (x.is_leaf or (x._is_view() and x._base.is_leaf)):
        raise ValueError(
            f"{name}: a leaf that requires a gradient, or a view of one, expected another tensor "
            f"to write in place, such as {name}.clone()"
        )
    apart = x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1
    if apart or any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(
            f"{name}: strides {x.stride()}, expected 1 last and no 0 to write in place"
        )


def _check(q, k, cos, sin, positions):
    """Raise TypeError or ValueError unless the tensors are as `rotary` takes them."""
    check_floating(q=q)
    if q.dim() != 4:
        raise ValueError(f"q: {q.dim()} dimensions, expected 4: [B, S, H, D]")
    b, s, _, d = q.shape
    if k is not None:
        check_same_dtype(q=q, k=k)
        if k.dim() != 4 or k.shape[0] != b or k.shape[1] != s or k.shape[3] != d:
            raise ValueError(f"k: shape {tuple(k.shape)}, expected [{b}, {s}, K, {d}] as q has")
        check_same_device(q=q, k=k)
    check_floating(cos=cos, sin=sin)
    for name, angles in (("cos", cos), ("sin", sin)):
        *rows, r = angles.shape if angles.dim() else (0,)
        known = rows == [s] or rows == [b, s] if positions is None else len(rows) == 1
        if not (known and 0 < 2 * r <= d):
            wanted = f"[{s}, R] or [{b}, {s}, R]" if positions is None else "[L, R]"
            raise ValueError(
                f"{name}: shape {tuple(angles.shape)}, expected {wanted} with 0 < 2R <= {d}"
            )
    check_same_device(q=q, cos=cos, sin=sin)
    if cos.shape != sin.shape:
        raise ValueError(f"sin: shape {tuple(sin.shape)}, expected {tuple(cos.shape)} as cos has")
    if positions is not None:
        _check_positions(positions, b, s, cos)


def _check_positions(positions, b, s, cos):
    """Raise TypeError or ValueError unless positions choose rows of cos; on a CPU also by value."""
    if positions.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"positions: {positions.dtype}, expected int64 or int32")
    if positions.shape not in ((s,), (b, s)):
        raise ValueError(
            f"positions: shape {tuple(positions.shape)}, expected ({s},) or ({b}, {s})"
        )
    check_same_device(cos=cos, positions=positions)
    rows = cos.shape[0]
    if positions.numel() and rows == 0:
        raise ValueError(
            "positions: of tables without rows, expected cos and sin with one at least"
        )
    if positions.device.type == "cpu" and not torch.compiler.is_compiling():
        outside = positions[(positions < 0) | (positions >= rows)]
        if outside.numel():
            raise ValueError(f"positions: {outside[0].item()}, expected 0 to {rows - 1}")


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, positions, interleaved, inplace):
        ctx.save_for_backward(cos, sin, positions)
        ctx.interleaved = interleaved
        if inplace:
            ctx.mark_dirty(q)
        q_out, k_out = _rotate(q, k, cos, sin, positions, interleaved, False, inplace)
        return q_out if k is None else (q_out, k_out)

    @staticmethod
    @once
    def backward(ctx, dq, dk=None):
        # The gradients of the outputs may belong to others, so nothing is written over them.
        both = _rotate(dq, dk, *ctx.saved_tensors, ctx.interleaved, True, False)
        return *both, None, None, None, None, None


def _rotate(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    interleaved: bool,
    inverse: bool,
    inplace: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return q and k rotated, new and contiguous or in place; None in the place of no k.

    Raises TypeError or ValueError as `rotary` does.
    """
    _check(q, k, cos, sin, positions)
    q_out, k_out = q, k
    if not inplace:
        q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if k is not None:
            k_out = torch.empty_like(k, memory_format=torch.contiguous_format)
    results = q_out, k_out
    b, s, h, d = q.shape
    heads = 0 if k is None else k.shape[2]
    if b * s * (h + heads) == 0:
        return results
    q = q if q.stride(3) == 1 else q.contiguous()
    stride_kb = stride_ks = stride_kh = 0
    if k is not None:
        k = k if k.stride(3) == 1 else k.contiguous()
        stride_kb, stride_ks, stride_kh, _ = k.stride()
    r, rows = cos.shape[-1], cos if positions is None else positions
    key = {
        "heads": max(h, heads), "r": r, "itemsize": q.element_size(), "interleaved": interleaved
    }  # fmt: skip
    stride_qb, stride_qs, stride_qh, _ = q.stride()
    if few := _few(**key):
        kernel, config = _rotary_tokens_kernel, TOKEN_TILES.pick(q.device, **key)
        block = config["BLOCK"]
        grid = triton.cdiv(b * s * h, block) + triton.cdiv(b * s * heads, block)
    else:
        kernel, config = _rotary_kernel, TILES.pick(q.device, **key)
        block = config["BLOCK_H"]
        grid = b * s * (triton.cdiv(h, block) + triton.cdiv(heads, block))
    kernel[(grid,)](
        q_ptr=q, k_ptr=k if heads else None,
        cos_ptr=cos.contiguous(), sin_ptr=sin.contiguous(),
        positions_ptr=None if positions is None else positions.contiguous(),
        q_out_ptr=q_out, k_out_ptr=k_out if heads else None,
        stride_qb=stride_qb, stride_qs=stride_qs, stride_qh=stride_qh,
        stride_kb=stride_kb, stride_ks=stride_ks, stride_kh=stride_kh, S=s,
        L=None if positions is None else cos.shape[0], **({"TOKENS": b * s} if few else {}),
        H=h, K=heads, D=d, R=r, PER_TOKEN=rows.dim() == 2 + (positions is None),
        INTERLEAVED=interleaved, INVERSE=inverse, INPLACE=inplace, **config,
    )  # fmt: skip
    return results


@triton.jit
def _rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr, q_out_ptr, k_out_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, S, L,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PER_TOKEN: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, INPLACE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Rotate the first 2R entries of each head of q and k; copy the others.

    Grid: B * S * (cdiv(H, BLOCK_H) + cdiv(K, BLOCK_H)). A program owns BLOCK_H heads of q, or of k,
    at one token. It reads the heads and the R cosines and sines of their position, and writes the
    heads. H, K: heads of q and k; if K is 0, k_ptr and k_out_ptr are None. D: entries of a head. R:
    pairs of a head, 0 < 2R <= D. INTERLEAVED: pairs are neighbours. INVERSE: rotate by the opposite
    angles. BLOCK_H: a power of two.

    cos and sin have a row for each place [S, R], or PER_TOKEN [B * S, R]. Unless positions_ptr is
    None, they are [L, R], and positions, [S] or PER_TOKEN [B * S], has the row of each token; a row
    that does not exist is NaN. INPLACE: the heads are written where they were read, and q_out_ptr
    and k_out_ptr are not used.
    """
    GROUPS_Q: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    GROUPS: tl.constexpr = GROUPS_Q + (K + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    token, group = pid // GROUPS, pid % GROUPS
    b, s = (token // S).to(tl.int64), (token % S).to(tl.int64)
    token = token.to(tl.int64)
    row, exists = token if PER_TOKEN else s, None
    if positions_ptr is not None:
        row = tl.load(positions_ptr + row).to(tl.int64)
        exists = (row >= 0) & (row < L)
        row = tl.where(exists, row, 0)
    cos_ptr += row * R
    sin_ptr += row * R
    if K > 0 and group >= GROUPS_Q:
        _turn_heads(
            k_ptr + b * stride_kb + s * stride_ks, k_out_ptr + token * (K * D), cos_ptr, sin_ptr,
            exists, stride_kh, (group - GROUPS_Q) * BLOCK_H, K, D, R,
            INTERLEAVED, INVERSE, INPLACE, BLOCK_H,
        )  # fmt: skip
    else:
        _turn_heads(
            q_ptr + b * stride_qb + s * stride_qs, q_out_ptr + token * (H * D), cos_ptr, sin_ptr,
            exists, stride_qh, group * BLOCK_H, H, D, R, INTERLEAVED, INVERSE, INPLACE, BLOCK_H,
        )  # fmt: skip


@triton.jit
def _turn_heads(
    x_ptr, out_ptr, cos_ptr, sin_ptr, exists, stride_h, first, H: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, INPLACE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK_H heads of one token, from the head `first` on; H: the number of heads.

    exists: whether the token has angles, or None if it does.
    """
    heads = first + tl.arange(0, BLOCK_H)[:, None]  # [BLOCK_H, 1]
    x_ptr += heads.to(tl.int64) * stride_h
    if INPLACE:
        out_ptr = x_ptr
    else:
        out_ptr += heads * D
    # Every head loads the angles for itself, so that each thread has the angles of its own pairs.
    alike = tl.zeros((BLOCK_H, 1), tl.int32)
    _turn_rows(
        x_ptr, out_ptr, cos_ptr + alike, sin_ptr + alike, exists, heads < H, D, R,
        INTERLEAVED, INVERSE, INPLACE, BLOCK_H,
    )  # fmt: skip


@triton.jit
def _turn_rows(
    x_ptr, out_ptr, cos_ptr, sin_ptr, exists, inside, D: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, INPLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK heads, of which some are inside; pointers are [BLOCK, 1], one for each.

    exists: whether there are angles for a head, or None if there are for all.
    """
    COPIES: tl.constexpr = D > 2 * R and not INPLACE
    BLOCK_R: tl.constexpr = triton.next_power_of_2(R)
    REST: tl.constexpr = triton.next_power_of_2(max(D - 2 * R, 1))
    offs = tl.arange(0, BLOCK_R)[None, :]  # [1, BLOCK_R]
    mask = inside & (offs < R)
    cos = tl.load(cos_ptr + offs, mask=mask).to(tl.float32)
    sin = tl.load(sin_ptr + offs, mask=mask).to(tl.float32)
    sin = -sin if INVERSE else sin
    if exists is not None:
        cos = tl.where(exists, cos, float("nan"))
        sin = tl.where(exists, sin, float("nan"))
    offs_rest = 2 * R + tl.arange(0, REST)[None, :]
    mask_rest = inside & (offs_rest < D)
    if COPIES:
        rest = tl.load(x_ptr + offs_rest, mask=mask_rest)
    dtype = out_ptr.dtype.element_ty
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_R)[None, :]
        mask = inside & (both < 2 * R)
        pairs = tl.load(x_ptr + both, mask=mask).to(tl.float32)  # [BLOCK, 2 * BLOCK_R]
        a, b = tl.split(tl.reshape(pairs, (BLOCK, BLOCK_R, 2)))
        a, b = _turn(a, b, cos, sin)
        pairs = tl.reshape(tl.join(a, b), (BLOCK, 2 * BLOCK_R))
        tl.store(out_ptr + both, pairs.to(dtype), mask=mask, cache_modifier=".cs")
    else:
        a = tl.load(x_ptr + offs, mask=mask).to(tl.float32)
        b = tl.load(x_ptr + R + offs, mask=mask).to(tl.float32)
        a, b = _turn(a, b, cos, sin)
        tl.store(out_ptr + offs, a.to(dtype), mask=mask, cache_modifier=".cs")
        tl.store(out_ptr + R + offs, b.to(dtype), mask=mask, cache_modifier=".cs")
    if COPIES:
        tl.store(out_ptr + offs_rest, rest, mask=mask_rest, cache_modifier=".cs")


@triton.jit(do_not_specialize=["TOKENS"])
def _rotary_tokens_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr, q_out_ptr, k_out_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, S, L, TOKENS,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PER_TOKEN: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, INPLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate heads as `_rotary_kernel` does, those of several tokens in a program.

    Grid: cdiv(TOKENS * H, BLOCK) + cdiv(TOKENS * K, BLOCK). A program owns BLOCK heads of q, or of
    k, that follow each other through all TOKENS = B * S tokens. It reads the heads and the angles
    of each, and writes the heads. Other parameters are those of `_rotary_kernel`.
    """
    pid = tl.program_id(0)
    programs_q = tl.cdiv(TOKENS * H, BLOCK)
    if K > 0 and pid >= programs_q:
        _turn_tokens(
            k_ptr, k_out_ptr, cos_ptr, sin_ptr, positions_ptr, stride_kb, stride_ks, stride_kh,
            (pid - programs_q).to(tl.int64) * BLOCK, S, L, TOKENS, K, D, R, PER_TOKEN,
            INTERLEAVED, INVERSE, INPLACE, BLOCK,
        )  # fmt: skip
    else:
        _turn_tokens(
            q_ptr, q_out_ptr, cos_ptr, sin_ptr, positions_ptr, stride_qb, stride_qs, stride_qh,
            pid.to(tl.int64) * BLOCK, S, L, TOKENS, H, D, R, PER_TOKEN,
            INTERLEAVED, INVERSE, INPLACE, BLOCK,
        )  # fmt: skip


@triton.jit
def _turn_tokens(
    x_ptr, out_ptr, cos_ptr, sin_ptr, positions_ptr, stride_b, stride_s, stride_h, first, S, L,
    TOKENS, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PER_TOKEN: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, INPLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK heads from the one with number `first` on; H: heads of a token."""
    number = first + tl.arange(0, BLOCK)[:, None]  # [BLOCK, 1]
    token, head = number // H, number % H
    inside = token < TOKENS
    b, s = token // S, token % S
    row, exists = token if PER_TOKEN else s, None
    if positions_ptr is not None:
        row = tl.load(positions_ptr + row, mask=inside, other=0).to(tl.int64)
        exists = (row >= 0) & (row < L)
        row = tl.where(exists, row, 0)
    x_ptr += b * stride_b + s * stride_s + head * stride_h
    if INPLACE:
        out_ptr = x_ptr
    else:
        out_ptr += number * D
    _turn_rows(
        x_ptr, out_ptr, cos_ptr + row * R, sin_ptr + row * R, exists, inside, D, R,
        INTERLEAVED, INVERSE, INPLACE, BLOCK,
    )  # fmt: skip


@triton.jit
def _turn(a, b, cos, sin):
    """Return the pairs (a, b) rotated."""
    return a * cos - b * sin, a * sin + b * cos


HEADS = tuple(
    {"BLOCK_H": heads, "num_warps": warps}
    for heads in (1, 2, 4, 8, 16, 32)
    for warps in (1, 2, 4, 8)
    if warps <= heads <= 16 * warps
)


def _accesses(r, itemsize, interleaved):
    """Return the 16-byte accesses that a head takes, of each half or of all its pairs."""
    entries = (2 if interleaved else 1) << (r - 1).bit_length()
    return max(1, entries * itemsize // ACCESS_BYTES)


def _few(heads, r, itemsize, interleaved):
    """Whether the heads of a token have too few accesses for the threads of a warp."""
    return heads * _accesses(r, itemsize, interleaved) < 32


def _choose(heads, r, itemsize, interleaved):
    # One access a thread. Interleaved pairs take twice as many threads, and no angle has to change
    # its thread, because each thread loads the four angles of its eight entries.
    lanes = _accesses(r, itemsize, interleaved)
    block = min(1 << (heads - 1).bit_length(), max(1, 128 // lanes), 8)
    return {"BLOCK_H": block, "num_warps": max(1, block * lanes // 32)}


def _suits(candidate, heads, r, itemsize, interleaved):
    # A thread makes up to four accesses, and less than half of the heads lie beyond the last.
    accesses = candidate["BLOCK_H"] * _accesses(r, itemsize, interleaved)
    threads = 32 * candidate["num_warps"]
    most = threads if interleaved else 4 * threads
    full = threads <= accesses <= most or accesses < threads == 32
    return full and candidate["BLOCK_H"] < 2 * heads


def _choose_tokens(heads, r, itemsize, interleaved):
    # One access a thread, of four warps.
    return {"BLOCK": max(1, 128 // _accesses(r, itemsize, interleaved)), "num_warps": 4}


def _suits_tokens(candidate, heads, r, itemsize, interleaved):
    accesses = candidate["BLOCK"] * _accesses(r, itemsize, interleaved)
    threads = 32 * candidate["num_warps"]
    return threads <= accesses <= (1 if interleaved else 4) * threads


TOKENS = tuple(
    {"BLOCK": block, "num_warps": warps} for block in (16, 32, 64, 128, 256) for warps in (1, 2, 4)
)
TILES = Configs(_rotary_kernel, HEADS, _choose, _suits)
TOKEN_TILES = Configs(_rotary_tokens_kernel, TOKENS, _choose_tokens, _suits_tokens)
_rotate = cached_launch(_rotate)

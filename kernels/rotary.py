"""Rotary position embedding of queries and keys, forward and backward.

The forward pass turns each pair (a, b) of a head into (a c - b s, a s + b c). The cosine c and the
sine s depend on the position of the token and the place of the pair. The backward pass has -s
instead, the rotation by the opposite angle. Pairs are the two halves of a head (as in GPT-NeoX and
Llama), or neighbours, `interleaved` (as in GPT-J and the original, Su et al., "RoFormer", 2021).
Entries beyond the rotated ones are copied.

Memory decides: `ops/rotary.py` counts bytes and FLOPs. The angles are small, and all heads of a
token share them. One launch rotates both tensors. A program takes some heads of q or of k at one
token. A thread loads the angles of its pairs and 16 bytes of each half.
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import check_no_grad, needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import check_flag, check_floating, check_same_device, check_same_dtype
from ._runtime.configs import Configs
from ._runtime.layout import ACCESS_BYTES


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first 2R entries of each head of q and k by the angles of its position.

    The computation is in float32. Nothing is written in place.

    Args:
        q: `[B, S, H, D]`, float32, float16 or bfloat16; any strides, copied if the last is not 1.
        k: `[B, S, K, D]`, with the dtype and device of q; any strides, as q.
        cos: `[S, R]` with 0 < 2R <= D, float32, float16 or bfloat16: cosines of the angles.
        sin: `[S, R]`, float32, float16 or bfloat16: sines of the angles.
        interleaved: pairs are neighbours (2i, 2i + 1); else entry i belongs to entry R + i.

    Returns:
        q and k rotated, new and contiguous. They are differentiable once in q and k.

    Raises:
        TypeError: an argument is no tensor or has another dtype, or interleaved is no bool.
        ValueError: shapes or devices disagree, a tensor is not on a GPU, or cos or sin requires a
            gradient.

    Source:
        Su et al., "RoFormer: Enhanced transformer with rotary position embedding" (2021).

    Example:
        >>> q, angles = torch.ones(1, 3, 2, 8, device="cuda"), torch.ones(3, 4, device="cuda")
        >>> rotary(q, q, angles.cos(), angles.sin())[0].shape
        torch.Size([1, 3, 2, 8])
    """
    check_flag("interleaved", interleaved)
    if needs_grad(cos, sin):
        check_no_grad(cos=cos, sin=sin)
    if needs_grad(q, k):
        return _Rotary.apply(q, k, cos, sin, interleaved)
    return _rotate(q, k, cos, sin, interleaved, False)


def _check(q, k, cos, sin):
    """Raise TypeError or ValueError unless the tensors are as `rotary` takes them."""
    check_floating(q=q)
    if q.dim() != 4:
        raise ValueError(f"q: {q.dim()} dimensions, expected 4: [B, S, H, D]")
    check_same_dtype(q=q, k=k)
    (b, s, _, d), shape = q.shape, k.shape
    if k.dim() != 4 or shape[0] != b or shape[1] != s or shape[3] != d:
        raise ValueError(f"k: shape {tuple(shape)}, expected [{b}, {s}, K, {d}] as q has")
    check_floating(cos=cos, sin=sin)
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles.dim() != 2 or angles.shape[0] != s or not 0 < 2 * angles.shape[1] <= d:
            raise ValueError(
                f"{name}: shape {tuple(angles.shape)}, expected [{s}, R] with 0 < 2R <= {d}"
            )
    check_same_device(q=q, k=k, cos=cos, sin=sin)
    if cos.shape != sin.shape:
        raise ValueError(f"sin: shape {tuple(sin.shape)}, expected {tuple(cos.shape)} as cos has")


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(q, k, cos, sin, interleaved, False)

    @staticmethod
    @once
    def backward(ctx, dq, dk):
        return *_rotate(dq, dk, *ctx.saved_tensors, ctx.interleaved, True), None, None, None


def _rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    inverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k rotated, contiguous; raise TypeError or ValueError as `rotary` does."""
    _check(q, k, cos, sin)
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_out = torch.empty_like(k, memory_format=torch.contiguous_format)
    if q.numel() == 0 and k.numel() == 0:
        return q_out, k_out
    q = q if q.stride(3) == 1 else q.contiguous()
    k = k if k.stride(3) == 1 else k.contiguous()
    (b, s, h, d), heads, r = q.shape, k.shape[2], cos.shape[1]
    config = TILES.pick(
        q.device, heads=max(h, heads), r=r, itemsize=q.element_size(), interleaved=interleaved
    )
    block = config["BLOCK_H"]
    groups = (h + block - 1) // block + (heads + block - 1) // block
    stride_qb, stride_qs, stride_qh, _ = q.stride()
    stride_kb, stride_ks, stride_kh, _ = k.stride()
    _rotary_kernel[(b * s * groups,)](
        q_ptr=q, k_ptr=k,
        cos_ptr=cos.contiguous(), sin_ptr=sin.contiguous(), q_out_ptr=q_out, k_out_ptr=k_out,
        stride_qb=stride_qb, stride_qs=stride_qs, stride_qh=stride_qh,
        stride_kb=stride_kb, stride_ks=stride_ks, stride_kh=stride_kh, S=s,
        H=h, K=heads, D=d, R=r, INTERLEAVED=interleaved, INVERSE=inverse, **config,
    )  # fmt: skip
    return q_out, k_out


@triton.jit
def _rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, S,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Rotate the first 2R entries of each head of q and k; copy the others.

    Grid: B * S * (cdiv(H, BLOCK_H) + cdiv(K, BLOCK_H)). A program owns BLOCK_H heads of q, or of k,
    at one token. It reads the heads and the R cosines and sines of their position, and writes the
    heads. H, K: heads of q and k. D: entries of a head. R: pairs of a head, 0 < 2R <= D.
    INTERLEAVED: pairs are neighbours. INVERSE: rotate by the opposite angles. BLOCK_H: a power of
    two.
    """
    GROUPS_Q: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    GROUPS: tl.constexpr = GROUPS_Q + (K + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    token, group = pid // GROUPS, pid % GROUPS
    b, s = (token // S).to(tl.int64), (token % S).to(tl.int64)
    token = token.to(tl.int64)
    cos_ptr += s * R
    sin_ptr += s * R
    if group < GROUPS_Q:
        _turn_heads(
            q_ptr + b * stride_qb + s * stride_qs, q_out_ptr + token * (H * D), cos_ptr, sin_ptr,
            stride_qh, group * BLOCK_H, H, D, R, INTERLEAVED, INVERSE, BLOCK_H,
        )  # fmt: skip
    else:
        _turn_heads(
            k_ptr + b * stride_kb + s * stride_ks, k_out_ptr + token * (K * D), cos_ptr, sin_ptr,
            stride_kh, (group - GROUPS_Q) * BLOCK_H, K, D, R, INTERLEAVED, INVERSE, BLOCK_H,
        )  # fmt: skip


@triton.jit
def _turn_heads(
    x_ptr, out_ptr, cos_ptr, sin_ptr, stride_h, first, H: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK_H heads of one token, from the head `first` on; H: the number of heads."""
    BLOCK_R: tl.constexpr = triton.next_power_of_2(R)
    REST: tl.constexpr = triton.next_power_of_2(max(D - 2 * R, 1))
    heads = first + tl.arange(0, BLOCK_H)[:, None]  # [BLOCK_H, 1]
    x_ptr += heads.to(tl.int64) * stride_h
    out_ptr += heads * D
    offs = tl.arange(0, BLOCK_R)[None, :]  # [1, BLOCK_R]
    mask = (heads < H) & (offs < R)
    # Every head loads the angles for itself, so that each thread has the angles of its own pairs.
    alike = tl.zeros((BLOCK_H, 1), tl.int32)
    cos = tl.load(cos_ptr + alike + offs, mask=mask).to(tl.float32)
    sin = tl.load(sin_ptr + alike + offs, mask=mask).to(tl.float32)
    sin = -sin if INVERSE else sin
    offs_rest = 2 * R + tl.arange(0, REST)[None, :]
    mask_rest = (heads < H) & (offs_rest < D)
    if D > 2 * R:
        rest = tl.load(x_ptr + offs_rest, mask=mask_rest)
    dtype = out_ptr.dtype.element_ty
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_R)[None, :]
        mask = (heads < H) & (both < 2 * R)
        pairs = tl.load(x_ptr + both, mask=mask).to(tl.float32)  # [BLOCK_H, 2 * BLOCK_R]
        a, b = tl.split(tl.reshape(pairs, (BLOCK_H, BLOCK_R, 2)))
        a, b = _turn(a, b, cos, sin)
        pairs = tl.reshape(tl.join(a, b), (BLOCK_H, 2 * BLOCK_R))
        tl.store(out_ptr + both, pairs.to(dtype), mask=mask, cache_modifier=".cs")
    else:
        a = tl.load(x_ptr + offs, mask=mask).to(tl.float32)
        b = tl.load(x_ptr + R + offs, mask=mask).to(tl.float32)
        a, b = _turn(a, b, cos, sin)
        tl.store(out_ptr + offs, a.to(dtype), mask=mask, cache_modifier=".cs")
        tl.store(out_ptr + R + offs, b.to(dtype), mask=mask, cache_modifier=".cs")
    if D > 2 * R:
        tl.store(out_ptr + offs_rest, rest, mask=mask_rest, cache_modifier=".cs")


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


TILES = Configs(_rotary_kernel, HEADS, _choose, _suits)
_rotate = cached_launch(_rotate)

"""Scaled dot-product attention, forward: out = softmax(scale q kᵀ + mask) v for each head.

The S by S scores never leave the chip (Dao et al., "FlashAttention", 2022). A program owns a tile
of query rows and walks the keys in tiles, with the running maximum and sum of an online softmax;
the maximum and the sum live in base 2, so that scale and log2(e) fold into one multiplication.
Only tiles that the diagonal or the end of the sequence cuts are masked; all others run without.
Causal programs start with the longest rows, so that the last ones to finish are short.
"""

import math

import torch
import triton
import triton.language as tl

from kernels._call_cache import cached_launch
from kernels._checks import flag, floating, require, same, tensors
from kernels._device import float32_dot, shared_bytes
from kernels._launch import constant
from kernels._layout import as_read
from kernels._tile import store_as
from kernels._tuned import Configs

LOG2E = math.log2(math.e)
# Values of a tile below the one are multiplied by the other: both are powers of two.
TINY, LIFT = tl.constexpr(2.0**-60), tl.constexpr(2.0**60)
HEAD_DIMS = (16, 32, 64, 128)


ACCUMULATES = {"attention": "float32"}


def _tile(m, n, warps, stages):
    return {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}


CONFIGS = (
    _tile(128, 64, 8, 3),
    _tile(64, 64, 4, 3),
    _tile(128, 64, 8, 4),
    _tile(128, 64, 4, 2),
    _tile(128, 128, 8, 2),
    _tile(64, 32, 4, 2),
)
MORE_CONFIGS = (_tile(64, 64, 4, 2), _tile(64, 128, 4, 2), _tile(128, 128, 8, 3))
FLOAT32_CONFIG = _tile(64, 32, 4, 2)


def _shared_bytes(config, d, itemsize):
    """What the tile of q and the stages of k and v take."""
    keys = 2 * config["num_stages"] * config["BLOCK_N"]
    return (config["BLOCK_M"] + keys) * d * itemsize


def _choose(s, d, itemsize, causal, shared):
    if itemsize == 4:
        return FLOAT32_CONFIG
    # Where a head is wide, two small programs a multiprocessor overlap better than one.
    ranked = (CONFIGS[1], CONFIGS[0]) if d == 128 else CONFIGS[:2]
    fitting = [config for config in ranked if _shared_bytes(config, d, itemsize) <= shared]
    return fitting[0] if fitting else CONFIGS[-1]


@triton.jit
def _walk_keys(
    acc, total, top, q, k_ptrs, v_ptrs, offs_m, first, last, S, stride_ks, stride_vs, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_n = tl.arange(0, BLOCK_N)
    # A sequence length of one is a compile-time constant, and so is what follows from it.
    k_ptrs += tl.cast(first, tl.int64) * stride_ks
    v_ptrs += tl.cast(first, tl.int64) * stride_vs
    for start in range(first, last, BLOCK_N):
        inside = start + offs_n < S
        k = tl.load(k_ptrs, mask=inside[None, :], other=0.0) if MASKED else tl.load(k_ptrs)
        scores = tl.dot(q, k, input_precision=PRECISION)
        if MASKED:
            keep = inside[None, :]
            if CAUSAL:
                keep = keep & (offs_m[:, None] >= start + offs_n[None, :])
            scores = tl.where(keep, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        # A row that has only seen minus infinity must not subtract it from itself.
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores * scale - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        v = tl.load(v_ptrs, mask=inside[:, None], other=0.0) if MASKED else tl.load(v_ptrs)
        if v.dtype == tl.float32:
            # A float32 product is made of parts of its factors, which are subnormal, and lost on
            # the tensor cores, long before the factors are.
            lift = tl.where(tl.max(tl.abs(v)) < TINY, LIFT, 1.0)
            acc += tl.dot(weights, v * lift, input_precision=PRECISION) / lift
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
        k_ptrs += tl.cast(stride_ks, tl.int64) * BLOCK_N
        v_ptrs += tl.cast(stride_vs, tl.int64) * BLOCK_N
    return acc, total, top


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os,
    H, S, scale,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # torch.compile hands scalars over in float64.
    scale = tl.cast(scale, tl.float32)
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = (tl.program_id(1) % H).to(tl.int64)
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    rows = offs_m.to(tl.int64)[:, None]
    q_ptrs = q_ptr + batch * stride_qb + head * stride_qh + rows * stride_qs + offs_d[None, :]
    k_ptrs = k_ptr + batch * stride_kb + head * stride_kh
    k_ptrs += offs_n.to(tl.int64)[None, :] * stride_ks + offs_d[:, None]
    v_ptrs = v_ptr + batch * stride_vb + head * stride_vh
    v_ptrs += offs_n.to(tl.int64)[:, None] * stride_vs + offs_d[None, :]
    q = tl.load(q_ptrs, mask=offs_m[:, None] < S, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    # Keys before `whole` need no mask, keys from there to `last` do.
    whole = (S // BLOCK_N) * BLOCK_N
    last = S
    if CAUSAL:
        whole = tl.minimum(whole, (tile * BLOCK_M // BLOCK_N) * BLOCK_N)
        last = tl.minimum(S, (tile + 1) * BLOCK_M)
    acc, total, top = _walk_keys(
        acc, total, top, q, k_ptrs, v_ptrs, offs_m, 0, whole, S, stride_ks, stride_vs,
        scale, CAUSAL, False, PRECISION, BLOCK_N,
    )  # fmt: skip
    acc, total, top = _walk_keys(
        acc, total, top, q, k_ptrs, v_ptrs, offs_m, whole, last, S, stride_ks, stride_vs,
        scale, CAUSAL, True, PRECISION, BLOCK_N,
    )  # fmt: skip
    out_ptrs = out_ptr + batch * stride_ob + head * stride_oh + rows * stride_os + offs_d[None, :]
    store_as(out_ptrs, acc / total[:, None], offs_m[:, None] < S)


FORWARD = Configs(_forward_kernel, CONFIGS + MORE_CONFIGS, _choose)
# What the second dimension of a grid holds.
MOST_HEADS = 65535


def attention_fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """q, k, v: [B, H, S, D], contiguous in D. Returns out, contiguous."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() > 0:
        _start(q, k, v, out, causal)
    return out


def _start(q, k, v, out, causal):
    b, h, s, d = q.shape
    if b * h > MOST_HEADS:
        halves = (x.chunk(2, dim=0 if b > 1 else 1) for x in (q, k, v, out))
        for half in zip(*halves, strict=True):
            _start(*half, causal)
        return
    config = FORWARD.pick(
        q.device,
        s=s, d=d, itemsize=q.element_size(), causal=causal, shared=shared_bytes(q.device),
    )  # fmt: skip
    laid = {"q": q, "k": k, "v": v, "o": out}
    strides = {
        f"stride_{name}{letter}": tensor.stride(axis)
        for name, tensor in laid.items()
        for axis, letter in enumerate("bhs")
    }
    _forward_kernel[(triton.cdiv(s, config["BLOCK_M"]), b * h)](
        q_ptr=q, k_ptr=k, v_ptr=v, out_ptr=out, **strides, H=h, S=s, scale=LOG2E / math.sqrt(d),
        CAUSAL=causal,
        # Only float32 has anything to split.
        PRECISION=float32_dot() if q.dtype == torch.float32 else "ieee",
        BLOCK_D=d, **config,
    )  # fmt: skip


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(D) + mask) v for each batch and head, softmax in float32.

    q, k, v: [B, H, S, D], one shape and one dtype of float32, float16, bfloat16; D is 16, 32, 64
    or 128. causal: row i sees the keys 0 to i. Returns [B, H, S, D]. TypeError for another dtype;
    ValueError where shapes, dtypes, devices or D do not fit, or a gradient is wanted, as there is
    no backward pass.
    """
    tensors(q=q, k=k, v=v)
    flag("causal", causal)
    constant(q=q, k=k, v=v)
    require(q.dim() == 4, f"q: {q.dim()} dimensions, expected 4")
    require(q.shape[-1] in HEAD_DIMS, f"q: head dimension {q.shape[-1]}, expected {HEAD_DIMS}")
    floating(q=q)
    same(q=q, k=k, v=v)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in map(as_read, (q, k, v)))
    return attention_fwd(q, k, v, causal)


attention_fwd = cached_launch(attention_fwd)

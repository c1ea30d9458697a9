"""Scaled dot-product attention: out = softmax(scale q kᵀ + mask) v for each head.

FLOPs: 4 D for each pair of a row and a key that it sees, forward; 10 D backward. Bytes: q, k and v
read, out written; the scores never leave the chip (Dao et al., "FlashAttention", 2022). A program
owns a tile of query rows and walks the keys in tiles, with the running maximum m and sum l of an
online softmax. In 16 bits both live in base 2: scale and log2(e) fold into one factor. Only tiles
that the diagonal, a window or the end of the sequence cuts are masked; all others run
without, and tiles that no row sees are skipped. Programs of one head stand side by side, so its
keys stay in L2; causal ones start with the longest rows.

A softcap c makes the scores s = c tanh(scale q kᵀ / c), before the mask; their gradient has the
factor 1 - (s / c)² (Gemma 2, 2024).

On Hopper, in 16 bits with heads of 64 or 128, warpgroups that take turns do the same:
`attention_details/forward_hopper.py`. It takes neither a softcap nor a mask nor dropout.

The backward pass recomputes the scores (Dao, "FlashAttention-2", 2023):
`attention_details/backward.py`. For it the forward pass keeps m + log2(l) of each row. In float32
it keeps them apart: their sum would lose the digits of log2(l) where m is large. Dropout keeps
nothing but its seed.
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import check_no_grad, needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import (
    check_flag,
    check_integer,
    check_number,
    check_tensor,
    check_tensors,
    check_that,
)
from ._runtime.configs import Configs
from ._runtime.device import shared_bytes
from .attention_details import forward_hopper as hopper
from .attention_details.backward import attention_bwd
from .attention_details.launch import (
    LEVELS,
    SCALES,
    SMALL,
    cap_number,
    check_heads,
    first_to_fit,
    in_rows,
    like,
    options_of,
    strides_of,
    strides_of_mask,
    tile,
    window_sizes,
)
from .attention_details.scores import attend_tile
from .random_details.philox import boxed

ACCUMULATES = {"attention": "float32"}


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    dropout: float = 0.0,
    seed: int | torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(scale q kᵀ + mask) v for each batch and head, the softmax in float32.

    Row i stands at key p = i + Sk - Sq: the last row at the last key, as in flash-attn from 2.1 on
    and PyTorch's `causal_lower_right`. A row that sees no key, or only scores of minus infinity,
    gives zeros and a logarithm of minus infinity.

    Args:
        q: `[B, H, Sq, D]`; float32, float16 or bfloat16; D a multiple of 8 from 16 to 256. Any
            strides: heads may lie between the tokens, as in a view of `[B, S, H, D]`. A tensor is
            copied only if its last stride is not 1.
        k: `[B, K, Sk, D]` with the dtype of q; H is a multiple of K. Query head h reads key head
            h // (H / K), so K = H is plain attention, and K = 1 multi-query.
        v: as k.
        causal: a row sees no key beyond p.
        scale: factor of the scores, above zero; 1 / sqrt(D) if None.
        window: (left, right): a row sees the keys from p - left to p + right, both included. -1 is
            no bound, as in flash-attn's `window_size`. An integer is both; causal makes right zero.
            So a causal window of w sees w + 1 keys.
        dropout: the probability with which a weight is dropped, to the nearest multiple of 2**-16.
            Weights that are kept are divided by their share.
        seed: 64 bits, a number or a tensor of one int64; dropout needs it. The same seed drops the
            same weights.
        mask: added to the scores, of q's dtype or float32. Or bool: True lets a key take part, as
            in PyTorch. It broadcasts to `[B, H, Sq, Sk]`. Beside q of 16 bits, numbers below
            -2.3e38 may count as minus infinity: scores are in base 2.
        softcap: a positive number c, which makes the scores c tanh(scores / c) before the mask, as
            in Gemma 2. On Hopper the portable kernels compute it.
        return_lse: whether to return also the logarithm of the sum of exponentials.

    Returns:
        `[B, H, Sq, D]`, the axes in memory in the order of q's. With return_lse also the natural
        logarithm of the sum of exponentials before dropout, `[B, H, Sq]` in float32. Both are
        differentiable once, in q, k and v. On Hopper the last bits of dq may differ from call to
        call, unless `torch.use_deterministic_algorithms(True)` asks for the slower kernels.

    Raises:
        TypeError: an argument is of another kind, or a tensor of another dtype.
        ValueError: shapes, devices or values do not fit, or the mask requires a gradient.

    Source:
        Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning"
        (2023); the softcap: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical
        Size" (2024).

    Example:
        >>> q, k, v = (torch.randn(1, 2, 20, 32, device="cuda") for _ in range(3))
        >>> attention(q, k, v, causal=True).shape
        torch.Size([1, 2, 20, 32])
    """
    check_tensors(q=q, k=k, v=v)
    check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    check_heads(q, k, v)
    _check_mask(mask, q, k)
    scale = q.shape[-1] ** -0.5 if scale is None else check_number("scale", scale, *SCALES)
    left, right = _within(*window_sizes(window, causal), q.shape[2], k.shape[2])
    cap = cap_number(softcap)
    dropped = _dropped(check_number("dropout", dropout, 0, 1))
    seed = _seed(seed, dropped, q)
    # If all is dropped nothing is left to be divided.
    inverse = LEVELS / (LEVELS - dropped) if dropped < LEVELS else 0.0
    options = scale, cap, inverse, dropped, left, right
    if needs_grad(q, k, v):
        return _Attention.apply(q, k, v, mask, seed, return_lse, *options)
    out, lse, _ = attention_fwd(q, k, v, mask, seed, *options, return_lse, False)
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, seed, return_lse, *options):
        out, lse, stats = attention_fwd(q, k, v, mask, seed, *options, return_lse, True)
        # A seed on the device may be changed before the backward pass: autograd watches it.
        drawn = seed if isinstance(seed, torch.Tensor) else None
        ctx.save_for_backward(q, k, v, out, stats, mask, drawn)
        ctx.number = seed if drawn is None else 0
        ctx.options = options
        return (out, lse) if return_lse else out

    @staticmethod
    @once
    def backward(ctx, dout, dlse=None):
        q, k, v, out, stats, mask, drawn = ctx.saved_tensors
        seed = ctx.number if drawn is None else drawn
        keys = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        deterministic = torch.are_deterministic_algorithms_enabled()
        grads = attention_bwd(
            q, k, v, out, stats, dout, dlse, mask, seed, *ctx.options, keys, deterministic
        )
        return *grads, *[None] * (3 + len(ctx.options))


def _check_mask(mask, q, k):
    """TypeError or ValueError where the mask does not belong to q and k."""
    if mask is None:
        return
    check_tensor("mask", mask)
    check_no_grad(mask=mask)
    if mask.dtype not in (torch.bool, torch.float32, q.dtype):
        raise TypeError(f"mask: {mask.dtype}, expected {q.dtype}, float32 or bool")
    check_that(mask.device == q.device, f"mask: on {mask.device}, expected {q.device} as q is")
    shape, full = tuple(mask.shape), (*q.shape[:3], k.shape[2])
    fits = len(shape) <= 4 and all(
        size in (1, most) for size, most in zip(reversed(shape), reversed(full), strict=False)
    )
    check_that(fits, f"mask: shape {shape}, expected one that broadcasts to {full}")


def _within(left: int | None, right: int | None, sq: int, sk: int) -> tuple[int | None, int | None]:
    """The sizes of a window over sq rows and sk keys, larger ones cut to what bounds nothing.

    The kernels add positions to them: sums of the sizes as given may pass 2**31.
    """
    return None if left is None else min(left, sk), None if right is None else min(right, sq)


def _dropped(p):
    """How many of the LEVELS numbers drop an entry; some keep it unless p is one."""
    return LEVELS if p == 1 else min(round(p * LEVELS), LEVELS - 1)


def _seed(seed, dropped, q):
    """The seed; zero if nothing is dropped."""
    if isinstance(seed, torch.Tensor):
        fits = seed.dtype == torch.int64 and seed.numel() == 1
        check_that(fits, f"seed: {tuple(seed.shape)} {seed.dtype}, expected one int64")
        check_that(seed.device == q.device, f"seed: on {seed.device}, expected {q.device} as q is")
    elif seed is not None:
        check_integer("seed", seed, -(2**63), 2**63 - 1)
    check_that(seed is not None or not dropped, "seed: None, expected one, as there is dropout")
    return seed if dropped else 0


@triton.jit(do_not_specialize=["seed", "dropped"])
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr, lse_ptr, stats_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os,
    stride_mb, stride_mh, stride_mm, stride_mn,
    H, GROUP, SQ, SK, left, right, scale, softcap, seed, dropped, inverse, rows,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out = softmax(s) v, lse = log sum exp(s), s = cap(scale q kᵀ) + mask, for each head.

    Grid: cdiv(SQ, BLOCK_M) * B * H programs, tiles of one head side by side. A program owns
    BLOCK_M rows of one head. It reads them in q, walks the keys that they see, and writes them in
    out, lse and stats. The rows of stats hold m + log2(l). In float32 they hold m, and log2(l) lies
    `rows` further on. mask, lse and stats may be None.

    Here cap(x) is softcap tanh(x / softcap), or x if softcap is None.

    GROUP: query heads of one key head. left, right: bounds if LEFT, RIGHT, as in
    `attention_details/scores.py`.
    inverse: one over the share that DROPOUT keeps. BLOCK_D: a power of two, at least D.
    """
    tiles = tl.cdiv(SQ, BLOCK_M)
    tile, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if RIGHT:
        tile = tiles - 1 - tile
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    head = head.to(tl.int64)
    if mask_ptr is not None:
        mask_ptr += b * stride_mb + h * stride_mh
    attend_tile(
        q_ptr + b * stride_qb + h * stride_qh, k_ptr + b * stride_kb + h // GROUP * stride_kh,
        v_ptr + b * stride_vb + h // GROUP * stride_vh, mask_ptr,
        out_ptr + b * stride_ob + h * stride_oh, lse_ptr, stats_ptr,
        stride_qs, stride_ks, stride_vs, stride_os, stride_mm, stride_mn,
        tile, head, head * SQ, SQ, SK, left, right, scale, softcap, seed, dropped, inverse, rows,
        LEFT, RIGHT, DROPOUT, PRECISION, D, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip


def attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    seed: int | torch.Tensor,
    scale: float,
    softcap: float,
    inverse: float,
    dropped: int,
    left: int | None,
    right: int | None,
    return_lse: bool,
    keep_stats: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return out, lse if return_lse, and the statistics of rows if keep_stats.

    Those are [2, B, H, Sq] in float32: m and log2(l); of 16 bits [1, B, H, Sq]: their sum.
    Arguments as `attention` takes them. left, right: sizes of the window, None if unbounded.
    softcap: zero for none. dropped: of 2**16 numbers so many drop a weight. The inverse is one over
    the share that is kept. It is an argument, because a plan takes no float that a launcher makes.
    """
    q, k, v = map(in_rows, (q, k, v))
    b, h, sq, d = q.shape
    sk = k.shape[2]
    out = like(q)
    lse = q.new_empty((b, h, sq), dtype=torch.float32) if return_lse else None
    planes = 2 if q.dtype == torch.float32 else 1
    stats = q.new_empty((planes, b, h, sq), dtype=torch.float32) if keep_stats else None
    if out.numel() == 0:
        return out, lse, stats
    if mask is None and not dropped and not softcap and hopper.suits(q, k, v):
        square = hopper.ends_in_square(sq, sk, right)
        config = HOPPER_FORWARD.pick(q.device, s=sk, d=d, causal=right is not None, square=square)
        hopper.forward_hopper(q, k, v, out, lse, stats, scale, left, right, config)
        return out, lse, stats
    config = FORWARD.pick(
        q.device, s=sk, d=d, itemsize=q.element_size(), causal=right is not None,
        shared=shared_bytes(q.device),
    )  # fmt: skip
    _forward_kernel[(triton.cdiv(sq, config["BLOCK_M"]) * b * h,)](
        q_ptr=q, k_ptr=k, v_ptr=v, mask_ptr=mask, out_ptr=out, lse_ptr=lse, stats_ptr=stats,
        **strides_of(q=q, k=k, v=v, o=out), **strides_of_mask(mask, (b, h, sq, sk)),
        **options_of(q, k, left, right, dropped, inverse),
        scale=scale, softcap=softcap or None, seed=boxed(seed, q.device), rows=b * h * sq, **config,
    )  # fmt: skip
    return out, lse, stats


NARROW, WIDE = tile(128, 64, 8, 3), tile(64, 64, 4, 3)
CONFIGS = (tile(128, 64, 8, 2), tile(64, 32, 4, 2), *SMALL)
MORE_CONFIGS = (
    tile(128, 64, 8, 4),
    tile(128, 64, 4, 2),
    tile(128, 128, 8, 2),
    tile(64, 64, 4, 2),
    tile(64, 128, 4, 2),
    tile(128, 128, 8, 3),
)


def _choose(s, d, itemsize, causal, shared):
    # If a head is wide, two small programs a multiprocessor overlap better than one; one whose
    # accumulator fills the registers has no choice. See the lab book: tiles by the tuner.
    best = NARROW if d <= 64 else WIDE if d <= 128 else CONFIGS[0]
    ranked = (best, *CONFIGS) if itemsize == 2 else SMALL
    return first_to_fit(ranked, ("BLOCK_M", "BLOCK_N"), 1, d, itemsize, shared)


FORWARD = Configs(_forward_kernel, (NARROW, WIDE, *CONFIGS, *MORE_CONFIGS), _choose)

HOPPER_FORWARD = hopper.FORWARD

attention_fwd = cached_launch(attention_fwd)

"""Attention of packed sequences of any lengths: softmax(scale q kᵀ) v within each of them.

Sequences lie end to end in q, k and v, so nothing is padded. The arithmetic is that of
`attention.py`: its tiles of the forward and of the backward pass, moved to the rows of a sequence.
The lengths lie on the device, and the host never waits for them: it starts enough programs for any
lengths of this sum, and each finds its sequence (`attention_details/packed.py`). On Hopper, in 16
bits with heads of 64 or 128, the kernels are `packed_forward_hopper.py` and
`packed_backward_hopper.py` of `attention_details/`.

FLOPs: 4 D for each pair of a row and a key that it sees, forward; 14 D backward, of which 10 D are
needed. Bytes: q, k and v read, out written. Each result has one owner, which sums in registers, so
two runs give the same bits. On Hopper dq is added up in memory.
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import needs_grad, once
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
from ._runtime.configs import Config, Configs
from ._runtime.device import has_tensor_memory, shared_bytes
from ._runtime.traced import operation, spread
from .attention_details import packed_forward_hopper as hopper
from .attention_details.backward import DKDV_CONFIGS, DQ_CONFIGS, dkdv_tile, dq_tile
from .attention_details.launch import (
    SCALES,
    SMALL,
    cap_number,
    check_keys,
    check_width,
    first_to_fit,
    in_rows,
    in_tensor_memory,
    like,
    strides_of,
    tile,
    widths_of,
    window_sizes,
)
from .attention_details.packed import bounds_in, rows_in, slots_of, tile_in
from .attention_details.packed_backward_hopper import (
    BACKWARD,
    packed_backward_hopper,
    suits_backward,
)
from .attention_details.scores import attend_tile

ACCUMULATES = {"attention_varlen": "float32"}
# Rows and keys of a sequence together stay below 2**31.
MOST_ROWS = MOST_ITEMS // 2


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(scale q kᵀ) v for each head of each packed sequence, the softmax in float32.

    Sequence i has the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] - 1 of q, and the keys that
    cu_seqlens_k gives it so. Its last row stands at its last key, as in flash-attn's
    `flash_attn_varlen_func`. A row that sees no key gives zeros and a logarithm of minus infinity.
    So do rows past the last sequence.

    Args:
        q: `[total_q, H, D]`; float32, float16 or bfloat16; D a multiple of 8 from 16 to 256. Any
            strides: a tensor is copied only if its last stride is not 1.
        k: `[total_k, K, D]` with the dtype of q; H is a multiple of K. Query head h reads key head
            h // (H / K).
        v: as k.
        cu_seqlens_q: `[B + 1]`, int32 or int64: the row at which each sequence begins, and the end
            of the last one. It begins with zero and never falls. It is read on the device. Other
            numbers give other results, but never lead to memory outside of the tensors.
        cu_seqlens_k: as cu_seqlens_q, of the keys. Give the same tensor for self-attention: the
            host then knows that rows and keys are as many, which saves work on a diagonal.
        max_seqlen_q: the largest number of rows of a sequence, if it is known. It may choose
            another tile or order of the work, and so change the last bits of a result.
        max_seqlen_k: as max_seqlen_q, of the keys.
        causal: a row sees no key beyond the one at which it stands.
        scale: factor of the scores, above zero; 1 / sqrt(D) if None.
        window: (left, right) as in `attention`: the numbers of keys before and after its own that a
            row sees. -1 is no bound. An integer is both; causal makes right zero.
        softcap: a positive number c, which makes the scores c tanh(scores / c), as in Gemma 2.
        return_lse: whether to return also the logarithm of the sum of exponentials.

    Returns:
        `[total_q, H, D]`. With return_lse also the natural logarithm of the sum of exponentials,
        `[H, total_q]` in float32. Both are differentiable once, in q, k and v. On Hopper the last
        bits of dq may differ from call to call, unless `torch.use_deterministic_algorithms(True)`
        asks for the slower kernels.

    Raises:
        TypeError: an argument is of another kind, or a tensor of another dtype.
        ValueError: shapes, devices or values do not fit.

    Source:
        Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning"
        (2023), and its `flash_attn_varlen_func`; how a program finds its sequence: vLLM's unified
        attention kernel.

    Example:
        >>> q, k, v = (torch.randn(20, 2, 32, device="cuda") for _ in range(3))
        >>> ends = torch.tensor([0, 5, 20], dtype=torch.int32, device="cuda")
        >>> attention_varlen(q, k, v, ends, ends, causal=True).shape
        torch.Size([20, 2, 32])
    """
    check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    _check_packed(q, k, v)
    _check_boundaries(q, cu_seqlens_q, cu_seqlens_k)
    longest_q = _longest("max_seqlen_q", max_seqlen_q, q)
    longest_k = _longest("max_seqlen_k", max_seqlen_k, k)
    scale = q.shape[-1] ** -0.5 if scale is None else check_number("scale", scale, *SCALES)
    options = scale, cap_number(softcap), *window_sizes(window, causal), longest_q, longest_k
    # Only here is it known whether both are one tensor. Neither the launch cache nor a tracer takes
    # a tensor twice. None is in the key of a plan and in a traced graph, and no identity is.
    cu = cu_seqlens_q, None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k
    if needs_grad(q, k, v):
        return _AttentionVarlen.apply(q, k, v, *cu, return_lse, *options)
    out, lse, _ = _forward(q, k, v, *cu, *options, return_lse, False)
    return (out, lse) if return_lse else out


class _AttentionVarlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_q, cu_k, return_lse, *options):
        out, lse, stats = _forward(q, k, v, cu_q, cu_k, *options, return_lse, True)
        ctx.save_for_backward(q, k, v, out, stats, cu_q, cu_k)
        ctx.options = options
        return (out, lse) if return_lse else out

    @staticmethod
    @once
    def backward(ctx, dout, dlse=None):
        q, k, v, out, stats, cu_q, cu_k = ctx.saved_tensors
        keys = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        rest = cu_q, cu_k, *ctx.options, keys, torch.are_deterministic_algorithms_enabled()
        grads = _backward(q, k, v, out, stats, dout, dlse, *rest)
        return *grads, *[None] * (3 + len(ctx.options))


def _check_packed(q, k, v):
    """TypeError or ValueError where these are not [total_q, H, D] and twice [total_k, K, D]."""
    check_that(q.dim() == 3, f"q: {q.dim()} dimensions, expected 3: [total, H, D]")
    check_width(q)
    check_that(k.dim() == 3, f"k: {k.dim()} dimensions, expected 3: [total, K, D]")
    (rows, h, d), (keys, heads, _) = q.shape, k.shape
    check_that(k.shape[2] == d, f"k: shape {tuple(k.shape)}, expected [total, K, {d}] as q has")
    check_keys(q, k, v, h, heads, max(rows, keys))
    most = max(rows, keys)
    check_that(most <= MOST_ROWS, f"q, k: {most} positions, expected {MOST_ROWS} or fewer")


def _check_boundaries(q, cu_seqlens_q, cu_seqlens_k):
    """TypeError or ValueError where these are not [B + 1] integers on the device of q."""
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(name, cu)
        if cu.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: {cu.dtype}, expected int32 or int64")
        check_that(cu.dim() == 1, f"{name}: {cu.dim()} dimensions, expected 1: [B + 1]")
        check_that(cu.numel() > 0, f"{name}: shape (0,), expected one number or more")
        check_that(cu.device == q.device, f"{name}: on {cu.device}, expected {q.device} as q is")
    shape, expected = tuple(cu_seqlens_k.shape), tuple(cu_seqlens_q.shape)
    fits = f"cu_seqlens_k: shape {shape}, expected {expected} as cu_seqlens_q has"
    check_that(shape == expected, fits)


def _longest(name, most, x):
    """The power of two that holds a sequence: tiles seldom change from batch to batch."""
    total = x.shape[0]
    most = total if most is None else min(total, check_integer(name, most, 0, MOST_ITEMS))
    return 1 << max(0, most - 1).bit_length()


# Boundaries and totals differ from call to call, and no kernel shall be compiled for one of them.
CHANGING = ["B", "TOTAL_Q", "TOTAL_K", "before", "after", "rows"]


@triton.jit
def _place(
    cu_q_ptr, cu_k_ptr, stride_cq, stride_ck, B, TOTAL_Q, TOTAL_K, before, after,
    RIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The head and the tile of rows of a program, its sequence, and the bounds of that.

    The sequence is given by its first row, rows, first key and keys. A program without a tile has
    one that begins outside of the rows. Causal tiles come in the order of falling lengths.
    """
    slots = slots_of(TOTAL_Q, B, BLOCK_M)
    head, slot = (tl.program_id(0) // slots).to(tl.int64), tl.program_id(0) % slots
    index, tile = tile_in(cu_q_ptr, stride_cq, B, TOTAL_Q, slot, BLOCK_M)
    first_row, rows = rows_in(cu_q_ptr, stride_cq, B, TOTAL_Q, index, True)
    first_key, keys = rows_in(cu_k_ptr, stride_ck, B, TOTAL_K, index, False)
    if RIGHT:
        tile = tl.cdiv(rows, BLOCK_M) - 1 - tile
    left, right = bounds_in(rows, keys, before, after)
    return head, tile, first_row.to(tl.int64), rows, first_key.to(tl.int64), keys, left, right


@triton.jit(do_not_specialize=CHANGING)
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, out_ptr, lse_ptr, stats_ptr,
    stride_qs, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh, stride_os, stride_oh,
    stride_cq, stride_ck, B, TOTAL_Q, TOTAL_K, GROUP, before, after, scale, softcap, rows,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out = softmax(s) v, lse = log sum exp(s), s = cap(scale q kᵀ), for each head and sequence.

    Grid: (TOTAL_Q // BLOCK_M + B + 1) * H programs. A program finds a tile of BLOCK_M rows of one
    sequence in the boundaries cu_q [B + 1], or ends. It reads the rows of one head in q, walks the
    keys of the sequence that they see, and writes them in out, lse and stats. Their numbers in lse
    and stats are [H, TOTAL_Q], as the kernel of `attention` has them; both may be None.

    GROUP: query heads of one key head. before, after: sizes of the window if LEFT, RIGHT. BLOCK_D:
    a power of two, at least D.
    """
    head, tile, first_row, SQ, first_key, SK, left, right = _place(
        cu_q_ptr, cu_k_ptr, stride_cq, stride_ck, B, TOTAL_Q, TOTAL_K, before, after,
        RIGHT, BLOCK_M,
    )  # fmt: skip
    if (tile >= 0) & (tile * BLOCK_M < SQ):
        key_head = head // GROUP
        attend_tile(
            q_ptr + head * stride_qh + first_row * stride_qs,
            k_ptr + key_head * stride_kh + first_key * stride_ks,
            v_ptr + key_head * stride_vh + first_key * stride_vs, None,
            out_ptr + head * stride_oh + first_row * stride_os, lse_ptr, stats_ptr,
            stride_qs, stride_ks, stride_vs, stride_os, 0, 0,
            tile, 0, head * TOTAL_Q + first_row, SQ, SK, left, right, scale, softcap, 0, 0, 1.0,
            rows, LEFT, RIGHT, False, PRECISION, D, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip


@triton.jit(do_not_specialize=CHANGING)
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, out_ptr, dout_ptr, dlse_ptr, stats_ptr, delta_ptr,
    dq_ptr, stride_qs, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh, stride_os, stride_oh,
    stride_dos, stride_doh, stride_dqs, stride_dqh,
    stride_cq, stride_ck, B, TOTAL_Q, TOTAL_K, GROUP, before, after, scale, softcap, rows,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq = scale dS k, and delta = rowsum(dO O) - dlse for the kernel of dk and dv.

    Grid: as of the forward kernel, whose parameters these are. A program owns BLOCK_M rows of one
    head and sequence, in q, out, dout, dlse and stats, and writes them in dq and delta. dlse may be
    None. Delta is [H, TOTAL_Q].
    """
    head, tile, first_row, SQ, first_key, SK, left, right = _place(
        cu_q_ptr, cu_k_ptr, stride_cq, stride_ck, B, TOTAL_Q, TOTAL_K, before, after,
        RIGHT, BLOCK_M,
    )  # fmt: skip
    if (tile >= 0) & (tile * BLOCK_M < SQ):
        key_head = head // GROUP
        dq_tile(
            q_ptr + head * stride_qh + first_row * stride_qs,
            k_ptr + key_head * stride_kh + first_key * stride_ks,
            v_ptr + key_head * stride_vh + first_key * stride_vs, None,
            out_ptr + head * stride_oh + first_row * stride_os,
            dout_ptr + head * stride_doh + first_row * stride_dos, dlse_ptr, stats_ptr, delta_ptr,
            dq_ptr + head * stride_dqh + first_row * stride_dqs,
            stride_qs, stride_ks, stride_vs, stride_os, stride_dos, stride_dqs, 0, 0,
            tile, 0, head * TOTAL_Q + first_row, SQ, SK, left, right, scale, softcap, 0, 0, 1.0,
            rows, LEFT, RIGHT, False, PRECISION, D, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip


@triton.jit(do_not_specialize=CHANGING)
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, dout_ptr, stats_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_qs, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh, stride_dos, stride_doh,
    stride_dks, stride_dkh, stride_dvs, stride_dvh,
    stride_cq, stride_ck, B, TOTAL_Q, TOTAL_K, GROUP, before, after, scale, softcap, rows,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dv = Pᵀ dO and dk = scale dSᵀ q, summed over the query heads of a key head.

    Grid: (TOTAL_K // BLOCK_N + B + 1) * K programs. A program finds a tile of BLOCK_N keys of one
    sequence in the boundaries cu_k [B + 1], or ends. It reads the keys of one key head in k and v,
    and writes them in dk and dv. In each of the GROUP query heads it walks the rows of the sequence
    that see them, in q, dout, stats and delta. Parameters are those of the forward kernel.
    """
    slots = slots_of(TOTAL_K, B, BLOCK_N)
    key_head, slot = (tl.program_id(0) // slots).to(tl.int64), tl.program_id(0) % slots
    index, tile = tile_in(cu_k_ptr, stride_ck, B, TOTAL_K, slot, BLOCK_N)
    first_key, SK = rows_in(cu_k_ptr, stride_ck, B, TOTAL_K, index, True)
    first_row, SQ = rows_in(cu_q_ptr, stride_cq, B, TOTAL_Q, index, False)
    left, right = bounds_in(SQ, SK, before, after)
    first_row, first_key = first_row.to(tl.int64), first_key.to(tl.int64)
    if tile * BLOCK_N < SK:
        dkdv_tile(
            q_ptr + first_row * stride_qs, k_ptr + key_head * stride_kh + first_key * stride_ks,
            v_ptr + key_head * stride_vh + first_key * stride_vs, None,
            dout_ptr + first_row * stride_dos, stats_ptr, delta_ptr,
            dk_ptr + key_head * stride_dkh + first_key * stride_dks,
            dv_ptr + key_head * stride_dvh + first_key * stride_dvs,
            stride_qh, stride_qs, stride_ks, stride_vs, stride_doh, stride_dos, stride_dks,
            stride_dvs, 0, 0, 0, tile, 0, key_head, first_row, TOTAL_Q,
            GROUP, SQ, SK, left, right, scale, softcap, 0, 0, 1.0, rows,
            LEFT, RIGHT, False, PRECISION, D, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip


def _forward(*arguments):
    """Return what `varlen_fwd` returns, in a traced graph by way of one operation."""
    if not torch.compiler.is_compiling():
        return varlen_fwd(*arguments)
    return spread(_traced_forward(*arguments), (True, *arguments[-2:]))


def _backward(*arguments):
    """Return what `varlen_bwd` returns, in a traced graph by way of one operation."""
    if not torch.compiler.is_compiling():
        return varlen_bwd(*arguments)
    keys = arguments[-2]
    return spread(_traced_backward(*arguments), (True, keys, keys))


def varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor | None,
    scale: float,
    softcap: float,
    left: int | None,
    right: int | None,
    longest_q: int,
    longest_k: int,
    return_lse: bool,
    keep_stats: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return out, lse if return_lse, and the statistics of rows if keep_stats.

    Those are [2, H, total_q] in float32: m and log2(l); of 16 bits [1, H, total_q]: their sum.
    Arguments as `attention_varlen` takes them. softcap: zero for none. left, right: sizes of the
    window, None if unbounded. longest_q, longest_k: powers of two, at least the longest sequence.

    cu_k: None if it is cu_q.
    """
    q, k, v = map(in_rows, (q, k, v))
    total, h, d = q.shape
    out = like(q)
    lse = q.new_empty((h, total), dtype=torch.float32) if return_lse else None
    stats = q.new_empty((_planes(q), h, total), dtype=torch.float32) if keep_stats else None
    if out.numel() == 0:
        return out, lse, stats
    square = hopper.ends_in_squares(q, k, cu_k is None, right)
    cu_k = cu_q if cu_k is None else cu_k
    if not softcap and hopper.suits_packed(q, k, v, longest_q * hopper.heads_of_a_tile(q, k)):
        mean, causal = hopper.mean_length(k, cu_k), right is not None
        config = HOPPER_FORWARD.pick(
            q.device, s=longest_k, mean=mean, d=d, causal=causal, square=square
        )
        hopper.packed_forward_hopper(
            q, k, v, out, lse, stats, cu_q, cu_k, scale, left, right, longest_k, square, config
        )
        return out, lse, stats
    config = FORWARD.pick(
        q.device, rows=longest_q, s=longest_k, d=d, itemsize=q.element_size(),
        causal=right is not None, shared=shared_bytes(q.device),
    )  # fmt: skip
    _forward_kernel[(_slots(q, cu_q, config["BLOCK_M"]) * h,)](
        q_ptr=q, k_ptr=k, v_ptr=v, cu_q_ptr=cu_q, cu_k_ptr=cu_k, out_ptr=out, lse_ptr=lse,
        stats_ptr=stats, **strides_of("sh", q=q, k=k, v=v, o=out),
        **_options(q, k, cu_q, cu_k, left, right), scale=scale, softcap=softcap or None, **config,
    )  # fmt: skip
    return out, lse, stats


def varlen_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor | None,
    scale: float,
    softcap: float,
    left: int | None,
    right: int | None,
    longest_q: int,
    longest_k: int,
    keys: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return dq, dk and dv; the latter two are None unless `keys`.

    Tensors and numbers are those that `varlen_fwd` was given and returned. dout, dlse: the
    gradients of its results. If deterministic, dq does not depend on an order of sums in memory.
    """
    q, k, v, dout = map(in_rows, (q, k, v, dout))
    cu_k = cu_q if cu_k is None else cu_k
    plain = keys and not softcap and not deterministic and q.numel()
    if plain and suits_backward(q, k, v, dout, cu_q, min(longest_q, longest_k)):
        mean, causal = hopper.mean_length(q, cu_q), right is not None
        config = HOPPER_BACKWARD.pick(q.device, mean=mean, d=q.shape[2], causal=causal)
        return packed_backward_hopper(
            q, k, v, out, stats, dout, dlse, cu_q, cu_k, scale, left, right, longest_q, config
        )
    h, heads, d = q.shape[1], k.shape[1], q.shape[2]
    dq, dk, dv = like(q), like(k) if keys else None, like(v) if keys else None
    delta = q.new_empty((h, q.shape[0]), dtype=torch.float32)
    given = {"d": d, "itemsize": q.element_size(), "shared": shared_bytes(q.device)}
    shared = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "cu_q_ptr": cu_q, "cu_k_ptr": cu_k, "dout_ptr": dout,
        "stats_ptr": stats, "delta_ptr": delta, "scale": scale, "softcap": softcap or None,
        **strides_of("sh", q=q, k=k, v=v, do=dout), **_options(q, k, cu_q, cu_k, left, right),
    }  # fmt: skip
    if dq.numel():
        config = DQ.pick(q.device, longest=longest_q, **given)
        _dq_kernel[(_slots(q, cu_q, config["BLOCK_M"]) * h,)](
            out_ptr=out, dlse_ptr=None if dlse is None else dlse.contiguous(), dq_ptr=dq,
            **shared, **strides_of("sh", o=out, dq=dq), **config,
        )  # fmt: skip
    if keys and dk.numel():
        tensor_memory = has_tensor_memory(q.device)
        config = DKDV.pick(q.device, longest=longest_k, **given, tensor_memory=tensor_memory)
        _dkdv_kernel[(_slots(k, cu_k, config["BLOCK_N"]) * heads,)](
            dk_ptr=dk, dv_ptr=dv, **shared, **strides_of("sh", dk=dk, dv=dv), **config
        )
    return dq, dk, dv


def _planes(q):
    """Return how many numbers are kept of each row of scores."""
    return 2 if q.dtype == torch.float32 else 1


def _slots(x, cu, block):
    """How many programs find all tiles of a head; see `slots_of`."""
    return x.shape[0] // block + cu.shape[0]


def _options(q, k, cu_q, cu_k, left, right):
    """The arguments that follow from shapes and window, as all kernels take them."""
    return {
        "stride_cq": cu_q.stride(0),
        "stride_ck": cu_k.stride(0),
        "B": cu_q.shape[0] - 1,
        "TOTAL_Q": q.shape[0],
        "TOTAL_K": k.shape[0],
        "GROUP": q.shape[1] // max(1, k.shape[1]),
        "before": left or 0,
        "after": right or 0,
        "rows": q.shape[0] * q.shape[1],
        "LEFT": left is not None,
        "RIGHT": right is not None,
        **widths_of(q),
    }


KEY_CONFIGS = DKDV_CONFIGS[0], tile(32, 128, 8, 2), *DKDV_CONFIGS[1:]
FORWARD_CONFIGS = (tile(128, 64, 8, 3), tile(64, 64, 4, 3), tile(128, 64, 8, 2), tile(64, 32, 4, 2))


def _within(ranked: tuple[Config, ...], side: str, longest: int) -> tuple[Config, ...]:
    """Those of the configurations whose tile no sequence leaves half empty; the small ones stay."""
    return tuple(c for c in ranked if c[side] <= longest or c in SMALL)


def _choose(rows, s, d, itemsize, causal, shared):
    # As in `attention`; a tile that the longest sequence does not fill is not taken.
    first = 0 if d <= 64 else 1 if d <= 128 else 2
    ranked = FORWARD_CONFIGS[first], *FORWARD_CONFIGS[2:]
    ranked = _within((*ranked, *SMALL), "BLOCK_M", rows) if itemsize == 2 else SMALL
    return first_to_fit(ranked, ("BLOCK_M", "BLOCK_N"), 1, d, itemsize, shared)


def _choose_dq(longest, d, itemsize, shared):
    ranked = _within(DQ_CONFIGS, "BLOCK_M", longest) if itemsize == 2 else SMALL
    return first_to_fit(ranked, ("BLOCK_M", "BLOCK_N"), 2, d, itemsize, shared)


def _choose_dkdv(longest, d, itemsize, shared, tensor_memory):
    # Wider heads spill with more rows, or more keys. See the lab book: packed sequences.
    first = 0 if d <= 64 else 1 if d <= 128 else 2
    ranked = _within(KEY_CONFIGS[first:], "BLOCK_N", longest) if itemsize == 2 else SMALL
    ranked = in_tensor_memory(ranked, d, tensor_memory)
    return first_to_fit(ranked, ("BLOCK_N", "BLOCK_M"), 2, d, itemsize, shared)


FORWARD = Configs(_forward_kernel, (*FORWARD_CONFIGS, *SMALL), _choose)
HOPPER_FORWARD, HOPPER_BACKWARD = hopper.FORWARD, BACKWARD
DQ = Configs(_dq_kernel, DQ_CONFIGS, _choose_dq)
DKDV = Configs(_dkdv_kernel, KEY_CONFIGS, _choose_dkdv)

varlen_fwd = cached_launch(varlen_fwd)
varlen_bwd = cached_launch(varlen_bwd)


def _like_forward(q, k, v, cu_q, cu_k, *options):
    """Return tensors as the results of `varlen_fwd` that are wanted."""
    total, h, _ = q.shape
    rows = q.new_empty((_planes(q), h, total), dtype=torch.float32)
    made = like(in_rows(q)), torch.empty_like(rows[0]), rows
    there = True, *options[-2:]
    return [each for each, wanted in zip(made, there, strict=True) if wanted]


def _like_backward(q, k, v, *options):
    """Return tensors as the results of `varlen_bwd` that are wanted."""
    return [like(in_rows(each)) for each in ((q, k, v) if options[-2] else (q,))]


# A store whose place follows from the boundaries looks to the tracer like one to the boundaries.
_traced_forward = operation("attention_varlen", varlen_fwd, _like_forward)
_traced_backward = operation("attention_varlen_backward", varlen_bwd, _like_backward)

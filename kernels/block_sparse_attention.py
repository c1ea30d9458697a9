"""Block-sparse attention: softmax over the kept blocks of scores, with gradients.

FLOPs: 4 D for each pair in a kept block, forward; 10 D backward. Bytes: q, k and v read, out
written; memory grows with the sequence, and the lists with the number of blocks. A program owns a
tile of rows within one row of blocks, and walks the list of its kept blocks
(`block_sparse_attention_details/walk.py`), with the online softmax of `attention.py`. So time is
proportional to kept blocks. Only blocks that the diagonal or the end of the sequence cuts are
masked by entry. Programs with the longest lists of a head start first. On Hopper, blocks of 128 and
256 have kernels of their own, `forward_hopper.py` and `backward_hopper.py` of
`block_sparse_attention_details/`.

The lists come from a mask that is turned into them once, on the device
(`block_sparse_attention_details/block_mask.py`). Masks of blocks are those of Child et al.,
"Generating long sequences with sparse transformers" (2019), and of Dao et al., "FlashAttention"
(2022), section 3.3.
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import check_flag, check_number, check_tensors, check_that, shown
from ._runtime.configs import Configs
from ._runtime.device import shared_bytes
from ._triton.memory import store_as
from .attention_details.launch import (
    SCALES,
    SMALL,
    check_heads,
    first_to_fit,
    in_rows,
    like,
    strides_of,
    tile,
)
from .attention_details.scores import factor_of, load_tile, store_sums
from .block_sparse_attention_details import forward_hopper as hopper
from .block_sparse_attention_details.backward import DKDV, DQ, HOPPER_BACKWARD, block_sparse_bwd
from .block_sparse_attention_details.block_mask import (
    DEFAULT_SIZE,
    BlockMask,
    check_block_size,
    check_mask,
)
from .block_sparse_attention_details.launch import fitting, options_of
from .block_sparse_attention_details.walk import attend_entries, key_entries

__all__ = ["DKDV", "DQ", "HOPPER_BACKWARD", "BlockMask", "block_sparse_attention"]

ACCUMULATES = {"block_sparse_attention": "float32"}
# The harness makes the lists before it takes times, as a training loop does.
PREPARES = {"block_sparse_attention": {"block_mask": "_prepared_mask"}}


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask: torch.Tensor | BlockMask,
    *,
    block_size: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(scale q kᵀ) v over the kept blocks of scores, the softmax in float32.

    Scores of `[Sq, Sk]` are cut into squares of block_size; the last ones may be shorter. The time
    is proportional to the number of kept squares. A row that sees no key gives zeros and a
    logarithm of minus infinity.

    Args:
        q: `[B, H, Sq, D]`; float32, float16 or bfloat16; D a multiple of 8 from 16 to 256. Any
            strides: a tensor is copied only if its last stride is not 1.
        k: `[B, K, Sk, D]` with the dtype of q; H is a multiple of K. Query head h reads key head
            h // (H / K).
        v: as k.
        block_mask: which blocks are kept. A BlockMask, made once for many calls; or a bool tensor,
            of which each call makes one. With M = ceil(Sq / block_size) and N = ceil(Sk /
            block_size) it is `[M, N]` for all heads, `[H or 1, M, N]`, or
            `[B or 1, H or 1, M, N]`.
        block_size: 16, 32, 64, 128 or 256; that of the BlockMask, or 128, if None.
        causal: a row i sees no key beyond i + Sk - Sq. Kept blocks on the diagonal are masked by
            entry, and kept blocks beyond it are passed over.
        scale: factor of the scores, above zero; 1 / sqrt(D) if None.
        return_lse: whether to return also the logarithm of the sum of exponentials.

    Returns:
        `[B, H, Sq, D]`, the axes in memory in the order of q's. With return_lse also the natural
        logarithm of the sum of exponentials, `[B, H, Sq]` in float32. Both are differentiable once,
        in q, k and v. On Hopper the last bits of dq may differ from call to call, unless
        `torch.use_deterministic_algorithms(True)` asks for the slower kernels.

    Raises:
        TypeError: an argument is of another kind, or a tensor of another dtype.
        ValueError: shapes, devices or values do not fit.

    Source:
        Dao, Fu, Ermon, Rudra and Ré, "FlashAttention: Fast and Memory-Efficient Exact Attention
        with IO-Awareness" (2022), section 3.3; Dao, "FlashAttention-2" (2023).

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 32, device="cuda") for _ in range(3))
        >>> kept = torch.eye(4, dtype=torch.bool, device="cuda")
        >>> block_sparse_attention(q, k, v, kept, block_size=32).shape
        torch.Size([1, 2, 100, 32])
    """
    check_tensors(q=q, k=k, v=v)
    check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    check_heads(q, k, v)
    mask = _mask(block_mask, block_size, q, k)
    scale = q.shape[-1] ** -0.5 if scale is None else check_number("scale", scale, *SCALES)
    rows = mask.row_offsets, mask.row_indices, mask.row_order
    if needs_grad(q, k, v):
        columns = mask.column_offsets, mask.column_indices, mask.column_order
        return _BlockSparseAttention.apply(
            q, k, v, *rows, *columns, mask.block_size, scale, causal, return_lse
        )
    out, lse, _ = block_sparse_fwd(
        q, k, v, *rows, mask.block_size, scale, causal, return_lse, False
    )
    return (out, lse) if return_lse else out


class _BlockSparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, row_offsets, row_indices, row_order,
        column_offsets, column_indices, column_order, block_size, scale, causal, return_lse,
    ):  # fmt: skip
        rows = row_offsets, row_indices, row_order
        out, lse, stats = block_sparse_fwd(
            q, k, v, *rows, block_size, scale, causal, return_lse, True
        )
        ctx.save_for_backward(
            q, k, v, out, stats, *rows, column_offsets, column_indices, column_order
        )
        ctx.options = block_size, scale, causal
        return (out, lse) if return_lse else out

    @staticmethod
    @once
    def backward(ctx, dout, dlse=None):
        q, k, v, out, stats, *lists = ctx.saved_tensors
        keys = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        deterministic = torch.are_deterministic_algorithms_enabled()
        grads = block_sparse_bwd(
            q, k, v, out, stats, dout, dlse, *lists, *ctx.options, keys, deterministic
        )
        return *grads, *(None,) * 10


def _mask(block_mask, block_size, q, k):
    """The lists of the mask; TypeError or ValueError where it does not belong to q and k."""
    size = None if block_size is None else check_block_size(block_size)
    listed = isinstance(block_mask, BlockMask)
    if listed:
        fits = f"block_size: {size}, expected {block_mask.block_size} as block_mask has, or None"
        check_that(size in (None, block_mask.block_size), fits)
        size = block_mask.block_size
    elif isinstance(block_mask, torch.Tensor):
        check_mask(block_mask)
        size = DEFAULT_SIZE if size is None else size
    else:
        raise TypeError(f"block_mask: {shown(block_mask)}, expected a bool tensor or a BlockMask")
    device = block_mask.device
    check_that(device == q.device, f"block_mask: on {device}, expected {q.device} as q is")
    (b, h), m, n = q.shape[:2], triton.cdiv(q.shape[2], size), triton.cdiv(k.shape[2], size)
    shape = tuple(block_mask.shape)
    fits = shape[-2:] == (m, n) and all(
        found == 1 or found == most
        for found, most in zip(reversed(shape[:-2]), (h, b), strict=False)
    )
    wanted = f"expected ({b}, {h}, {m}, {n}), or 1 in place of the first two"
    check_that(fits, f"block_mask: shape {shape}, {wanted}")
    return block_mask if listed else BlockMask.from_dense(block_mask, block_size=size)


def _prepared_mask(q, k, v, block_mask, *, block_size, **options):
    return BlockMask.from_dense(block_mask, block_size=block_size)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, stats_ptr, offsets_ptr, indices_ptr, order_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os, stride_lb, stride_lh,
    H, GROUP, SQ, SK, blocks, right, scale, rows,
    CAUSAL: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out = softmax(scale q kᵀ) v over kept blocks, lse = log sum exp(scale q kᵀ), for each head.

    Grid: blocks * BLOCK / BLOCK_M * B * H programs, tiles of one head side by side, those with the
    longest lists first. A program owns BLOCK_M rows of one head. It reads them in q, walks the kept
    blocks of their list, and writes them in out, lse and stats. The latter two may be None. The
    rows of stats are those of `attention.py`.

    offsets, indices, order: those of rows of a BlockMask, with `blocks` rows a head. stride_lb,
    stride_lh: heads of the mask from a batch, and a head, to the next. The number `right` is
    SK - SQ, and `rows` is B * H * SQ. CUT: whether the diagonal or SK cuts a block. BLOCK: a
    multiple of BLOCK_M and of BLOCK_N. GROUP: query heads of one key head. BLOCK_D: a power of two,
    at least D.
    """
    NATURAL: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    scale = factor_of(scale, NATURAL)
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
    k_ptrs = k_ptr + b * stride_kb + h // GROUP * stride_kh + key * stride_ks + offs_d[None, :]
    v_ptrs = v_ptr + b * stride_vb + h // GROUP * stride_vh + key * stride_vs + offs_d[None, :]
    q = load_tile(q_ptrs, inside[:, None], wide[None, :], True, PADDED)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    whole, last = key_entries(
        indices_ptr, first, last, start_m, SK, right, CAUSAL, CUT, BLOCK, BLOCK_M
    )
    acc, l, m = attend_entries(
        acc, l, m, q, k_ptrs, v_ptrs, indices_ptr, offs_m, wide, first, whole,
        stride_ks, stride_vs, SQ, SK, right, scale,
        CAUSAL, False, PRECISION, PADDED, BLOCK, BLOCK_N,
    )  # fmt: skip
    if CUT:
        acc, l, m = attend_entries(
            acc, l, m, q, k_ptrs, v_ptrs, indices_ptr, offs_m, wide, whole, last,
            stride_ks, stride_vs, SQ, SK, right, scale,
            CAUSAL, True, PRECISION, PADDED, BLOCK, BLOCK_N,
        )  # fmt: skip
    sums = store_sums(l, m, lse_ptr, stats_ptr, head * SQ + offs_m, rows, inside, NATURAL)
    out = acc / sums[:, None]
    out_ptrs = out_ptr + b * stride_ob + h * stride_oh + row * stride_os + offs_d[None, :]
    store_as(out_ptrs, out, inside[:, None] & wide[None, :])


def block_sparse_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    indices: torch.Tensor,
    order: torch.Tensor,
    block_size: int,
    scale: float,
    causal: bool,
    return_lse: bool,
    keep_stats: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return out, lse if return_lse, and the statistics of rows if keep_stats.

    Those are as `attention_fwd` returns them. offsets, indices, order: those of rows of a
    BlockMask. Other arguments as `block_sparse_attention` takes them.
    """
    q, k, v = map(in_rows, (q, k, v))
    b, h, sq, d = q.shape
    out = like(q)
    lse = q.new_empty((b, h, sq), dtype=torch.float32) if return_lse else None
    planes = 2 if q.dtype == torch.float32 else 1
    stats = q.new_empty((planes, b, h, sq), dtype=torch.float32) if keep_stats else None
    if out.numel() == 0:
        return out, lse, stats
    if hopper.suits(q, k, v, block_size):
        config = HOPPER_FORWARD.pick(q.device, d=d, causal=causal)
        hopper.forward_hopper(
            q, k, v, out, lse, stats, offsets, indices, order, block_size, scale, causal, config
        )
        return out, lse, stats
    config = FORWARD.pick(
        q.device, d=d, itemsize=q.element_size(), block=block_size, shared=shared_bytes(q.device)
    )
    blocks = order.shape[2]
    _forward_kernel[(blocks * (block_size // config["BLOCK_M"]) * b * h,)](
        q_ptr=q, k_ptr=k, v_ptr=v, out_ptr=out, lse_ptr=lse, stats_ptr=stats,
        offsets_ptr=offsets, indices_ptr=indices, order_ptr=order,
        **strides_of(q=q, k=k, v=v, o=out),
        **options_of(q, k, order, block_size, causal, walked=k.shape[2]),
        scale=scale, rows=b * h * sq, **config,
    )  # fmt: skip
    return out, lse, stats


# Those of attention, and one with as many rows as a block of 64.
NARROW, WIDE = tile(128, 64, 8, 3), tile(64, 64, 4, 3)
CONFIGS = (tile(128, 64, 8, 2), tile(64, 64, 4, 2), tile(64, 32, 4, 2), *SMALL)
MORE_CONFIGS = (tile(128, 128, 8, 2), tile(64, 128, 4, 2), tile(128, 64, 8, 4))


def _choose(d, itemsize, block, shared):
    best = NARROW if d <= 64 else WIDE if d <= 128 else CONFIGS[0]
    ranked = (best, *CONFIGS) if itemsize == 2 else SMALL
    return first_to_fit(fitting(ranked, block), ("BLOCK_M", "BLOCK_N"), 1, d, itemsize, shared)


def _suits(candidate, block, **key):
    return bool(fitting((candidate,), block))


FORWARD = Configs(_forward_kernel, (NARROW, WIDE, *CONFIGS, *MORE_CONFIGS), _choose, _suits)

HOPPER_FORWARD = hopper.FORWARD

block_sparse_fwd = cached_launch(block_sparse_fwd)

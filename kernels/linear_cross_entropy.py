"""Cross entropy of logits x wᵀ + b that never lie in memory as a whole; forward and backward.

The formulas are those of kernels/cross_entropy_details/row.py. Rows go in chunks: a matmul writes a
chunk's logits to a buffer, the kernel puts their gradient in their place, and two more matmuls make
of it the chunk's part of dx and add to dw. So both gradients are there after the forward pass, and
the backward pass multiplies by the gradient of the loss where that is not one. The idea is that of
Liger-Kernel's fused linear cross entropy (Hsu et al., 2024).

Without gradients the logits need not be in memory even by chunks:
kernels/cross_entropy_details/linear_tiles.py.

The FLOPs decide (`ops/linear_cross_entropy.py` counts them); they are those of plain products, so
cuBLAS computes them. Memory beside inputs and gradients: the buffer, an eighth of the logits, or
BUFFER_BYTES, or LEAST_ROWS rows of them, whichever is most: smaller ones would save little and
leave matmuls idle. dw is summed over the chunks in its own dtype, each sum formed in float32 inside
the matmul: a float32 copy would take twice the memory of w, and at most eight chunks round at most
eight times. Only in float16, for a mean, dw is a float32 copy until the backward pass. There the
division by the count waits for the gradient of the loss, and float16 may not hold the sum over so
many rows.
"""

import functools

import torch
import triton
import triton.language as tl

from ._runtime.autograd import needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import check_floating, check_no_tangent, check_tensors
from ._runtime.configs import Configs
from ._runtime.launch_guard import guarded
from ._runtime.layout import as_read, as_rows_2d
from .cross_entropy_details import linear_tiles as tiled
from .cross_entropy_details import row as shared
from .cross_entropy_details.row import (
    ROW_CONFIGS,
    WALK_CONFIGS,
    choose_row,
    choose_walk,
    gradient_of_row,
    own_logit,
    row_loss,
    suits_row,
    walk,
)

ACCUMULATES = {
    "linear_cross_entropy": "float32, dw of the chunks in its dtype, for a float16 mean in float32"
}

# dw is rounded, and read and written, once in each chunk.
MOST_CHUNKS = 8
BUFFER_BYTES, LEAST_ROWS = 2**28, 1024
# Rows of a chunk in steps of a matmul's tile.
ROW_STEP = 128


@triton.jit
def _loss_kernel(
    logits_ptr, targets_ptr, losses_ptr, V, ignore_index, smoothing, z_loss,
    SMOOTH: tl.constexpr, UNROLL: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # A traced graph hands floats over as float64.
    smoothing, z_loss = tl.cast(smoothing, tl.float32), tl.cast(z_loss, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    target = tl.load(targets_ptr + row)
    loss = 0.0
    if target != ignore_index:
        own, _ = own_logit(row_ptr, target, V)
        top, total, plain = walk(row_ptr, V, SMOOTH, UNROLL, BLOCK_V)
        loss, _ = row_loss(own, top, total, plain, V, smoothing, z_loss, SMOOTH)
    tl.store(losses_ptr + row, loss)


@triton.jit
def _chunk_kernel(
    logits_ptr, targets_ptr, losses_ptr, count_ptr, V, walked, ignore_index, smoothing, z_loss,
    SMOOTH: tl.constexpr, WALKS: tl.constexpr, KEPT: tl.constexpr, AHEAD: tl.constexpr,
    LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    smoothing, z_loss = tl.cast(smoothing, tl.float32), tl.cast(z_loss, tl.float32)
    scale = 1.0
    if count_ptr is not None:
        scale /= tl.load(count_ptr)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    gradient_of_row(
        row_ptr, row_ptr, losses_ptr + row, tl.load(targets_ptr + row), V, walked,
        ignore_index, smoothing, z_loss, scale, SMOOTH, WALKS, KEPT, AHEAD, LANES, WIDTH,
    )  # fmt: skip


LOSS = Configs(_loss_kernel, WALK_CONFIGS, choose_walk)
CHUNK = Configs(_chunk_kernel, ROW_CONFIGS, choose_row, suits_row)
TILES, HOPPER_TILES = tiled.TILES, tiled.HOPPER_TILES


def _rows_of_chunk(m: int, row_bytes: int) -> int:
    """Rows of all chunks but the last, which may be shorter, where one of the logits has so many
    bytes."""
    chunks = -(-m // max(LEAST_ROWS, BUFFER_BYTES // row_bytes, -(-m // MOST_CHUNKS)))
    return max(1, -(-m // (max(1, chunks) * ROW_STEP))) * ROW_STEP


def linear_cross_entropy_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    reduction: str,
    wanted: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, ...]:
    """x: [M, H]; weight: [V, H]; targets: [M], contiguous; bias: [V] or None.

    wanted: whether the gradients of x, weight and bias are. Returns the loss in the dtype of x,
    the three gradients, None where not wanted, and the count that they are still to be divided by,
    if they are; dw is float32 where there is such a count.
    """
    (m, h), v = x.shape, weight.shape[0]
    kind = {"dtype": x.dtype, "device": x.device}
    losses = torch.empty(m, dtype=torch.float32, device=x.device)
    count = shared.count_kept(targets, ignore_index) if reduction == "mean" else None
    later = count if any(wanted) and shared.kept_for_later(x.dtype, reduction) else None
    dx = torch.empty((m, h), **kind) if wanted[0] else None
    sums = {**kind, "dtype": x.dtype if later is None else torch.float32}
    dw = (torch.empty if m else torch.zeros)((v, h), **sums) if wanted[1] else None
    db = torch.zeros(v, dtype=torch.float32, device=x.device) if wanted[2] else None
    if not any(wanted) and tiled.suited(x, weight):
        options = ignore_index, smoothing, z_loss
        tiled.write_losses(losses, x, weight, targets, bias, *options)
        return shared.reduced(losses, count, x.dtype), None, None, None, None
    step = _rows_of_chunk(m, v * x.element_size())
    buffer = torch.empty((min(step, m), v), **kind)
    for first in range(0, m, step):
        part = x[first : first + step]
        logits = buffer[: part.shape[0]]
        if bias is None:
            torch.mm(part, weight.T, out=logits)
        else:
            torch.addmm(bias, part, weight.T, out=logits)
        _finish(
            logits, targets[first : first + step], losses[first : first + step],
            None if later is not None else count,
            ignore_index, smoothing, z_loss, any(wanted),
        )  # fmt: skip
        if dx is not None:
            torch.mm(logits, weight, out=dx[first : first + step])
        if dw is not None:
            _add_product(dw, logits.T, part, first > 0)
        if db is not None:
            db += logits.sum(0, dtype=torch.float32)
    return shared.reduced(losses, count, x.dtype), dx, dw, db, later


def _add_product(dw: torch.Tensor, a: torch.Tensor, b: torch.Tensor, further: bool) -> None:
    """dw = a b, or dw + a b if `further`; summed and kept in float32 where that is dw's dtype."""
    wide = {}
    if dw.dtype != a.dtype:
        if _asks(a) and _multiplies_wide(a.device, a.dtype):
            wide = {"out_dtype": dw.dtype}
        else:
            a, b = a.to(dw.dtype), b.to(dw.dtype)
    if further:
        torch.addmm(dw, a, b, **wide, out=dw)
    else:
        torch.mm(a, b, **wide, out=dw)


def _asks(a: torch.Tensor) -> bool:
    """Whether a trial may run now: a captured graph may not wait for its result."""
    if torch.compiler.is_compiling() or not a.is_cuda:
        return False
    return not torch.cuda.is_current_stream_capturing()


@functools.cache
def _multiplies_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch writes and adds products of two matrices of this dtype in float32, without a
    float32 copy of either: its version and its backend decide."""
    a = torch.full((16, 16), 256.0, dtype=dtype, device=device)
    out = torch.full((16, 16), torch.nan, dtype=torch.float32, device=device)
    try:
        torch.mm(a, a, out_dtype=out.dtype, out=out)
        torch.addmm(out, a, a, out_dtype=out.dtype, out=out)
    except (RuntimeError, TypeError):
        return False
    return bool((out == 2 * 16 * 256.0**2).all())


def _finish(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    kept: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    wants_gradient: bool,
) -> None:
    """Writes the loss of each row and puts the gradients, if wanted, in the place of the logits."""
    m, v = logits.shape
    key = {"v": v, "itemsize": logits.element_size()}
    smooth = smoothing > 0
    if not wants_gradient:
        _loss_kernel[(m,)](
            logits_ptr=logits, targets_ptr=targets, losses_ptr=losses,
            V=v, ignore_index=ignore_index, smoothing=smoothing, z_loss=z_loss,
            SMOOTH=smooth, **LOSS.pick(logits.device, **key),
        )  # fmt: skip
    else:
        walked, config = shared.row_plan(**key, config=CHUNK.pick(logits.device, **key))
        _chunk_kernel[(m,)](
            logits_ptr=logits, targets_ptr=targets, losses_ptr=losses,
            count_ptr=kept, V=v, walked=walked, ignore_index=ignore_index,
            smoothing=smoothing, z_loss=z_loss, SMOOTH=smooth, **config,
        )  # fmt: skip


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, bias, *options):
        wanted = x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad
        loss, *kept = linear_cross_entropy_fwd(x, weight, targets, bias, *options, wanted)
        # The loss stands for what it is made of where its gradient is asked for again.
        ctx.save_for_backward(*kept, loss)
        ctx.unseen = shared.alone()
        return loss

    @staticmethod
    @once
    def backward(ctx, dloss):
        *sums, count, _ = ctx.saved_tensors
        # The loss has the dtype of what the gradients are of.
        as_wanted = {"unseen": ctx.unseen, "dtype": dloss.dtype}
        dx, dw, db = (d if d is None else shared.scaled(d, dloss, count, **as_wanted) for d in sums)
        return dx, dw, None, db, None, None, None, None


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """`cross_entropy(x wᵀ + bias, targets)` without the logits in memory.

    x: [M, H]; weight: [V, H]; bias: [V]; of one dtype, float32, float16 or bfloat16. targets: [M],
    int64 or int32, from 0 to V - 1 or `ignore_index`, whose rows have neither loss nor gradient.
    z_loss: the factor of the square of the log of the sum of exponentials, added to each loss.
    reduction: "mean" over the rows that count (NaN without any) or "sum".

    Returns a scalar in the dtype of x: a sum in float16 that passes 65504 is infinite, as PyTorch's
    is. Differentiable once, in x, weight and bias; the forward pass
    computes the gradients. TypeError or ValueError for arguments of another shape, dtype or range.
    On a GPU a target out of range makes the loss and the gradients NaN, as nobody waits to look.
    """
    check_tensors(x=x, weight=weight, targets=targets, **({} if bias is None else {"bias": bias}))
    reductions = shared.REDUCTIONS[:2]
    options = shared.options_of(ignore_index, label_smoothing, z_loss, reduction, reductions)
    if x.dim() != 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected two dimensions")
    check_floating(x=x)
    check_no_tangent(x=x, weight=weight, bias=bias)
    shared.together(x, weight=weight, targets=targets, bias=bias)
    m, h = x.shape
    if weight.dim() != 2 or weight.shape[1] != h or weight.dtype != x.dtype:
        found = f"{tuple(weight.shape)} {weight.dtype}"
        raise ValueError(f"weight: {found}, expected (V, {h}) {x.dtype}")
    v = weight.shape[0]
    shared.check(targets, m, v, ignore_index)
    if bias is not None and (bias.shape != (v,) or bias.dtype != x.dtype):
        found = f"{tuple(bias.shape)} {bias.dtype}"
        raise ValueError(f"bias: {found}, expected ({v},) {x.dtype}")
    x, weight, targets = as_rows_2d(as_read(x)), as_read(weight), targets.contiguous()
    bias = bias if bias is None else as_read(bias).contiguous()
    if needs_grad(x, weight, bias):
        return _LinearCrossEntropy.apply(x, weight, targets, bias, *options)
    return linear_cross_entropy_fwd(x, weight, targets, bias, *options, (False,) * 3)[0]


# The products are PyTorch's, so only what follows them can be cached.
linear_cross_entropy_fwd = guarded(linear_cross_entropy_fwd)
_finish = cached_launch(_finish)

"""Cross entropy of logits and class indices, with label smoothing and z-loss; forward and backward.

The formulas are those of kernels/cross_entropy_details/row.py. Bytes: the forward pass reads the
logits; where gradients are wanted it writes theirs too, at once, and the backward pass only
multiplies by the gradient of the loss: not at all, and without the host waiting, where that is one.
So training costs one read and one write of the logits where a backward pass of its own costs
another read (Liger-Kernel, Hsu et al., 2024, has the idea, and writes over the logits, which this
op does not). In float16 the gradient of a mean must wait for the factor that loss scaling puts
against the count, and a pass that multiplies would read and write as much again: there the forward
pass keeps two numbers a row, and the backward pass makes the gradient of the logits in one read and
one write. Memory decides.

The loss alone is one walk with a running maximum and sum in each lane. For the gradient a row stays
in the registers of a program, in the dtype in which it came, and is read once. Of a row that is too
long for them the beginning is walked twice, the second time out of the L2, which it does not leave
while few rows are under way. The last program to finish adds up the losses
(kernels/_triton/arrival_counter.py).
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import check_floating
from ._runtime.configs import Configs
from ._runtime.layout import as_rows_2d
from ._triton.arrival_counter import arrival_counter
from ._triton.memory import load_f32
from ._triton.row_access import edges_of, inner, most_whole, split, whole
from .cross_entropy_details import row as shared
from .cross_entropy_details.row import (
    ROW_CONFIGS,
    WALK_CONFIGS,
    choose_row,
    choose_walk,
    columns_of,
    count_of,
    gradient_of_row,
    own_logit,
    put,
    put_edges,
    row_loss,
    suits_row,
    sum_of,
    taken,
    walk,
    walk_split,
)

ACCUMULATES = {"cross_entropy": "float32"}
# Losses that the last program adds up at a time.
SUMMED = tl.constexpr(2048)


# Chunks of a row that a program of `_late_kernel` takes.
LATE_CONFIGS = tuple(
    {"STEPS": steps, "num_warps": warps} for steps in (1, 2, 4) for warps in (4, 8)
)


def _choose_late(v, itemsize):
    return {"STEPS": 2, "num_warps": 4}


def _suits_late(candidate, v, itemsize):
    chunks = shared.chunks_of(v, itemsize, candidate["num_warps"])
    return candidate["STEPS"] <= chunks


@triton.jit
def _finish(
    losses_ptr, out_ptr, ticket_ptr, targets_ptr, count_ptr, M, ignore_index, MEAN: tl.constexpr
):  # fmt: skip
    """Called by each program after its last loss; the last one adds up all."""
    # Release: the losses are in memory before the number is drawn. Acquire: the last sees all.
    tl.debug_barrier()
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        loss = sum_of(losses_ptr, M, SUMMED)
        if MEAN:
            count = count_of(targets_ptr, M, ignore_index, SUMMED)
            loss = loss / count
            if count_ptr is not None:
                tl.store(count_ptr, count)
        tl.store(out_ptr, loss.to(out_ptr.dtype.element_ty))
        tl.store(ticket_ptr, 0)


@triton.jit
def _loss_kernel(
    logits_ptr, targets_ptr, losses_ptr, out_ptr, ticket_ptr, rows_ptr, count_ptr, stride_m, M, V,
    ignore_index, smoothing, z_loss, SMOOTH: tl.constexpr, MEAN: tl.constexpr,
    SPLIT: tl.constexpr, UNROLL: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # A traced graph hands floats over as float64.
    smoothing, z_loss = tl.cast(smoothing, tl.float32), tl.cast(z_loss, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_m
    target = tl.load(targets_ptr + row)
    loss = 0.0
    if target != ignore_index:
        own, _ = own_logit(row_ptr, target, V)
        if SPLIT:
            top, total, plain = walk_split(row_ptr, V, SMOOTH, UNROLL, BLOCK_V)
        else:
            top, total, plain = walk(row_ptr, V, SMOOTH, UNROLL, BLOCK_V)
        loss, factor = row_loss(own, top, total, plain, V, smoothing, z_loss, SMOOTH)
        if rows_ptr is not None:
            tl.store(rows_ptr + row, top)
            tl.store(rows_ptr + M + row, factor / total)
    tl.store(losses_ptr + row, loss.to(losses_ptr.dtype.element_ty))
    if out_ptr is not None:
        _finish(losses_ptr, out_ptr, ticket_ptr, targets_ptr, count_ptr, M, ignore_index, MEAN)


@triton.jit
def _gradient_kernel(
    logits_ptr, targets_ptr, losses_ptr, out_ptr, ticket_ptr, dlogits_ptr, kept_ptr,
    stride_m, M, V, walked, ignore_index, smoothing, z_loss,
    SMOOTH: tl.constexpr, MEAN: tl.constexpr, WALKS: tl.constexpr, KEPT: tl.constexpr,
    AHEAD: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    smoothing, z_loss = tl.cast(smoothing, tl.float32), tl.cast(z_loss, tl.float32)
    scale = 1.0
    if kept_ptr is not None:
        scale /= tl.load(kept_ptr)
    row = tl.program_id(0).to(tl.int64)
    gradient_of_row(
        logits_ptr + row * stride_m, dlogits_ptr + row * V, losses_ptr + row,
        tl.load(targets_ptr + row), V, walked, ignore_index, smoothing, z_loss, scale,
        SMOOTH, WALKS, KEPT, AHEAD, LANES, WIDTH, SPLIT,
    )  # fmt: skip
    if out_ptr is not None:
        _finish(losses_ptr, out_ptr, ticket_ptr, targets_ptr, None, M, ignore_index, MEAN)


@triton.jit
def _late_kernel(
    logits_ptr, targets_ptr, rows_ptr, count_ptr, dloss_ptr, dlogits_ptr,
    stride_m, M, V, parts, ignore_index, smoothing,
    SMOOTH: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    smoothing = tl.cast(smoothing, tl.float32)
    program = tl.program_id(0)
    row = (program // parts).to(tl.int64)
    first = program % parts * STEPS
    out_ptr = dlogits_ptr + row * V
    target = tl.load(targets_ptr + row)
    width = V
    if SPLIT:
        begin_ptr, begin_out_ptr = logits_ptr + row * stride_m, out_ptr
        lead, width = whole(begin_ptr, V)
        out_ptr = inner(out_ptr, lead)
        places, there = edges_of(tl.arange(0, LANES), lead, width, V)
        # The first program of a row has its edges.
        there &= first == 0
    if target == ignore_index:
        zeros = tl.zeros((LANES, WIDTH), out_ptr.dtype.element_ty)
        for step in tl.static_range(STEPS):
            columns = columns_of(first + step, LANES, WIDTH)
            tl.store(out_ptr + columns, zeros, mask=columns < width)
        if SPLIT:
            tl.store(begin_out_ptr + places, 0.0, mask=there)
    else:
        place = tl.where((target >= 0) & (target < V), target, -1).to(tl.int32)
        scale = tl.load(dloss_ptr).to(tl.float32) / tl.load(count_ptr)
        top, share = tl.load(rows_ptr + row), tl.load(rows_ptr + M + row) * scale
        row_ptr, nearest = logits_ptr + row * stride_m, place
        if SPLIT:
            x = load_f32(begin_ptr + places, there)
            put_edges(
                begin_out_ptr, places, there, x, top, share, place, V, smoothing, scale, SMOOTH
            )
            row_ptr, nearest = inner(begin_ptr, lead), place - lead
        for step in tl.static_range(STEPS):
            x = taken(row_ptr, first + step, width, "", LANES, WIDTH).to(tl.float32)
            put(out_ptr, x, first + step, top, share, nearest, width, V, smoothing, scale, SMOOTH)


LOSS = Configs(_loss_kernel, WALK_CONFIGS, choose_walk)
GRADIENT = Configs(_gradient_kernel, ROW_CONFIGS, choose_row, suits_row)
LATE = Configs(_late_kernel, LATE_CONFIGS, _choose_late, _suits_late)


def cross_entropy_fwd(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    reduction: str,
    keeps: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """logits: [M, V]; targets: [M]. TypeError or ValueError as `cross_entropy` has it.

    Returns the loss in the dtype of the logits, and what `cross_entropy_bwd` needs of a mean where
    `keeps` says so: [2, M], the maximum of each row and what makes a softmax of its weights, and
    how many rows count; both float32.
    """
    logits, targets = _checked(logits, targets, ignore_index)
    (m, v), device = logits.shape, logits.device
    losses, out, drawn = _results(logits, reduction)
    rows = logits.new_empty((2, m), dtype=torch.float32) if keeps else None
    count = logits.new_empty((), dtype=torch.float32) if keeps else None
    if m:
        _loss_kernel[(m,)](
            logits_ptr=logits, targets_ptr=targets, losses_ptr=losses,
            out_ptr=out, ticket_ptr=drawn, rows_ptr=rows, count_ptr=count,
            stride_m=logits.stride(0), M=m, V=v, ignore_index=ignore_index,
            smoothing=smoothing, z_loss=z_loss, SMOOTH=smoothing > 0,
            MEAN=reduction == "mean", SPLIT=split(v, (logits, logits.stride(0))),
            **LOSS.pick(device, v=v, itemsize=logits.element_size()),
        )  # fmt: skip
    return losses if out is None else out, rows, count


def cross_entropy_fwd_bwd(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss as `cross_entropy_fwd` has it and, for a gradient of one, that of the logits."""
    logits, targets = _checked(logits, targets, ignore_index)
    (m, v), device = logits.shape, logits.device
    losses, out, drawn = _results(logits, reduction)
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if m == 0:
        return losses if out is None else out, dlogits
    mean = reduction == "mean"
    kept = shared.count_kept(targets, ignore_index) if mean else None
    parted = split(v, (logits, logits.stride(0)), (dlogits, v))
    itemsize = logits.element_size()
    key = {"v": most_whole(v, itemsize) if parted else v, "itemsize": itemsize}
    walked, config = shared.row_plan(**key, config=GRADIENT.pick(device, **key, split=parted))
    _gradient_kernel[(m,)](
        logits_ptr=logits, targets_ptr=targets, losses_ptr=losses,
        out_ptr=out, ticket_ptr=drawn, dlogits_ptr=dlogits, kept_ptr=kept,
        stride_m=logits.stride(0), M=m, V=v, walked=walked, ignore_index=ignore_index,
        smoothing=smoothing, z_loss=z_loss, SMOOTH=smoothing > 0, MEAN=mean,
        SPLIT=parted, **config,
    )  # fmt: skip
    return losses if out is None else out, dlogits


def _checked(logits, targets, ignore_index):
    """Both as the kernels read them, contiguous in V and in M."""
    if logits.dim() != 2:
        raise ValueError(f"logits: shape {tuple(logits.shape)}, expected two dimensions")
    check_floating(logits=logits)
    shared.together(logits, targets=targets)
    shared.check(targets, *logits.shape, ignore_index)
    return as_rows_2d(logits), targets.contiguous()


def _results(logits, reduction):
    """The losses of the rows and, where they are added up, the sum and the counter for it."""
    m, dtype = logits.shape[0], logits.dtype
    if reduction == "none":
        return logits.new_empty((m,)), None, None
    losses = logits.new_empty((m,), dtype=torch.float32)
    if m == 0:
        out = losses.sum(dtype=dtype)
        return losses, out / 0 if reduction == "mean" else out, None
    return losses, logits.new_empty(()), arrival_counter(logits.device)


def cross_entropy_bwd(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    rows: torch.Tensor,
    count: torch.Tensor,
    ignore_index: int,
    smoothing: float,
) -> torch.Tensor:
    """The gradient of the logits of a mean, [M, V], contiguous; rows and count as
    `cross_entropy_fwd` keeps them, dloss a scalar."""
    logits, targets = as_rows_2d(logits), targets.contiguous()
    (m, v), itemsize = logits.shape, logits.element_size()
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    parted = split(v, (logits, logits.stride(0)), (dlogits, v))
    held = most_whole(v, itemsize) if parted else v
    config = LATE.pick(logits.device, v=held, itemsize=itemsize)
    warps = config["num_warps"]
    parts = max(1, -(-shared.chunks_of(held, itemsize, warps) // config["STEPS"]))
    if m:
        _late_kernel[(m * parts,)](
            logits_ptr=logits, targets_ptr=targets, rows_ptr=rows,
            count_ptr=count, dloss_ptr=dloss, dlogits_ptr=dlogits, stride_m=logits.stride(0),
            M=m, V=v, parts=parts, ignore_index=ignore_index, smoothing=smoothing,
            SMOOTH=smoothing > 0, SPLIT=parted, STEPS=config["STEPS"], LANES=32 * warps,
            WIDTH=shared.ACCESS_BYTES // itemsize, num_warps=warps,
        )  # fmt: skip
    return dlogits


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, *options):
        loss, dlogits = cross_entropy_fwd_bwd(logits, targets, *options)
        # The loss stands for the logits, which need not be kept, where its gradient is asked for
        # again.
        ctx.save_for_backward(dlogits, loss)
        ctx.unseen = shared.alone()
        return loss

    @staticmethod
    @once
    def backward(ctx, dloss):
        dlogits, _ = ctx.saved_tensors
        dlogits = shared.scaled(dlogits, dloss, unseen=ctx.unseen)
        return dlogits, None, None, None, None, None


class _LateCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, *options):
        loss, *kept = cross_entropy_fwd(logits, targets, *options, True)
        ctx.save_for_backward(logits, targets, *kept)
        ctx.options = options[:2]
        return loss

    @staticmethod
    @once
    def backward(ctx, dloss):
        dlogits = cross_entropy_bwd(dloss, *ctx.saved_tensors, *ctx.options)
        return dlogits, None, None, None, None, None


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross entropy, computed in float32; what PyTorch's function gives, and a z-loss.

    logits: [M, V]; float32, float16 or bfloat16. targets: [M], int64 or int32, from 0 to V - 1 or
    `ignore_index`, whose rows have neither loss nor gradient. z_loss: the factor of the square of
    the log of the sum of exponentials, added to each loss. reduction: "mean" over the rows that
    count (NaN without any), "sum" or "none".

    Returns a scalar, or [M] for "none", in the dtype of the logits: a sum in float16 that passes
    65504 is infinite, as PyTorch's is. Differentiable once in the logits,
    which stay as they are: the gradient is a tensor of their size, which the forward pass writes,
    but of a mean in float16 the backward pass, which then reads the logits again.
    TypeError or ValueError for arguments of another shape, dtype or range. On a GPU a target out
    of range makes the loss and the gradient of its row NaN, as nobody waits to look.
    """
    options = shared.options_of(ignore_index, label_smoothing, z_loss, reduction)
    if needs_grad(logits):
        late = shared.kept_for_later(logits.dtype, reduction)
        return (_LateCrossEntropy if late else _CrossEntropy).apply(logits, targets, *options)
    return cross_entropy_fwd(logits, targets, *options, False)[0]


cross_entropy_fwd = cached_launch(cross_entropy_fwd)
cross_entropy_fwd_bwd = cached_launch(cross_entropy_fwd_bwd)
cross_entropy_bwd = cached_launch(cross_entropy_bwd)

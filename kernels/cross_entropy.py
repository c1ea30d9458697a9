"""Cross entropy of logits and class indices, with label smoothing and z-loss.

The formulas are those of kernels/cross_entropy_details/row.py. Memory decides. The forward pass
reads the logits. If gradients are wanted, it also writes the gradient of the logits, and the
backward pass multiplies it by the gradient of the loss. A factor of one costs nothing, and the host
does not wait for it. So training costs one read and one write of the logits; a separate backward
pass would read them again. The idea is that of Liger-Kernel (Hsu et al., 2024), which overwrites
the logits; this op does not.

A mean in float16 is different: loss scaling multiplies the gradient only after the division by the
count, which could underflow. There the forward pass saves two numbers a row. The backward pass
computes the gradient of the logits from them in one read and one write.

The loss alone is one loop with a running maximum and sum in each lane. For the gradient a row stays
in the registers of a program, in its dtype, and is read once. If a row is too long for them, its
beginning is read twice. The second read hits the L2 cache while few rows are under way. The last
program to finish adds up the losses (kernels/_triton/arrival_counter.py).
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import check_floating, check_same_device
from ._runtime.configs import Configs
from ._runtime.layout import as_rows_2d
from ._triton.arrival_counter import arrival_counter
from ._triton.memory import load_f32
from ._triton.row_access import edges_of, inner, most_whole, split, whole
from .cross_entropy_details import row as shared
from .cross_entropy_details.row import (
    LOOP_CONFIGS,
    ROW_CONFIGS,
    choose_loop,
    choose_row,
    columns_of,
    count_valid_targets,
    gradient_of_row,
    load_chunk,
    loop_row,
    loop_split_row,
    row_loss,
    store_grad_chunk,
    store_grad_edges,
    suits_row,
    sum_losses,
    target_logit,
)

ACCUMULATES = {"cross_entropy": "float32"}
# Losses that the last program adds up in a step.
SUMMED = tl.constexpr(2048)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the cross entropy of logits and class indices, computed in float32.

    The result is that of PyTorch's function, plus a z-loss. The forward pass writes the gradient of
    the logits into a tensor of their size. For a mean in float16 the backward pass does so, which
    reads the logits again.

    Args:
        logits: `[M, V]`, float32, float16 or bfloat16. They are not modified.
        targets: `[M]`, int64 or int32, from 0 to V - 1 or `ignore_index`. On a GPU a target out of
            range makes the loss and the gradient of its row NaN, because no check waits for it.
        ignore_index: rows with this target have no loss and no gradient.
        label_smoothing: share of the loss, from 0 to 1, that all V classes divide evenly.
        z_loss: factor of the squared log-sum-exp that is added to each loss.
        reduction: "mean" over the rows that are not ignored (NaN without any), "sum" or "none".

    Returns:
        A scalar, or `[M]` for "none", in the dtype of the logits. In float16 a sum above 65504 is
        infinite, as in PyTorch. It is differentiable once, in logits.

    Raises:
        TypeError: an argument has another kind or dtype.
        ValueError: a shape, device or value is wrong, or V is zero. On a CPU also: a target is out
            of range.

    Source:
        Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024).

    Example:
        >>> logits = torch.randn(4, 10, device="cuda")
        >>> cross_entropy(logits, torch.tensor([1, 2, 3, 9], device="cuda")).shape
        torch.Size([])
    """
    options = shared.options_of(ignore_index, label_smoothing, z_loss, reduction)
    if needs_grad(logits):
        late = shared.defers_mean(logits.dtype, reduction)
        return (_RecomputeCrossEntropy if late else _CrossEntropy).apply(logits, targets, *options)
    return cross_entropy_fwd(logits, targets, *options, False)[0]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, *options):
        loss, dlogits = cross_entropy_fwd_bwd(logits, targets, *options)
        # Autograd checks the saved loss in the place of the logits, which are not saved.
        ctx.save_for_backward(dlogits, loss)
        ctx.unseen = shared.alone()
        return loss

    @staticmethod
    @once
    def backward(ctx, dloss):
        dlogits, _ = ctx.saved_tensors
        dlogits = shared.scaled(dlogits, dloss, unseen=ctx.unseen)
        return dlogits, None, None, None, None, None


class _RecomputeCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, *options):
        loss, *n_valid = cross_entropy_fwd(logits, targets, *options, True)
        ctx.save_for_backward(logits, targets, *n_valid)
        ctx.options = options[:2]
        return loss

    @staticmethod
    @once
    def backward(ctx, dloss):
        dlogits = cross_entropy_bwd(dloss, *ctx.saved_tensors, *ctx.options)
        return dlogits, None, None, None, None, None


def cross_entropy_fwd(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    reduction: str,
    save_stats: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the loss of logits [M, V] and targets [M], and the tensors for `cross_entropy_bwd`.

    The loss has the dtype of the logits. `save_stats` asks for the tensors, both float32; otherwise
    they are None. The tensor rows [2, M] holds m and the gradient's factor of exp(x - m). The
    scalar n_valid counts the targets that are not ignored. Raises the errors of `cross_entropy`.
    """
    logits, targets = _checked(logits, targets, ignore_index)
    (m, v), device = logits.shape, logits.device
    losses, out, counter = _results(logits, reduction)
    rows = logits.new_empty((2, m), dtype=torch.float32) if save_stats else None
    n_valid = logits.new_empty((), dtype=torch.float32) if save_stats else None
    if m:
        _loss_kernel[(m,)](
            logits_ptr=logits, targets_ptr=targets, losses_ptr=losses,
            out_ptr=out, counter_ptr=counter, rows_ptr=rows, n_valid_ptr=n_valid,
            stride_m=logits.stride(0), M=m, V=v, ignore_index=ignore_index,
            smoothing=smoothing, z_loss=z_loss, SMOOTH=smoothing > 0,
            MEAN=reduction == "mean", SPLIT=split(v, (logits, logits.stride(0))),
            **LOSS.pick(device, v=v, itemsize=logits.element_size()),
        )  # fmt: skip
    return losses if out is None else out, rows, n_valid


def cross_entropy_fwd_bwd(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of `cross_entropy_fwd`, and the gradient of the logits for dloss = 1."""
    logits, targets = _checked(logits, targets, ignore_index)
    (m, v), device = logits.shape, logits.device
    losses, out, counter = _results(logits, reduction)
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if m == 0:
        return losses if out is None else out, dlogits
    mean = reduction == "mean"
    n_valid = shared.count_valid(targets, ignore_index) if mean else None
    is_split = split(v, (logits, logits.stride(0)), (dlogits, v))
    itemsize = logits.element_size()
    key = {"v": most_whole(v, itemsize) if is_split else v, "itemsize": itemsize}
    num_looped, config = shared.chunk_split(
        **key, config=GRADIENT.pick(device, **key, split=is_split)
    )
    _gradient_kernel[(m,)](
        logits_ptr=logits, targets_ptr=targets, losses_ptr=losses,
        out_ptr=out, counter_ptr=counter, dlogits_ptr=dlogits, n_valid_ptr=n_valid,
        stride_m=logits.stride(0), M=m, V=v, num_looped=num_looped, ignore_index=ignore_index,
        smoothing=smoothing, z_loss=z_loss, SMOOTH=smoothing > 0, MEAN=mean,
        SPLIT=is_split, **config,
    )  # fmt: skip
    return losses if out is None else out, dlogits


def cross_entropy_bwd(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    rows: torch.Tensor,
    n_valid: torch.Tensor,
    ignore_index: int,
    smoothing: float,
) -> torch.Tensor:
    """Return the gradient of the logits of a mean, [M, V], contiguous.

    dloss: a scalar. rows, n_valid: as `cross_entropy_fwd` saves them.
    """
    logits, targets = as_rows_2d(logits), targets.contiguous()
    (m, v), itemsize = logits.shape, logits.element_size()
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    is_split = split(v, (logits, logits.stride(0)), (dlogits, v))
    held = most_whole(v, itemsize) if is_split else v
    config = RECOMPUTE.pick(logits.device, v=held, itemsize=itemsize)
    warps = config["num_warps"]
    parts = max(1, -(-shared.chunks_of(held, itemsize, warps) // config["STEPS"]))
    if m:
        recompute_backward_kernel[(m * parts,)](
            logits_ptr=logits, targets_ptr=targets, rows_ptr=rows,
            n_valid_ptr=n_valid, dloss_ptr=dloss, dlogits_ptr=dlogits, stride_m=logits.stride(0),
            M=m, V=v, parts=parts, ignore_index=ignore_index, smoothing=smoothing,
            SMOOTH=smoothing > 0, SPLIT=is_split, STEPS=config["STEPS"], LANES=32 * warps,
            VEC=shared.ACCESS_BYTES // itemsize, num_warps=warps,
        )  # fmt: skip
    return dlogits


def _checked(logits, targets, ignore_index):
    """Return logits and targets as the kernels read them: contiguous in V and in M."""
    if logits.dim() != 2:
        raise ValueError(f"logits: shape {tuple(logits.shape)}, expected two dimensions")
    check_floating(logits=logits)
    check_same_device(logits=logits, targets=targets)
    shared.check(targets, *logits.shape, ignore_index)
    return as_rows_2d(logits), targets.contiguous()


def _results(logits, reduction):
    """Return the losses of the rows and, for a reduction, its scalar and a counter."""
    m, dtype = logits.shape[0], logits.dtype
    if reduction == "none":
        return logits.new_empty((m,)), None, None
    losses = logits.new_empty((m,), dtype=torch.float32)
    if m == 0:
        out = losses.sum(dtype=dtype)
        return losses, out / 0 if reduction == "mean" else out, None
    return losses, logits.new_empty(()), arrival_counter(logits.device)


@triton.jit
def _loss_kernel(
    logits_ptr, targets_ptr, losses_ptr, out_ptr, counter_ptr, rows_ptr, n_valid_ptr,
    stride_m, M, V, ignore_index, smoothing, z_loss, SMOOTH: tl.constexpr, MEAN: tl.constexpr,
    SPLIT: tl.constexpr, UNROLL: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """losses[r] = lse - (1 - e) x[t] - e mean x + z lse^2, for row x with target t.

    Grid: M programs, one a row. Reads logits [M, V], rows stride_m apart, and targets [M]. Writes
    losses [M] and, unless rows_ptr is None, m and the gradient's factor of exp(x - m), float32
    [2, M]. Unless out_ptr is None, the last program writes their sum, or for MEAN their mean and
    n_valid, and sets the counter to zero.
    SMOOTH: smoothing > 0. SPLIT: rows begin at any element (`_triton/row_access.py`). UNROLL blocks
    of BLOCK_V columns a step, both powers of two.
    """
    # A traced graph hands floats over as float64.
    smoothing, z_loss = tl.cast(smoothing, tl.float32), tl.cast(z_loss, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_m
    target = tl.load(targets_ptr + row)
    loss = 0.0
    if target != ignore_index:
        x_target, _ = target_logit(row_ptr, target, V)
        if SPLIT:
            m, l, sum_x = loop_split_row(row_ptr, V, SMOOTH, UNROLL, BLOCK_V)
        else:
            m, l, sum_x = loop_row(row_ptr, V, SMOOTH, UNROLL, BLOCK_V)
        loss, factor = row_loss(x_target, m, l, sum_x, V, smoothing, z_loss, SMOOTH)
        if rows_ptr is not None:
            tl.store(rows_ptr + row, m)
            tl.store(rows_ptr + M + row, factor / l)
    tl.store(losses_ptr + row, loss.to(losses_ptr.dtype.element_ty))
    if out_ptr is not None:
        _finish(losses_ptr, out_ptr, counter_ptr, targets_ptr, n_valid_ptr, M, ignore_index, MEAN)


@triton.jit
def _gradient_kernel(
    logits_ptr, targets_ptr, losses_ptr, out_ptr, counter_ptr, dlogits_ptr, n_valid_ptr,
    stride_m, M, V, num_looped, ignore_index, smoothing, z_loss,
    SMOOTH: tl.constexpr, MEAN: tl.constexpr, LOOPS: tl.constexpr, REG_CHUNKS: tl.constexpr,
    PREFETCH: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Losses, and dlogits = p (1 + 2 z lse) - e / V - (1 - e) [j = t], over n_valid if given.

    Grid: M programs, one a row. Reads logits [M, V], rows stride_m apart, targets [M] and n_valid;
    writes losses [M] and dlogits [M, V], contiguous. Unless out_ptr is None, the last program
    writes the sum or, for MEAN, the mean of the losses, and sets the counter to zero.
    SMOOTH: smoothing > 0. Chunks of LANES times VEC logits, LANES = 32 num_warps: num_looped times
    PREFETCH chunks and REG_CHUNKS more cover the row. LOOPS: num_looped > 0. SPLIT: rows begin at
    any element, equally in logits and dlogits (`_triton/row_access.py`).
    """
    smoothing, z_loss = tl.cast(smoothing, tl.float32), tl.cast(z_loss, tl.float32)
    scale = 1.0
    if n_valid_ptr is not None:
        scale /= tl.load(n_valid_ptr)
    row = tl.program_id(0).to(tl.int64)
    gradient_of_row(
        logits_ptr + row * stride_m, dlogits_ptr + row * V, losses_ptr + row,
        tl.load(targets_ptr + row), V, num_looped, ignore_index, smoothing, z_loss, scale,
        SMOOTH, LOOPS, REG_CHUNKS, PREFETCH, LANES, VEC, SPLIT,
    )  # fmt: skip
    if out_ptr is not None:
        _finish(losses_ptr, out_ptr, counter_ptr, targets_ptr, None, M, ignore_index, MEAN)


@triton.jit
def recompute_backward_kernel(
    logits_ptr, targets_ptr, rows_ptr, n_valid_ptr, dloss_ptr, dlogits_ptr,
    stride_m, M, V, parts, ignore_index, smoothing,
    SMOOTH: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """dlogits = dloss / n_valid (p (1 + 2 z lse) - e / V - (1 - e) [j = t]), from saved rows.

    Grid: M * parts programs; each owns STEPS chunks of LANES times VEC logits of a row. Reads
    logits [M, V], rows stride_m apart, targets [M], rows float32 [2, M] of `_loss_kernel`,
    n_valid and dloss; writes dlogits [M, V], contiguous.
    SMOOTH: smoothing > 0. SPLIT: rows begin at any element, equally in logits and dlogits
    (`_triton/row_access.py`). LANES = 32 num_warps; VEC elements are 16 bytes.
    """
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
        edge_cols, edge_mask = edges_of(tl.arange(0, LANES), lead, width, V)
        # The first program of a row has its edges.
        edge_mask &= first == 0
    if target == ignore_index:
        zeros = tl.zeros((LANES, VEC), out_ptr.dtype.element_ty)
        for step in tl.static_range(STEPS):
            columns = columns_of(first + step, LANES, VEC)
            tl.store(out_ptr + columns, zeros, mask=columns < width)
        if SPLIT:
            tl.store(begin_out_ptr + edge_cols, 0.0, mask=edge_mask)
    else:
        target_col = tl.where((target >= 0) & (target < V), target, -1).to(tl.int32)
        scale = tl.load(dloss_ptr).to(tl.float32) / tl.load(n_valid_ptr)
        m, reciprocal = tl.load(rows_ptr + row), tl.load(rows_ptr + M + row) * scale
        row_ptr, inner_target_col = logits_ptr + row * stride_m, target_col
        if SPLIT:
            x = load_f32(begin_ptr + edge_cols, edge_mask)
            store_grad_edges(
                begin_out_ptr, edge_cols, edge_mask, x, m, reciprocal, target_col,
                V, smoothing, scale, SMOOTH,
            )  # fmt: skip
            row_ptr, inner_target_col = inner(begin_ptr, lead), target_col - lead
        for step in tl.static_range(STEPS):
            x = load_chunk(row_ptr, first + step, width, "", LANES, VEC).to(tl.float32)
            store_grad_chunk(
                out_ptr, x, first + step, m, reciprocal, inner_target_col, width,
                V, smoothing, scale, SMOOTH,
            )  # fmt: skip


@triton.jit
def _finish(
    losses_ptr, out_ptr, counter_ptr, targets_ptr, n_valid_ptr, M, ignore_index, MEAN: tl.constexpr
):  # fmt: skip
    """Add up all losses in the last program; every program calls this after its loss."""
    # Release: the losses are in memory before the counter rises. Acquire: the last one sees all.
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        loss = sum_losses(losses_ptr, M, SUMMED)
        if MEAN:
            count = count_valid_targets(targets_ptr, M, ignore_index, SUMMED)
            loss = loss / count
            if n_valid_ptr is not None:
                tl.store(n_valid_ptr, count)
        tl.store(out_ptr, loss.to(out_ptr.dtype.element_ty))
        tl.store(counter_ptr, 0)


# STEPS: chunks of a row for each program of `recompute_backward_kernel`.
RECOMPUTE_CONFIGS = tuple(
    {"STEPS": steps, "num_warps": warps} for steps in (1, 2, 4) for warps in (4, 8)
)


def _choose_recompute(v, itemsize):
    return {"STEPS": 2, "num_warps": 4}


def _suits_recompute(candidate, v, itemsize):
    chunks = shared.chunks_of(v, itemsize, candidate["num_warps"])
    return candidate["STEPS"] <= chunks


LOSS = Configs(_loss_kernel, LOOP_CONFIGS, choose_loop)
GRADIENT = Configs(_gradient_kernel, ROW_CONFIGS, choose_row, suits_row)
RECOMPUTE = Configs(
    recompute_backward_kernel, RECOMPUTE_CONFIGS, _choose_recompute, _suits_recompute
)

cross_entropy_fwd = cached_launch(cross_entropy_fwd)
cross_entropy_fwd_bwd = cached_launch(cross_entropy_fwd_bwd)
cross_entropy_bwd = cached_launch(cross_entropy_bwd)

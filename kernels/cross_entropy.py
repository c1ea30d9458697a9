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
from ._runtime.checks import check_floating, check_integer, check_same_device, check_tensors
from ._runtime.configs import Configs
from ._runtime.layout import ACCESS_BYTES, as_rows_2d
from ._triton.arrival_counter import arrival_counter
from ._triton.memory import load_f32
from ._triton.row_access import body_ptr, max_body, needs_peeling, peeled_columns_of, vector_body
from .cross_entropy_details.arguments import (
    as_rows,
    check_targets,
    comparable,
    counted,
    dtype_of_loss,
    in_shape,
    options_of,
    with_penalty,
)
from .cross_entropy_details.reduction import (
    alone,
    count_valid,
    count_valid_targets,
    defers_mean,
    reduced_penalty,
    scaled,
    sum_losses,
)
from .cross_entropy_details.row import (
    LOOP_CONFIGS,
    ROW_CONFIGS,
    capped,
    choose_loop,
    choose_row,
    chunk_split,
    chunks_of,
    columns_of,
    gradient_of_row,
    load_chunk,
    loop_row,
    loop_split_row,
    row_loss,
    store_grad_chunk,
    store_grad_peeled,
    suits_row,
    target_logit,
)

ACCUMULATES = {"cross_entropy": "float32"}
# Losses that the last program adds up in a step.
SUMMED = tl.constexpr(2048)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    dim: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_z_loss: bool = False,
    loss_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of logits and class indices, computed in float32.

    The result is that of PyTorch's function, plus a z-loss. The forward pass writes the gradient of
    the logits into a tensor of their size. For a mean in float16 the backward pass does so, which
    reads the logits again.

    Args:
        logits: `[M, V]`, float32, float16 or bfloat16. They are not modified. `[V]` is a single
            row; more dimensions need `dim`, and are copied unless they are rows in memory.
        targets: `[M]`, int64 or int32, from 0 to V - 1 or `ignore_index`: the shape of the logits
            without the dimension of the classes. On a GPU a target out of range makes the loss and
            the gradient of its row NaN, because no check waits for it.
        dim: the dimension of the classes, by default the last one of up to two. More dimensions
            must name it: 1 for PyTorch's layout `[N, V, d1, …]`, -1 for `[…, V]`.
        ignore_index: rows with this target have no loss and no gradient.
        label_smoothing: share of the loss, from 0 to 1, that all V classes divide evenly.
        z_loss: factor of the squared log-sum-exp that is added to each loss.
        softcap: a positive number c, which makes the logits c tanh(logits / c) first, as in
            Gemma 2; or None.
        reduction: "mean" over the rows that are not ignored (NaN without any), "sum" or "none".

        return_z_loss: return the part of the loss that is the z-loss too, to be watched.
        loss_dtype: the dtype of the logits, or float32. None is the dtype of PyTorch's result: that
            of the logits, and float32 under autocast. A bfloat16 loss has 8 significant bits.

    Returns:
        A scalar, or for "none" the shape of the targets, in `loss_dtype`. In float16 a sum above
        65504 is infinite, as in PyTorch. It is differentiable once, in logits. With
        `return_z_loss` the result is (loss, z-loss), of which the second has no gradient.

    Raises:
        TypeError: an argument has another kind or dtype.
        ValueError: a shape, device or value is wrong, or V is zero. On a CPU also: a target is out
            of range.

    Source:
        Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024); the softcap:
        Gemma Team, "Gemma 2: Improving open language models at a practical size" (2024).

    Example:
        >>> logits = torch.randn(4, 10, device="cuda")
        >>> cross_entropy(logits, torch.tensor([1, 2, 3, 9], device="cuda")).shape
        torch.Size([])
    """
    options = options_of(ignore_index, label_smoothing, z_loss, softcap, reduction)
    check_tensors(logits=logits, targets=targets)
    options += (dtype_of_loss(logits, loss_dtype, return_z_loss), return_z_loss)
    shape = targets.shape
    logits, targets = as_rows("logits", _classes_last(logits, dim), targets)
    targets = comparable(targets, ignore_index)
    if not needs_grad(logits):
        loss, _, _, penalty = cross_entropy_fwd(logits, targets, *options, False)
        result = with_penalty(loss, penalty)
    elif defers_mean(logits.dtype, reduction):
        result = _RecomputeCrossEntropy.apply(logits, targets, *options)
    else:
        result = _CrossEntropy.apply(logits, targets, *options)
    return in_shape(result, shape)


def _classes_last(logits, dim):
    """Return a view of logits with the classes last; raise ValueError for a wrong dim."""
    dims = logits.dim()
    if dim is None:
        if dims not in (1, 2):
            raise ValueError(
                f"logits: shape {tuple(logits.shape)} without dim, expected one or two dimensions, "
                "or dim=1 for [N, V, d1, ...], or dim=-1 for [..., V]"
            )
        return logits
    check_integer("dim", dim, -dims, dims - 1)
    return logits if dim in (-1, dims - 1) else logits.movedim(dim, -1)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, *options):
        loss, dlogits, penalty = cross_entropy_fwd_bwd(logits, targets, *options)
        # Autograd checks the saved loss in the place of the logits, which are not saved.
        ctx.save_for_backward(dlogits, loss, targets if loss.dim() else None)
        ctx.unseen, ctx.ignore_index = alone(), options[0]
        if penalty is not None:
            ctx.mark_non_differentiable(penalty)
        return with_penalty(loss, penalty)

    @staticmethod
    @once
    def backward(ctx, dloss, _=None):
        dlogits, _, targets = ctx.saved_tensors
        if targets is not None:
            dloss = counted(dloss, targets, ctx.ignore_index)
        dlogits = scaled(dlogits, dloss, unseen=ctx.unseen)
        return (dlogits, *(None,) * 8)


class _RecomputeCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, *options):
        loss, rows, n_valid, penalty = cross_entropy_fwd(logits, targets, *options, True)
        ctx.save_for_backward(logits, targets, rows, n_valid)
        ignore_index, smoothing, _, softcap, *_ = options
        ctx.options = ignore_index, smoothing, softcap
        if penalty is not None:
            ctx.mark_non_differentiable(penalty)
        return with_penalty(loss, penalty)

    @staticmethod
    @once
    def backward(ctx, dloss, _=None):
        dlogits = cross_entropy_bwd(dloss, *ctx.saved_tensors, *ctx.options)
        return (dlogits, *(None,) * 8)


def cross_entropy_fwd(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    dtype: torch.dtype,
    wants_penalty: bool,
    save_stats: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the loss of logits [M, V] and targets [M], tensors of `cross_entropy_bwd`, a z-loss.

    dtype: that of the loss and of the z-loss alone, which is None unless it is wanted. `save_stats`
    asks for the tensors, both float32; otherwise they are None. The tensor rows [2, M] holds m and
    the gradient's factor of exp(x - m). The scalar n_valid counts the targets that are not ignored.
    Raises the errors of `cross_entropy`.
    """
    logits, targets = _checked(logits, targets, ignore_index)
    (m, v), device = logits.shape, logits.device
    losses, out, counter = _results(logits, reduction, dtype)
    penalties = torch.empty_like(losses) if wants_penalty else None
    rows = logits.new_empty((2, m), dtype=torch.float32) if save_stats else None
    n_valid = logits.new_empty((), dtype=torch.float32) if save_stats else None
    if m:
        _loss_kernel[(m,)](
            logits_ptr=logits, targets_ptr=targets, losses_ptr=losses,
            z_losses_ptr=penalties, out_ptr=out, counter_ptr=counter, rows_ptr=rows,
            n_valid_ptr=n_valid,
            stride_m=logits.stride(0), M=m, V=v, ignore_index=ignore_index,
            smoothing=smoothing, z_loss=z_loss, softcap=softcap or None, SMOOTH=smoothing > 0,
            MEAN=reduction == "mean", PEELED=needs_peeling(v, (logits, logits.stride(0))),
            **LOSS.pick(device, v=v, itemsize=logits.element_size()),
        )  # fmt: skip
    penalty = reduced_penalty(penalties, targets, ignore_index, reduction, dtype)
    return losses if out is None else out, rows, n_valid, penalty


def cross_entropy_fwd_bwd(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    dtype: torch.dtype,
    wants_penalty: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the loss and the z-loss of `cross_entropy_fwd`, around the gradient for dloss = 1."""
    logits, targets = _checked(logits, targets, ignore_index)
    (m, v), device = logits.shape, logits.device
    losses, out, counter = _results(logits, reduction, dtype)
    penalties = torch.empty_like(losses) if wants_penalty else None
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if m == 0:
        penalty = reduced_penalty(penalties, targets, ignore_index, reduction, dtype)
        return losses if out is None else out, dlogits, penalty
    mean = reduction == "mean"
    n_valid = count_valid(targets, ignore_index) if mean else None
    peeled = needs_peeling(v, (logits, logits.stride(0)), (dlogits, v))
    itemsize = logits.element_size()
    key = {"v": max_body(v, itemsize) if peeled else v, "itemsize": itemsize}
    num_looped, config = chunk_split(**key, config=GRADIENT.pick(device, **key, peeled=peeled))
    _gradient_kernel[(m,)](
        logits_ptr=logits, targets_ptr=targets, losses_ptr=losses,
        z_losses_ptr=penalties, out_ptr=out, counter_ptr=counter, dlogits_ptr=dlogits,
        n_valid_ptr=n_valid,
        stride_m=logits.stride(0), M=m, V=v, num_looped=num_looped, ignore_index=ignore_index,
        smoothing=smoothing, z_loss=z_loss, softcap=softcap or None, SMOOTH=smoothing > 0,
        MEAN=mean, PEELED=peeled, **config,
    )  # fmt: skip
    penalty = reduced_penalty(penalties, targets, ignore_index, reduction, dtype)
    return losses if out is None else out, dlogits, penalty


def cross_entropy_bwd(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    rows: torch.Tensor,
    n_valid: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    softcap: float,
) -> torch.Tensor:
    """Return the gradient of the logits of a mean, [M, V], contiguous.

    dloss: a scalar. rows, n_valid: as `cross_entropy_fwd` saves them.
    """
    logits, targets = as_rows_2d(logits), targets.contiguous()
    (m, v), itemsize = logits.shape, logits.element_size()
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    peeled = needs_peeling(v, (logits, logits.stride(0)), (dlogits, v))
    held = max_body(v, itemsize) if peeled else v
    config = RECOMPUTE.pick(logits.device, v=held, itemsize=itemsize)
    warps = config["num_warps"]
    parts = max(1, -(-chunks_of(held, itemsize, warps) // config["STEPS"]))
    if m:
        recompute_backward_kernel[(m * parts,)](
            logits_ptr=logits, targets_ptr=targets, rows_ptr=rows,
            n_valid_ptr=n_valid, dloss_ptr=dloss, dlogits_ptr=dlogits, stride_m=logits.stride(0),
            M=m, V=v, parts=parts, ignore_index=ignore_index, smoothing=smoothing,
            softcap=softcap or None, SMOOTH=smoothing > 0, PEELED=peeled, STEPS=config["STEPS"],
            LANES=32 * warps, VEC=ACCESS_BYTES // itemsize, num_warps=warps,
        )  # fmt: skip
    return dlogits


def _checked(logits, targets, ignore_index):
    """Return logits and targets as the kernels read them: contiguous in V and in M."""
    if logits.dim() != 2:
        raise ValueError(f"logits: shape {tuple(logits.shape)}, expected two dimensions")
    check_floating(logits=logits)
    check_same_device(logits=logits, targets=targets)
    check_targets(targets, *logits.shape, ignore_index)
    return as_rows_2d(logits), targets.contiguous()


def _results(logits, reduction, dtype):
    """Return the losses of the rows and, for a reduction, its scalar and a counter."""
    m = logits.shape[0]
    if reduction == "none":
        return logits.new_empty((m,), dtype=dtype), None, None
    losses = logits.new_empty((m,), dtype=torch.float32)
    if m == 0:
        out = losses.sum(dtype=dtype)
        return losses, out / 0 if reduction == "mean" else out, None
    return losses, logits.new_empty((), dtype=dtype), arrival_counter(logits.device)


@triton.jit
def _loss_kernel(
    logits_ptr, targets_ptr, losses_ptr, z_losses_ptr, out_ptr, counter_ptr, rows_ptr, n_valid_ptr,
    stride_m, M, V, ignore_index, smoothing, z_loss, softcap,
    SMOOTH: tl.constexpr, MEAN: tl.constexpr, PEELED: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """losses[r] = lse - (1 - e) x[t] - e mean x + z lse^2, for row x with target t.

    Grid: M programs, one a row. Reads logits [M, V], rows stride_m apart, and targets [M]. Writes
    losses [M] and, unless their pointers are None, z lse^2 [M], and m and the gradient's factor of
    exp(x - m), float32 [2, M]. Unless out_ptr is None, the last program writes the sum of the
    losses, or for MEAN their mean and n_valid, and sets the counter to zero. softcap: as in
    cross_entropy_details/row.py.
    SMOOTH: smoothing > 0. PEELED: rows begin at any element (`_triton/row_access.py`). UNROLL
    blocks of BLOCK_V columns a step, both powers of two.
    """
    # A traced graph hands floats over as float64.
    smoothing, z_loss = tl.cast(smoothing, tl.float32), tl.cast(z_loss, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_m
    target = tl.load(targets_ptr + row)
    loss = 0.0
    penalty = 0.0
    if target != ignore_index:
        x_target, _ = target_logit(row_ptr, target, V, softcap)
        if PEELED:
            m, l, sum_x = loop_split_row(row_ptr, V, softcap, SMOOTH, UNROLL, BLOCK_V)
        else:
            m, l, sum_x = loop_row(row_ptr, V, softcap, SMOOTH, UNROLL, BLOCK_V)
        loss, penalty, factor = row_loss(x_target, m, l, sum_x, V, smoothing, z_loss, SMOOTH)
        if rows_ptr is not None:
            tl.store(rows_ptr + row, m)
            tl.store(rows_ptr + M + row, factor / l)
    tl.store(losses_ptr + row, loss.to(losses_ptr.dtype.element_ty))
    if z_losses_ptr is not None:
        tl.store(z_losses_ptr + row, penalty.to(z_losses_ptr.dtype.element_ty))
    if out_ptr is not None:
        _finish(losses_ptr, out_ptr, counter_ptr, targets_ptr, n_valid_ptr, M, ignore_index, MEAN)


@triton.jit
def _gradient_kernel(
    logits_ptr, targets_ptr, losses_ptr, z_losses_ptr, out_ptr, counter_ptr, dlogits_ptr,
    n_valid_ptr, stride_m, M, V, num_looped, ignore_index, smoothing, z_loss, softcap,
    SMOOTH: tl.constexpr, MEAN: tl.constexpr, LOOPS: tl.constexpr, REG_CHUNKS: tl.constexpr,
    PREFETCH: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, PEELED: tl.constexpr,
):  # fmt: skip
    """Losses, and dlogits = p (1 + 2 z lse) - e / V - (1 - e) [j = t], over n_valid if given.

    Grid: M programs, one a row. Reads logits [M, V], rows stride_m apart, targets [M] and n_valid;
    writes losses [M], z lse^2 [M] unless its pointer is None, and dlogits [M, V], contiguous.
    Unless out_ptr is None, the last program writes the sum or, for MEAN, the mean of the losses,
    and sets the counter to zero. softcap: as in cross_entropy_details/row.py.
    SMOOTH: smoothing > 0. Chunks of LANES times VEC logits, LANES = 32 num_warps: num_looped times
    PREFETCH chunks and REG_CHUNKS more cover the row. LOOPS: num_looped > 0. PEELED: rows begin at
    any element, equally in logits and dlogits (`_triton/row_access.py`).
    """
    smoothing, z_loss = tl.cast(smoothing, tl.float32), tl.cast(z_loss, tl.float32)
    scale = 1.0
    if n_valid_ptr is not None:
        scale /= tl.load(n_valid_ptr)
    row = tl.program_id(0).to(tl.int64)
    if z_losses_ptr is not None:
        z_losses_ptr += row
    gradient_of_row(
        logits_ptr + row * stride_m, dlogits_ptr + row * V, losses_ptr + row, z_losses_ptr,
        tl.load(targets_ptr + row), V, num_looped, ignore_index, smoothing, z_loss, scale,
        softcap, SMOOTH, LOOPS, REG_CHUNKS, PREFETCH, LANES, VEC, PEELED,
    )  # fmt: skip
    if out_ptr is not None:
        _finish(losses_ptr, out_ptr, counter_ptr, targets_ptr, None, M, ignore_index, MEAN)


@triton.jit
def recompute_backward_kernel(
    logits_ptr, targets_ptr, rows_ptr, n_valid_ptr, dloss_ptr, dlogits_ptr,
    stride_m, M, V, parts, ignore_index, smoothing, softcap,
    SMOOTH: tl.constexpr, PEELED: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """dlogits = dloss / n_valid (p (1 + 2 z lse) - e / V - (1 - e) [j = t]), from saved rows.

    Grid: M * parts programs; each owns STEPS chunks of LANES times VEC logits of a row. Reads
    logits [M, V], rows stride_m apart, targets [M], rows float32 [2, M] of `_loss_kernel`,
    n_valid and dloss; writes dlogits [M, V], contiguous.
    SMOOTH: smoothing > 0. PEELED: rows begin at any element, equally in logits and dlogits
    (`_triton/row_access.py`). LANES = 32 num_warps; VEC elements are 16 bytes.
    """
    smoothing = tl.cast(smoothing, tl.float32)
    program = tl.program_id(0)
    row = (program // parts).to(tl.int64)
    first = program % parts * STEPS
    out_ptr = dlogits_ptr + row * V
    target = tl.load(targets_ptr + row)
    width = V
    if PEELED:
        begin_ptr, begin_out_ptr = logits_ptr + row * stride_m, out_ptr
        lead, width = vector_body(begin_ptr, V)
        out_ptr = body_ptr(out_ptr, lead)
        peel_cols, peel_mask = peeled_columns_of(tl.arange(0, LANES), lead, width, V)
        # The first program of a row has its peeled elements.
        peel_mask &= first == 0
    if target == ignore_index:
        zeros = tl.zeros((LANES, VEC), out_ptr.dtype.element_ty)
        for step in tl.static_range(STEPS):
            columns = columns_of(first + step, LANES, VEC)
            tl.store(out_ptr + columns, zeros, mask=columns < width)
        if PEELED:
            tl.store(begin_out_ptr + peel_cols, 0.0, mask=peel_mask)
    else:
        target_col = tl.where((target >= 0) & (target < V), target, -1).to(tl.int32)
        scale = tl.load(dloss_ptr).to(tl.float32) / tl.load(n_valid_ptr)
        m, reciprocal = tl.load(rows_ptr + row), tl.load(rows_ptr + M + row) * scale
        row_ptr, body_target_col = logits_ptr + row * stride_m, target_col
        if PEELED:
            x = capped(load_f32(begin_ptr + peel_cols, peel_mask), softcap)
            store_grad_peeled(
                begin_out_ptr, peel_cols, peel_mask, x, m, reciprocal, target_col,
                V, smoothing, scale, softcap, SMOOTH,
            )  # fmt: skip
            row_ptr, body_target_col = body_ptr(begin_ptr, lead), target_col - lead
        for step in tl.static_range(STEPS):
            x = load_chunk(row_ptr, first + step, width, "", LANES, VEC).to(tl.float32)
            store_grad_chunk(
                out_ptr, x, first + step, m, reciprocal, body_target_col, width,
                V, smoothing, scale, softcap, SMOOTH,
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
    chunks = chunks_of(v, itemsize, candidate["num_warps"])
    return candidate["STEPS"] <= chunks


LOSS = Configs(_loss_kernel, LOOP_CONFIGS, choose_loop)
GRADIENT = Configs(_gradient_kernel, ROW_CONFIGS, choose_row, suits_row)
RECOMPUTE = Configs(
    recompute_backward_kernel, RECOMPUTE_CONFIGS, _choose_recompute, _suits_recompute
)

cross_entropy_fwd = cached_launch(cross_entropy_fwd)
cross_entropy_fwd_bwd = cached_launch(cross_entropy_fwd_bwd)
cross_entropy_bwd = cached_launch(cross_entropy_bwd)

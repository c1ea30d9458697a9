"""Cross entropy of logits x wᵀ + b that never lie in memory as a whole; forward and backward.

The formulas are those of kernels/cross_entropy_details/row.py. Rows go in chunks: a matmul writes
the logits of a chunk to a buffer, and the kernel overwrites them with their gradient. Two more
matmuls compute the chunk's part of dx and add its part to dw. So the forward pass has both
gradients, and the backward pass multiplies them by the gradient of the loss unless it is one. The
idea is that of Liger-Kernel's fused linear cross entropy (Hsu et al., 2024). Parts lie in
`kernels/cross_entropy_details/`:

    linear_chunks.py    the rows of a chunk, and the buffer
    linear_cublas.py    products by cuBLAS
    linear_tiles.py     the losses alone
    linear_traced.py    shapes of the results, for a traced graph

Without gradients not even a chunk of the logits is in memory.

The FLOPs decide (`ops/linear_cross_entropy.py` counts them); they are those of plain products. On
Hopper those of 16 bits are `matmul`'s, which no odd vocabulary slows down. All others are cuBLAS's,
by way of PyTorch. The memory besides inputs and gradients is the buffer.

The sum over chunks, dw, has the dtype of w; each term is accumulated in float32 inside the matmul.
A float32 copy would take twice the memory of w, and at most eight chunks round at most eight times.
A float32 weight, as autocast has it, gets such a sum as its gradient. Otherwise only for a mean in
float16 dw is a float32 copy until the backward pass. There the division by the count waits for the
gradient of the loss, and float16 may not hold the sum over so many rows.

The losses of rows, reduction "none", each wait for the gradient of their own. Their backward pass
computes the logits of each chunk again, so it takes 6 M H V FLOPs after 2 M H V forward.
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import (
    check_floating,
    check_no_tangent,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_tensors,
)
from ._runtime.configs import Configs
from ._runtime.device import is_hopper
from ._runtime.launch_guard import guarded
from ._runtime.layout import as_read, as_rows_2d
from ._runtime.traced import operation, spread
from .cross_entropy_details import linear_cublas as cublas
from .cross_entropy_details import linear_tiles as tiled
from .cross_entropy_details.arguments import (
    as_rows,
    autocast_dtype,
    check_targets,
    comparable,
    counted,
    dtype_of_loss,
    in_shape,
    options_of,
    with_penalty,
)
from .cross_entropy_details.linear_chunks import buffer_of_chunk, rows_of_chunk
from .cross_entropy_details.linear_traced import like_backward, like_forward
from .cross_entropy_details.reduction import (
    alone,
    count_valid,
    defers_mean,
    reduced,
    scale_rows,
    scaled,
)
from .cross_entropy_details.row import (
    LOOP_CONFIGS,
    ROW_CONFIGS,
    choose_loop,
    choose_row,
    chunk_split,
    gradient_of_row,
    loop_row,
    row_loss,
    suits_row,
    target_logit,
)
from .matmul import product

ACCUMULATES = {
    "linear_cross_entropy": "float32, dw of the chunks in its dtype, for a float16 mean in float32"
}


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_z_loss: bool = False,
    loss_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return `cross_entropy(x @ weight.T + bias, targets)` without the logits in memory.

    The forward pass also computes the gradients that are wanted. Under autocast the products have
    its dtype, as in PyTorch's linear layer. The gradient of a float32 weight is summed in float32
    there, without a copy of 16 bits between.

    Args:
        x: `[..., H]`, float32, float16 or bfloat16.
        weight: `[V, H]`, of the dtype of x, or under autocast of any of them.
        targets: `[...]`, int64 or int32, from 0 to V - 1 or `ignore_index`. On a GPU a target out
            of range makes the loss and the gradients NaN, because no check waits for it.
        bias: `[V]`, of the dtype of x, or under autocast of any of them; or None.
        ignore_index: rows with this target have no loss and no gradient.
        label_smoothing: share of the loss, from 0 to 1, that all V classes divide evenly.
        z_loss: factor of the squared log-sum-exp that is added to each loss.
        softcap: a positive number c, which makes the logits c tanh(logits / c) first, as in
            Gemma 2; or None.
        reduction: "mean" over the rows that are not ignored (NaN without any), "sum" or "none".
            For "none" the backward pass computes the logits again.
        return_z_loss: return the part of the loss that is the z-loss too, to be watched.
        loss_dtype: the dtype of x, or float32. None is the dtype of PyTorch's result: that of x,
            and float32 under autocast. A bfloat16 loss has 8 significant bits.

    Returns:
        A scalar, or for "none" the shape of the targets, in `loss_dtype`. In float16 a sum above
        65504 is infinite, as in PyTorch. It is differentiable once, in x, weight and bias. With
        `return_z_loss` the result is (loss, z-loss), of which the second has no gradient.

    Raises:
        TypeError: an argument has another kind or dtype, or weight or bias has another dtype than x
            where autocast is not enabled.
        ValueError: a shape, device or value is wrong, or V is zero. On a CPU also: a target is out
            of range.

    Source:
        Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024).

    Example:
        >>> x, weight = torch.randn(4, 16, device="cuda"), torch.randn(10, 16, device="cuda")
        >>> linear_cross_entropy(x, weight, torch.tensor([1, 2, 3, 9], device="cuda")).shape
        torch.Size([])
    """
    check_tensors(x=x, weight=weight, targets=targets, **({} if bias is None else {"bias": bias}))
    options = options_of(ignore_index, label_smoothing, z_loss, softcap, reduction)
    check_no_tangent(x=x, weight=weight, bias=bias)
    given = {"x": x, "weight": weight, **({} if bias is None else {"bias": bias})}
    check_floating(**given)
    compute = _dtype_of_products(given)
    check_same_device(**given, targets=targets)
    options += (dtype_of_loss(x, loss_dtype, return_z_loss), return_z_loss)
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        h = x.shape[-1] if x.dim() else "H"
        raise ValueError(
            f"weight: shape {tuple(weight.shape)}, expected (V, {h}) for x of {tuple(x.shape)}"
        )
    shape, v = targets.shape, weight.shape[0]
    x, targets = as_rows("x", x, targets)
    check_targets(targets, x.shape[0], v, ignore_index)
    if bias is not None:
        check_shape("bias", bias, (v,))
    targets = comparable(targets, ignore_index).contiguous()
    x, weight = as_rows_2d(as_read(x)), as_read(weight)
    bias = bias if bias is None else as_read(bias).contiguous()
    if not needs_grad(x, weight, bias):
        factors = _cast(compute, x, weight, bias)
        loss, *_, penalty = _forward(*factors, targets, *options, [False] * 3, False)
        result = with_penalty(loss, penalty)
    elif reduction == "none":
        result = _LinearCrossEntropyOfRows.apply(x, weight, bias, targets, compute, *options)
    else:
        result = _LinearCrossEntropy.apply(x, weight, bias, targets, compute, *options)
    return in_shape(result, shape)


def _dtype_of_products(given):
    """Return the dtype in which x, weight and bias are multiplied.

    given: tensors by name. Raises TypeError if their dtypes differ and autocast is not enabled.
    """
    dtype = autocast_dtype(given["x"])
    if dtype is None:
        check_same_dtype(**given)
        dtype = given["x"].dtype
    return dtype


def _cast(dtype, *tensors):
    """Return the tensors in a dtype; None stays."""
    return tuple(x if x is None else x.to(dtype) for x in tensors)


def _wanted(x, weight, bias):
    """Return whether the gradients of the three are wanted, and that of the weight in float32."""
    wanted = [x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad]
    return wanted, weight.dtype == torch.float32


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, targets, compute, *options):
        wanted = _wanted(x, weight, bias)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, weight, bias)]
        factors = _cast(compute, x, weight, bias)
        loss, *sums, penalty = _forward(*factors, targets, *options, *wanted)
        # Autograd checks the saved loss in the place of the inputs, which are not saved.
        ctx.save_for_backward(*sums, loss)
        ctx.unseen = alone()
        if penalty is not None:
            ctx.mark_non_differentiable(penalty)
        return with_penalty(loss, penalty)

    @staticmethod
    @once
    def backward(ctx, dloss, _=None):
        *sums, n_valid, _ = ctx.saved_tensors
        gradients = (
            None if d is None else scaled(d, dloss, n_valid, unseen=ctx.unseen, dtype=dtype)
            for d, dtype in zip(sums, ctx.dtypes, strict=True)
        )
        return (*gradients, *(None,) * 9)


class _LinearCrossEntropyOfRows(torch.autograd.Function):
    """The losses of rows. Each has a gradient of its own to come, so products must wait for it."""

    @staticmethod
    def forward(ctx, x, weight, bias, targets, compute, *options):
        factors = _cast(compute, x, weight, bias)
        loss, *_, penalty = _forward(*factors, targets, *options, [False] * 3, False)
        ctx.save_for_backward(x, weight, bias, targets)
        ctx.compute, ctx.options = compute, options[:4]
        if penalty is not None:
            ctx.mark_non_differentiable(penalty)
        return with_penalty(loss, penalty)

    @staticmethod
    @once
    def backward(ctx, dlosses, _=None):
        *given, targets = ctx.saved_tensors
        factors, wanted = _cast(ctx.compute, *given), _wanted(*given)
        dlosses = counted(dlosses, targets, ctx.options[0])
        sums = _backward(dlosses, *factors, targets, *ctx.options, *wanted)
        gradients = (d if d is None else d.to(x.dtype) for d, x in zip(sums, given, strict=True))
        return (*gradients, *(None,) * 9)


def _forward(*arguments):
    """Return what `linear_cross_entropy_fwd` returns, in a traced graph by way of one operation."""
    if not torch.compiler.is_compiling():
        return linear_cross_entropy_fwd(*arguments)
    x, *_, reduction, _, wants_penalty, wanted, _ = arguments
    later = any(wanted) and defers_mean(x.dtype, reduction)
    return spread(_traced_forward(*arguments), (True, *wanted, later, wants_penalty))


def _backward(*arguments):
    """Return what `linear_cross_entropy_bwd` returns, in a traced graph by way of one operation."""
    if not torch.compiler.is_compiling():
        return linear_cross_entropy_bwd(*arguments)
    return spread(_traced_backward(*arguments), arguments[-2])


def linear_cross_entropy_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    dtype: torch.dtype,
    wants_penalty: bool,
    wanted: list[bool],
    wide: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return the loss, the gradients of x, weight and bias, a count or None, and the z-loss.

    If there is a count, the gradients are still to be divided by it, and dw is float32.

    x: [M, H]. weight: [V, H]. bias: [V] or None. targets: [M], contiguous. The loss, and the z-loss
    alone, have the dtype `dtype`; without `wants_penalty` the second is None. A gradient that is
    not `wanted`, of x, weight and bias in this order, is None. If `wide`, dw is float32, else it
    has the dtype of x.
    """
    losses = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    penalties = torch.empty_like(losses) if wants_penalty else None
    n_valid = count_valid(targets, ignore_index) if reduction == "mean" else None
    later = n_valid if any(wanted) and defers_mean(x.dtype, reduction) else None
    options, sums = (ignore_index, smoothing, z_loss, softcap), (None,) * 3
    if not any(wanted) and tiled.suited(x, weight):
        tiled.write_losses(losses, x, weight, targets, bias, *options, penalties)
    else:
        written = losses, penalties, None if later is not None else n_valid
        wide = wide or later is not None
        sums = _in_chunks(x, weight, bias, targets, options, wanted, wide, *written)
    if reduction == "none":
        return losses.to(dtype), *sums, None, None if penalties is None else penalties.to(dtype)
    penalty = None if penalties is None else reduced(penalties, n_valid, dtype)
    return reduced(losses, n_valid, dtype), *sums, later, penalty


def linear_cross_entropy_bwd(
    dlosses: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    wanted: list[bool],
    wide: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, weight and bias for those of the losses of rows, dlosses: [M].

    The other arguments are those of `linear_cross_entropy_fwd`. That of bias is float32.
    """
    losses = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    options = ignore_index, smoothing, z_loss, softcap
    written = losses, None, None, dlosses
    return _in_chunks(x, weight, bias, targets, options, wanted, wide, *written)


def _in_chunks(
    x, weight, bias, targets, options, wanted, wide, losses, penalties, n_valid, factors=None
):
    """Write the losses and z-losses of rows chunk by chunk; return the gradients that are wanted.

    n_valid: the count that divides the gradients, or None. factors: [M], of the gradient of each
    row, or None for ones.
    """
    (m, h), v = x.shape, weight.shape[0]
    kind = {"dtype": x.dtype, "device": x.device}
    dx = torch.empty((m, h), **kind) if wanted[0] else None
    sums = kind | ({"dtype": torch.float32} if wide else {})
    dw = (torch.empty if m else torch.zeros)((v, h), **sums) if wanted[1] else None
    db = torch.zeros(v, dtype=torch.float32, device=x.device) if wanted[2] else None
    step = rows_of_chunk(m, v * x.element_size())
    buffer = buffer_of_chunk(x, min(step, m), v)
    for first in range(0, m, step):
        rows = slice(first, first + step)
        part = x[rows]
        padded = buffer[: part.shape[0]]
        logits = padded[:, :v]
        _write_product(logits, part, weight.T, bias)
        _finish(
            logits, targets[rows], losses[rows], None if penalties is None else penalties[rows],
            n_valid, *options, any(wanted),
        )  # fmt: skip
        if factors is not None:
            scale_rows(padded, factors[rows])
        if dx is not None:
            _write_product(dx[rows], logits, weight)
        if dw is not None:
            _add_product(dw, logits.T, part, first > 0)
        if db is not None:
            db += logits.sum(0, dtype=torch.float32)
    return dx, dw, db


def _finish(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    penalties: torch.Tensor | None,
    n_valid: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    wants_gradient: bool,
) -> None:
    """Write the loss of each row and, if wanted, overwrite the logits with their gradient.

    penalties: where the z-losses go, or None.
    """
    m, v = logits.shape
    key = {"v": v, "itemsize": logits.element_size()}
    smooth = smoothing > 0
    if not wants_gradient:
        _loss_kernel[(m,)](
            logits_ptr=logits, targets_ptr=targets, losses_ptr=losses, z_losses_ptr=penalties,
            stride=logits.stride(0), V=v, ignore_index=ignore_index, smoothing=smoothing,
            z_loss=z_loss, softcap=softcap or None, SMOOTH=smooth,
            **LOSS.pick(logits.device, **key),
        )  # fmt: skip
    else:
        num_looped, config = chunk_split(**key, config=CHUNK.pick(logits.device, **key))
        _chunk_kernel[(m,)](
            logits_ptr=logits, targets_ptr=targets, losses_ptr=losses, z_losses_ptr=penalties,
            n_valid_ptr=n_valid, stride=logits.stride(0), V=v, num_looped=num_looped,
            ignore_index=ignore_index, smoothing=smoothing, z_loss=z_loss, softcap=softcap or None,
            SMOOTH=smooth, **config,
        )  # fmt: skip


def _write_product(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Write out = a b + bias, rounded once to out's dtype."""
    if _multiplies(a):
        product(a, b, bias, out=out)
    else:
        cublas.write_product(out, a, b, bias)


def _add_product(dw: torch.Tensor, a: torch.Tensor, b: torch.Tensor, further: bool) -> None:
    """Write dw = a b, or dw + a b if `further`, accumulated in float32 and stored in dw's dtype."""
    if not _multiplies(a):
        cublas.add_product(dw, a, b, further)
    elif dw.dtype == a.dtype:
        product(a, b, residual=dw if further else None, out=dw)
    elif further:
        product(a, b, into=dw)
    else:
        product(a, b, out_dtype=dw.dtype, out=dw)


def _multiplies(a: torch.Tensor) -> bool:
    """Return whether products of a are those of `matmul`: of 16 bits, on Hopper."""
    return a.is_cuda and a.element_size() == 2 and is_hopper(a.device)


@triton.jit
def _loss_kernel(
    logits_ptr, targets_ptr, losses_ptr, z_losses_ptr, stride, V, ignore_index, smoothing, z_loss,
    softcap, SMOOTH: tl.constexpr, UNROLL: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """losses[r] = lse - (1 - e) x[t] - e mean x + z lse^2, for row x of logits with target t.

    Grid: one program a row. Reads logits [M, V], its rows `stride` apart, and targets [M]. Writes
    losses float32 [M], and z lse^2 to z_losses float32 [M] unless its pointer is None. softcap: as
    in cross_entropy_details/row.py. SMOOTH: smoothing > 0. UNROLL blocks of BLOCK_V columns a step,
    both powers of two.
    """
    # A traced graph hands floats over as float64.
    smoothing, z_loss = tl.cast(smoothing, tl.float32), tl.cast(z_loss, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    target = tl.load(targets_ptr + row)
    loss = 0.0
    penalty = 0.0
    if target != ignore_index:
        x_target, _ = target_logit(row_ptr, target, V, softcap)
        m, l, sum_x = loop_row(row_ptr, V, softcap, SMOOTH, UNROLL, BLOCK_V)
        loss, penalty, _ = row_loss(x_target, m, l, sum_x, V, smoothing, z_loss, SMOOTH)
    tl.store(losses_ptr + row, loss)
    if z_losses_ptr is not None:
        tl.store(z_losses_ptr + row, penalty)


@triton.jit
def _chunk_kernel(
    logits_ptr, targets_ptr, losses_ptr, z_losses_ptr, n_valid_ptr,
    stride, V, num_looped, ignore_index, smoothing, z_loss, softcap,
    SMOOTH: tl.constexpr, LOOPS: tl.constexpr, REG_CHUNKS: tl.constexpr, PREFETCH: tl.constexpr,
    LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Losses, and over the logits (p (1 + 2 z lse) - e / V - (1 - e) [j = t]) / n_valid.

    Grid: one program a row. Reads logits [M, V], its rows `stride` apart, targets [M] and, unless
    n_valid_ptr is None, n_valid. Writes losses float32 [M], z lse^2 to z_losses float32 [M] unless
    its pointer is None, and the gradient over the logits. softcap: as in
    cross_entropy_details/row.py. SMOOTH: smoothing > 0. Chunks of LANES times VEC logits, LANES =
    32 num_warps: num_looped times PREFETCH chunks and REG_CHUNKS more cover the row. LOOPS:
    num_looped > 0.
    """
    smoothing, z_loss = tl.cast(smoothing, tl.float32), tl.cast(z_loss, tl.float32)
    scale = 1.0
    if n_valid_ptr is not None:
        scale /= tl.load(n_valid_ptr)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    if z_losses_ptr is not None:
        z_losses_ptr += row
    gradient_of_row(
        row_ptr, row_ptr, losses_ptr + row, z_losses_ptr, tl.load(targets_ptr + row), V, num_looped,
        ignore_index, smoothing, z_loss, scale, softcap,
        SMOOTH, LOOPS, REG_CHUNKS, PREFETCH, LANES, VEC,
    )  # fmt: skip


LOSS = Configs(_loss_kernel, LOOP_CONFIGS, choose_loop)
CHUNK = Configs(_chunk_kernel, ROW_CONFIGS, choose_row, suits_row)
TILES, HOPPER_TILES = tiled.TILES, tiled.HOPPER_TILES

# Some products are PyTorch's, so only what follows them can be cached.
linear_cross_entropy_fwd = guarded(linear_cross_entropy_fwd)
linear_cross_entropy_bwd = guarded(linear_cross_entropy_bwd)
_finish = cached_launch(_finish)


# Kernels and products write the same buffer by many views, which no tracer follows well.
_traced_forward = operation("linear_cross_entropy", linear_cross_entropy_fwd, like_forward)
_traced_backward = operation(
    "linear_cross_entropy_backward", linear_cross_entropy_bwd, like_backward
)

"""Cross entropy of logits x wᵀ + b that never lie in memory as a whole; forward and backward.

The formulas are those of kernels/cross_entropy_details/row.py. Rows go in chunks: a matmul writes
the logits of a chunk to a buffer, and the kernel overwrites them with their gradient. Two more
matmuls compute the chunk's part of dx and add its part to dw. So the forward pass has both
gradients, and the backward pass multiplies them by the gradient of the loss unless it is one. The
idea is that of Liger-Kernel's fused linear cross entropy (Hsu et al., 2024).

Without gradients not even a chunk of the logits is in memory:
kernels/cross_entropy_details/linear_tiles.py.

The FLOPs decide (`ops/linear_cross_entropy.py` counts them); they are those of plain products, so
cuBLAS computes them. The memory besides inputs and gradients is the buffer. It has an eighth of the
logits, or BUFFER_BYTES, or LEAST_ROWS rows, whichever is most: a smaller buffer would save little
and leave matmuls idle.

The sum over chunks, dw, has the dtype of w; each term is accumulated in float32 inside the matmul.
A float32 copy would take twice the memory of w, and at most eight chunks round at most eight times.
Only for a mean in float16 dw is a float32 copy until the backward pass. There the division by the
count waits for the gradient of the loss, and float16 may not hold the sum over so many rows.
"""

import functools

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
from ._runtime.launch_guard import guarded
from ._runtime.layout import as_read, as_rows_2d
from .cross_entropy_details import linear_tiles as tiled
from .cross_entropy_details import row as shared
from .cross_entropy_details.row import (
    LOOP_CONFIGS,
    ROW_CONFIGS,
    choose_loop,
    choose_row,
    gradient_of_row,
    loop_row,
    row_loss,
    suits_row,
    target_logit,
)

ACCUMULATES = {
    "linear_cross_entropy": "float32, dw of the chunks in its dtype, for a float16 mean in float32"
}
# dw is rounded, and read and written, once in each chunk.
MOST_CHUNKS = 8
BUFFER_BYTES, LEAST_ROWS = 2**28, 1024
# Rows of a chunk in steps of a matmul's tile.
ROW_STEP = 128


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
    """Return `cross_entropy(x @ weight.T + bias, targets)` without the logits in memory.

    The forward pass also computes the gradients that are wanted.

    Args:
        x: `[M, H]`, float32, float16 or bfloat16.
        weight: `[V, H]`, of the dtype of x.
        targets: `[M]`, int64 or int32, from 0 to V - 1 or `ignore_index`. On a GPU a target out of
            range makes the loss and the gradients NaN, because no check waits for it.
        bias: `[V]`, of the dtype of x, or None.
        ignore_index: rows with this target have no loss and no gradient.
        label_smoothing: share of the loss, from 0 to 1, that all V classes divide evenly.
        z_loss: factor of the squared log-sum-exp that is added to each loss.
        reduction: "mean" over the rows that are not ignored (NaN without any) or "sum".

    Returns:
        A scalar in the dtype of x. In float16 a sum above 65504 is infinite, as in PyTorch. It is
        differentiable once, in x, weight and bias.

    Raises:
        TypeError: an argument has another kind or dtype, or weight or bias another dtype than x.
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
    reductions = shared.REDUCTIONS[:2]
    options = shared.options_of(ignore_index, label_smoothing, z_loss, reduction, reductions)
    if x.dim() != 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected two dimensions")
    check_floating(x=x)
    check_no_tangent(x=x, weight=weight, bias=bias)
    given = {"x": x, "weight": weight, **({} if bias is None else {"bias": bias})}
    check_same_dtype(**given)
    check_same_device(**given, targets=targets)
    m, h = x.shape
    if weight.dim() != 2 or weight.shape[1] != h:
        raise ValueError(f"weight: shape {tuple(weight.shape)}, expected (V, {h})")
    v = weight.shape[0]
    shared.check(targets, m, v, ignore_index)
    if bias is not None:
        check_shape("bias", bias, (v,))
    x, weight, targets = as_rows_2d(as_read(x)), as_read(weight), targets.contiguous()
    bias = bias if bias is None else as_read(bias).contiguous()
    if needs_grad(x, weight, bias):
        return _LinearCrossEntropy.apply(x, weight, targets, bias, *options)
    return linear_cross_entropy_fwd(x, weight, targets, bias, *options, (False,) * 3)[0]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, bias, *options):
        wanted = x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad
        loss, *sums = linear_cross_entropy_fwd(x, weight, targets, bias, *options, wanted)
        # Autograd checks the saved loss in the place of the inputs, which are not saved.
        ctx.save_for_backward(*sums, loss)
        ctx.unseen = shared.alone()
        return loss

    @staticmethod
    @once
    def backward(ctx, dloss):
        *sums, n_valid, _ = ctx.saved_tensors
        # The gradients have the dtype of the inputs, which is that of the loss.
        as_wanted = {"unseen": ctx.unseen, "dtype": dloss.dtype}
        dx, dw, db = (
            d if d is None else shared.scaled(d, dloss, n_valid, **as_wanted) for d in sums
        )
        return dx, dw, None, db, None, None, None, None


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
    """Return the loss, the gradients of x, weight and bias, and a count or None.

    x: [M, H]. weight: [V, H]. targets: [M], contiguous. bias: [V] or None. wanted: whether the
    gradients of x, weight and bias are; another gradient is None. The loss has the dtype of x.
    If there is a count, the gradients are still to be divided by it, and dw is float32.
    """
    (m, h), v = x.shape, weight.shape[0]
    kind = {"dtype": x.dtype, "device": x.device}
    losses = torch.empty(m, dtype=torch.float32, device=x.device)
    n_valid = shared.count_valid(targets, ignore_index) if reduction == "mean" else None
    later = n_valid if any(wanted) and shared.defers_mean(x.dtype, reduction) else None
    dx = torch.empty((m, h), **kind) if wanted[0] else None
    sums = {**kind, "dtype": x.dtype if later is None else torch.float32}
    dw = (torch.empty if m else torch.zeros)((v, h), **sums) if wanted[1] else None
    db = torch.zeros(v, dtype=torch.float32, device=x.device) if wanted[2] else None
    if not any(wanted) and tiled.suited(x, weight):
        options = ignore_index, smoothing, z_loss
        tiled.write_losses(losses, x, weight, targets, bias, *options)
        return shared.reduced(losses, n_valid, x.dtype), None, None, None, None
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
            None if later is not None else n_valid,
            ignore_index, smoothing, z_loss, any(wanted),
        )  # fmt: skip
        if dx is not None:
            torch.mm(logits, weight, out=dx[first : first + step])
        if dw is not None:
            _add_product(dw, logits.T, part, first > 0)
        if db is not None:
            db += logits.sum(0, dtype=torch.float32)
    return shared.reduced(losses, n_valid, x.dtype), dx, dw, db, later


def _rows_of_chunk(m: int, row_bytes: int) -> int:
    """Return the rows of each chunk but the last, for logits of row_bytes a row."""
    chunks = -(-m // max(LEAST_ROWS, BUFFER_BYTES // row_bytes, -(-m // MOST_CHUNKS)))
    return max(1, -(-m // (max(1, chunks) * ROW_STEP))) * ROW_STEP


def _finish(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    n_valid: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    wants_gradient: bool,
) -> None:
    """Write the loss of each row and, if wanted, overwrite the logits with their gradient."""
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
        num_looped, config = shared.chunk_split(**key, config=CHUNK.pick(logits.device, **key))
        _chunk_kernel[(m,)](
            logits_ptr=logits, targets_ptr=targets, losses_ptr=losses,
            n_valid_ptr=n_valid, V=v, num_looped=num_looped, ignore_index=ignore_index,
            smoothing=smoothing, z_loss=z_loss, SMOOTH=smooth, **config,
        )  # fmt: skip


def _add_product(dw: torch.Tensor, a: torch.Tensor, b: torch.Tensor, further: bool) -> None:
    """Write dw = a b, or dw + a b if `further`, accumulated in float32 and stored in dw's dtype."""
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
    """Return whether a trial may run now: a captured graph may not wait for its result."""
    if torch.compiler.is_compiling() or not a.is_cuda:
        return False
    return not torch.cuda.is_current_stream_capturing()


@functools.cache
def _multiplies_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether PyTorch writes and adds products of this dtype in float32 without a copy.

    Its version and its backend decide.
    """
    a = torch.full((16, 16), 256.0, dtype=dtype, device=device)
    out = torch.full((16, 16), torch.nan, dtype=torch.float32, device=device)
    try:
        torch.mm(a, a, out_dtype=out.dtype, out=out)
        torch.addmm(out, a, a, out_dtype=out.dtype, out=out)
    except (RuntimeError, TypeError):
        return False
    return bool((out == 2 * 16 * 256.0**2).all())


@triton.jit
def _loss_kernel(
    logits_ptr, targets_ptr, losses_ptr, V, ignore_index, smoothing, z_loss,
    SMOOTH: tl.constexpr, UNROLL: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """losses[r] = lse - (1 - e) x[t] - e mean x + z lse^2, for row x of logits with target t.

    Grid: one program a row. Reads logits [M, V], contiguous, and targets [M]; writes losses float32
    [M]. SMOOTH: smoothing > 0. UNROLL blocks of BLOCK_V columns a step, both powers of two.
    """
    # A traced graph hands floats over as float64.
    smoothing, z_loss = tl.cast(smoothing, tl.float32), tl.cast(z_loss, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    target = tl.load(targets_ptr + row)
    loss = 0.0
    if target != ignore_index:
        x_target, _ = target_logit(row_ptr, target, V)
        m, l, sum_x = loop_row(row_ptr, V, SMOOTH, UNROLL, BLOCK_V)
        loss, _ = row_loss(x_target, m, l, sum_x, V, smoothing, z_loss, SMOOTH)
    tl.store(losses_ptr + row, loss)


@triton.jit
def _chunk_kernel(
    logits_ptr, targets_ptr, losses_ptr, n_valid_ptr,
    V, num_looped, ignore_index, smoothing, z_loss, SMOOTH: tl.constexpr, LOOPS: tl.constexpr,
    REG_CHUNKS: tl.constexpr, PREFETCH: tl.constexpr,
    LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Losses, and over the logits (p (1 + 2 z lse) - e / V - (1 - e) [j = t]) / n_valid.

    Grid: one program a row. Reads logits [M, V], contiguous, targets [M] and, unless n_valid_ptr is
    None, n_valid; writes losses float32 [M] and the gradient over the logits.
    SMOOTH: smoothing > 0. Chunks of LANES times VEC logits, LANES = 32 num_warps: num_looped times
    PREFETCH chunks and REG_CHUNKS more cover the row. LOOPS: num_looped > 0.
    """
    smoothing, z_loss = tl.cast(smoothing, tl.float32), tl.cast(z_loss, tl.float32)
    scale = 1.0
    if n_valid_ptr is not None:
        scale /= tl.load(n_valid_ptr)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    gradient_of_row(
        row_ptr, row_ptr, losses_ptr + row, tl.load(targets_ptr + row), V, num_looped,
        ignore_index, smoothing, z_loss, scale, SMOOTH, LOOPS, REG_CHUNKS, PREFETCH, LANES, VEC,
    )  # fmt: skip


LOSS = Configs(_loss_kernel, LOOP_CONFIGS, choose_loop)
CHUNK = Configs(_chunk_kernel, ROW_CONFIGS, choose_row, suits_row)
TILES, HOPPER_TILES = tiled.TILES, tiled.HOPPER_TILES

# The products are PyTorch's, so only what follows them can be cached.
linear_cross_entropy_fwd = guarded(linear_cross_entropy_fwd)
_finish = cached_launch(_finish)

"""Losses of rows become one number, and a gradient that was made for a loss of one is scaled.

Both cross entropies compute the gradient in the forward pass, for a gradient of one of the loss.
The backward pass multiplies it by the one that came. A mean is over the targets that are not
ignored. Sums have a fixed order.
"""

import torch
import triton
import triton.language as tl

from .._runtime import internals
from .._runtime.call_cache import cached_launch
from .._runtime.device import sm_count

# Programs per multiprocessor of the kernel that scales a gradient by one factor.
SCALERS = 4
# Entries that a program scales at a time.
SCALED = 4096


def count_valid(targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return the number of targets that are not ignored: a float32 scalar on their device."""
    count = targets.new_empty((), dtype=torch.float32)
    _count_kernel[(1,)](
        targets_ptr=targets, n_valid_ptr=count, M=targets.numel(),
        ignore_index=ignore_index, BLOCK_M=8192, num_warps=16,
    )  # fmt: skip
    return count


def reduced(losses: torch.Tensor, count: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of float32 losses in a fixed order, over the count if there is one."""
    out = torch.empty((), dtype=dtype, device=losses.device)
    _reduce_kernel[(1,)](
        losses_ptr=losses, out_ptr=out, n_valid_ptr=count, M=losses.numel(),
        BLOCK_M=8192, num_warps=16,
    )  # fmt: skip
    return out


def reduced_penalty(
    penalties: torch.Tensor | None,
    targets: torch.Tensor,
    ignore_index: int,
    reduction: str,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Return the z-losses [M] of rows, reduced as the losses are; None stays."""
    if penalties is None or reduction == "none":
        return penalties
    count = count_valid(targets, ignore_index) if reduction == "mean" else None
    return reduced(penalties, count, dtype)


def defers_mean(dtype: torch.dtype, reduction: str) -> bool:
    """Return whether the division by the count waits for the backward pass.

    In float16 the gradient of a mean could underflow before loss scaling multiplies it.
    """
    return reduction == "mean" and dtype == torch.float16


def alone() -> bool:
    """Return whether only the graph will see the tensors that it saves from now on.

    Ask while the graph is made: hooks for saved tensors may hand them to other code.
    """
    return not (torch.compiler.is_compiling() or internals.saved_tensors_are_seen())


def scaled(
    x: torch.Tensor,
    factor: torch.Tensor,
    count: torch.Tensor | None = None,
    *,
    unseen: bool,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return x times the gradient of the loss, over the count if there is one.

    x is scaled in place if only the graph sees it and the graph is not used again; a factor of one
    then costs nothing. Otherwise the result is a new tensor.

    x: contiguous. factor: a scalar, or one number for each row. unseen: the result of `alone` when
    x was saved. dtype: that of the result, by default that of x.
    """
    dtype = x.dtype if dtype is None else dtype
    # A kept graph needs x unchanged; a traced graph cannot tell whether it is kept.
    once = unseen and dtype == x.dtype and not torch.compiler.is_compiling()
    return _scaled(x, factor, count, dtype, not once or internals.graph_is_kept())


def scale_rows(x: torch.Tensor, factors: torch.Tensor) -> None:
    """Multiply each row of x [M, V], contiguous, by its factor of [M], in place."""
    _scaled(x, factors, None, x.dtype, False)


def _scaled(
    x: torch.Tensor,
    factor: torch.Tensor,
    count: torch.Tensor | None,
    dtype: torch.dtype,
    again: bool,
) -> torch.Tensor:
    out, n = x.new_empty(x.shape, dtype=dtype) if again else x, x.numel()
    if n:
        if factor.dim():
            rows, length = x.shape
        else:
            length = -(-n // (SCALERS * sm_count(x.device) * SCALED)) * SCALED
            rows = -(-n // length)
        _scale_kernel[(rows,)](
            x_ptr=x if again else None, out_ptr=out, factor_ptr=factor,
            stride_factor=factor.stride(0) if factor.dim() else 0, n_valid_ptr=count, N=n,
            length=length, IN_PLACE=not again, BLOCK_N=SCALED, num_warps=8,
        )  # fmt: skip
    return out


@triton.jit
def count_valid_targets(targets_ptr, M, ignore_index, BLOCK_M: tl.constexpr):
    """The number of targets that are not ignored, float32."""
    n_valid = tl.zeros((BLOCK_M,), tl.int32)
    for start in range(0, M, BLOCK_M):
        offs = start + tl.arange(0, BLOCK_M)
        targets = tl.load(targets_ptr + offs, mask=offs < M, other=ignore_index)
        n_valid += (targets != ignore_index).to(tl.int32)
    return tl.sum(n_valid, 0).to(tl.float32)


@triton.jit
def sum_losses(losses_ptr, M, BLOCK_M: tl.constexpr):
    """The sum of M float32 losses, in a fixed order."""
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, M, BLOCK_M):
        offs = start + tl.arange(0, BLOCK_M)
        total += tl.load(losses_ptr + offs, mask=offs < M, other=0.0, volatile=True)
    return tl.sum(total, 0)


@triton.jit
def _count_kernel(targets_ptr, n_valid_ptr, M, ignore_index, BLOCK_M: tl.constexpr):
    """n_valid = number of targets other than ignore_index.

    Grid: one program. Reads targets [M], contiguous; writes n_valid, a float32 scalar. BLOCK_M:
    targets a step, a power of two.
    """
    tl.store(n_valid_ptr, count_valid_targets(targets_ptr, M, ignore_index, BLOCK_M))


@triton.jit
def _reduce_kernel(losses_ptr, out_ptr, n_valid_ptr, M, BLOCK_M: tl.constexpr):
    """out = sum(losses), divided by n_valid if there is one.

    Grid: one program, so the order of the sum is fixed. Reads losses float32 [M]; writes the scalar
    out. BLOCK_M: losses a step, a power of two.
    """
    loss = sum_losses(losses_ptr, M, BLOCK_M)
    if n_valid_ptr is not None:
        loss = loss / tl.load(n_valid_ptr)
    tl.store(out_ptr, loss.to(out_ptr.dtype.element_ty))


@triton.jit
def _scale_kernel(
    x_ptr, out_ptr, factor_ptr, stride_factor, n_valid_ptr, N, length,
    IN_PLACE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = x * factor, over n_valid if there is one.

    Grid: one program for `length` elements of x, N in all. A factor per row has a program per row
    and `length` = V; a scalar has stride_factor 0. IN_PLACE: x lies in out, x_ptr is None, and a
    factor of one reads and writes nothing. BLOCK_N: elements a step, a power of two.
    """
    if IN_PLACE:
        x_ptr = out_ptr
    program = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr + program * stride_factor).to(tl.float32)
    if n_valid_ptr is not None:
        # The gradient of a mean over no rows is zero, not NaN.
        factor = factor / tl.maximum(tl.load(n_valid_ptr), 1.0)
    if not IN_PLACE or factor != 1.0:
        first = program * length
        for start in range(0, tl.minimum(length, N - first), BLOCK_N):
            offs = start + tl.arange(0, BLOCK_N)
            mask = (offs < length) & (first + offs < N)
            x = tl.load(x_ptr + first + offs, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_ptr + first + offs, (x * factor).to(out_ptr.dtype.element_ty), mask=mask)


_scaled = cached_launch(_scaled)
count_valid = cached_launch(count_valid)
reduced = cached_launch(reduced)

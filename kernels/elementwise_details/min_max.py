"""maximum and minimum, whose gradients follow from two bits an element.

The input that was taken gets the gradient, each of two equals gets half of it, and both get all of
it if either is NaN, as in PyTorch. Two flags tell these apart: x lies beyond y or cannot be
compared with it, and y beyond x likewise. Neither is set for equals; both are set for NaN. If a
backward pass may follow, the forward pass packs the flags, eight elements in 16 bits. The backward
pass reads them instead of x and y, which are not kept.
"""

import torch
import triton
import triton.language as tl

from .._runtime.call_cache import cached_launch
from .._runtime.checks import check_floating_pair
from .._runtime.configs import Configs
from .blocks import (
    WORD,
    block_is_full,
    block_offsets,
    length,
    packed,
    store_once,
    tiles,
    unpacked,
    word_offsets,
    words_of,
)


def min_max_fwd(
    configs: Configs, op: str, x: torch.Tensor, y: torch.Tensor, save_flags: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the result of "maximum" or "minimum", and the flags that `min_max_bwd` reads.

    The flags are int16, a word for each eight elements, or None unless `save_flags`. Raise
    TypeError or ValueError if x and y differ in dtype, shape or device.
    """
    check_floating_pair(x, y)
    x, y = x.contiguous(), y.contiguous()
    out, n = torch.empty_like(x), x.numel()
    flags = x.new_empty(words_of(n), dtype=torch.int16) if save_flags else None
    if n:
        config = configs.pick(x.device, n=n, itemsize=x.element_size(), save_flags=save_flags)
        _min_max_kernel[(-(-n // config["BLOCK_N"]),)](
            x_ptr=x, y_ptr=y, out_ptr=out, flags_ptr=flags, N=length(n, config), OP=op, **config,
        )  # fmt: skip
    return out, flags


def min_max_bwd(
    configs: Configs, flags: torch.Tensor, grad: torch.Tensor, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return dx and dy, each None if it is not wanted."""
    grad = grad.contiguous()
    dx = torch.empty_like(grad) if wanted[0] else None
    dy = torch.empty_like(grad) if wanted[1] else None
    n = grad.numel()
    if n:
        config = configs.pick(grad.device, n=n, itemsize=grad.element_size())
        _min_max_backward_kernel[(-(-n // config["BLOCK_N"]),)](
            flags_ptr=flags, grad_ptr=grad, dx_ptr=dx, dy_ptr=dy, N=length(n, config), **config,
        )  # fmt: skip
    return dx, dy


@triton.jit
def _min_max_kernel(
    x_ptr, y_ptr, out_ptr, flags_ptr, N, OP: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """out = max(x, y) or min(x, y), and two flags an element.

    Grid: cdiv(n, BLOCK_N) for n elements. A program owns BLOCK_N elements. It reads x and y, and
    writes out and, unless flags_ptr is None, a word of flags for each eight elements. N: n, or None
    if BLOCK_N divides n. OP: "maximum" or "minimum". BLOCK_N: a power of two, at least eight.
    """
    if N is None or block_is_full(N, BLOCK_N):
        _forward_block(x_ptr, y_ptr, out_ptr, flags_ptr, N, True, OP, BLOCK_N)
    else:
        _forward_block(x_ptr, y_ptr, out_ptr, flags_ptr, N, False, OP, BLOCK_N)


@triton.jit
def _forward_block(
    x_ptr, y_ptr, out_ptr, flags_ptr, N,
    FULL: tl.constexpr, OP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute and store a block of the result and of the flags."""
    offs = block_offsets(BLOCK_N)
    mask = None if FULL else offs < N
    x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=mask).to(tl.float32)
    if OP == "maximum":
        out = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
        x_beyond, y_beyond = (x <= y) == 0, (y <= x) == 0
    else:
        out = tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
        x_beyond, y_beyond = (x >= y) == 0, (y >= x) == 0
    store_once(out_ptr + offs, out, mask)
    if flags_ptr is not None:
        words = word_offsets(BLOCK_N)
        flags = packed(x_beyond, BLOCK_N) | (packed(y_beyond, BLOCK_N) << WORD)
        tl.store(flags_ptr + words, flags.to(tl.int16), mask=None if FULL else words * WORD < N)


@triton.jit
def _min_max_backward_kernel(flags_ptr, grad_ptr, dx_ptr, dy_ptr, N, BLOCK_N: tl.constexpr):
    """dx and dy = g, g / 2 or 0, as the flags say.

    Grid: cdiv(n, BLOCK_N) for n elements. A program owns BLOCK_N elements. It reads their flags and
    g, and writes dx and dy; a pointer that is None is not written. N: n, or None if BLOCK_N divides
    n. BLOCK_N: a power of two, at least eight.
    """
    if N is None or block_is_full(N, BLOCK_N):
        _backward_block(flags_ptr, grad_ptr, dx_ptr, dy_ptr, N, True, BLOCK_N)
    else:
        _backward_block(flags_ptr, grad_ptr, dx_ptr, dy_ptr, N, False, BLOCK_N)


@triton.jit
def _backward_block(
    flags_ptr, grad_ptr, dx_ptr, dy_ptr, N, FULL: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Compute and store a block of the gradients."""
    offs, words = block_offsets(BLOCK_N), word_offsets(BLOCK_N)
    mask = None if FULL else offs < N
    flags = tl.load(flags_ptr + words, mask=None if FULL else words * WORD < N)
    grad = tl.load(grad_ptr + offs, mask=mask).to(tl.float32)
    x_beyond, y_beyond = unpacked(flags, BLOCK_N), unpacked(flags >> WORD, BLOCK_N)
    if dx_ptr is not None:
        dx = tl.where(x_beyond, grad, tl.where(y_beyond, 0.0, 0.5 * grad))
        store_once(dx_ptr + offs, dx, mask)
    if dy_ptr is not None:
        dy = tl.where(y_beyond, grad, tl.where(x_beyond, 0.0, 0.5 * grad))
        store_once(dy_ptr + offs, dy, mask)


def min_max_configs(family: str) -> tuple[Configs, Configs]:
    """Return the `Configs` of the forward and the backward pass; family: stem of a kernel file."""
    return tiles(_min_max_kernel, family), tiles(_min_max_backward_kernel, family)


min_max_fwd = cached_launch(min_max_fwd)
min_max_bwd = cached_launch(min_max_bwd)

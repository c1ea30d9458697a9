"""relu and leaky_relu, whose derivatives have two values.

A bit an element records the value. If a backward pass may follow, the forward pass writes the bits,
eight elements in a byte, and the backward pass reads them and the gradient. Neither the input nor
the result is kept.
"""

import torch
import triton
import triton.language as tl

from .._runtime.call_cache import cached_launch
from .._runtime.checks import check_floating
from .._runtime.configs import Configs
from .blocks import (
    WORD,
    block_is_full,
    block_offsets,
    length,
    map_tiles,
    packed,
    store_by,
    store_once,
    tiles,
    unpacked,
    word_offsets,
    words_of,
)


def rectifier_fwd(
    configs: Configs, op: str, x: torch.Tensor, slope: float, save_flags: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the result of "relu" or "leaky_relu", and the flags that `rectifier_bwd` reads.

    The flags are uint8, a word for each eight elements, or None unless `save_flags`. Raise
    TypeError if x is not floating.
    """
    check_floating(x=x)
    x = x.contiguous()
    y, n = torch.empty_like(x), x.numel()
    flags = x.new_empty(words_of(n), dtype=torch.uint8) if save_flags else None
    if n:
        config, policy = map_tiles(configs, x, light=not save_flags)
        _rectify_kernel[(-(-n // config["BLOCK_N"]),)](
            x_ptr=x, y_ptr=y, flags_ptr=flags, N=length(n, config), slope=slope, OP=op,
            POLICY=policy, **config,
        )  # fmt: skip
    return y, flags


def rectifier_bwd(
    configs: Configs, op: str, flags: torch.Tensor, grad: torch.Tensor, slope: float
) -> torch.Tensor:
    """Return the gradient of the input; grad: that of the result."""
    grad = grad.contiguous()
    dx, n = torch.empty_like(grad), grad.numel()
    if n:
        config = configs.pick(grad.device, n=n, itemsize=grad.element_size())
        _rectify_backward_kernel[(-(-n // config["BLOCK_N"]),)](
            flags_ptr=flags, grad_ptr=grad, dx_ptr=dx, N=length(n, config), slope=slope, OP=op,
            **config,
        )  # fmt: skip
    return dx


@triton.jit
def _rectify_kernel(
    x_ptr, y_ptr, flags_ptr, N, slope,
    OP: tl.constexpr, POLICY: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = max(x, 0) (OP "relu"), or x if x > 0, else slope x ("leaky_relu"); and a flag an element.

    Grid: cdiv(n, BLOCK_N) for n elements. A program owns BLOCK_N elements. It reads x, and writes y
    and, unless flags_ptr is None, a byte of flags for each eight elements. N: n, or None if BLOCK_N
    divides n. POLICY: cache modifier of the stores. BLOCK_N: a power of two, at least eight.
    """
    if N is None or block_is_full(N, BLOCK_N):
        _forward_block(x_ptr, y_ptr, flags_ptr, N, slope, True, OP, POLICY, BLOCK_N)
    else:
        _forward_block(x_ptr, y_ptr, flags_ptr, N, slope, False, OP, POLICY, BLOCK_N)


@triton.jit
def _forward_block(
    x_ptr, y_ptr, flags_ptr, N, slope,
    FULL: tl.constexpr, OP: tl.constexpr, POLICY: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute and store a block of the result and of the flags."""
    offs = block_offsets(BLOCK_N)
    mask = None if FULL else offs < N
    x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)
    # At NaN, relu passes the gradient on and leaky_relu slope times it, as in PyTorch.
    passes = (x <= 0) == 0 if OP == "relu" else x > 0
    if OP == "relu":
        # Minus zero stays minus zero.
        y = tl.where(x < 0, 0.0, x)
    else:
        # A traced graph passes floats as float64.
        y = tl.where(passes, x, tl.cast(slope, tl.float32) * x)
    store_by(y_ptr + offs, y, mask, POLICY)
    if flags_ptr is not None:
        words = word_offsets(BLOCK_N)
        flags = packed(passes, BLOCK_N).to(tl.uint8)
        tl.store(flags_ptr + words, flags, mask=None if FULL else words * WORD < N)


@triton.jit
def _rectify_backward_kernel(
    flags_ptr, grad_ptr, dx_ptr, N, slope, OP: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """dx = g if the flag is set, else 0 (OP "relu") or slope g ("leaky_relu").

    Grid: cdiv(n, BLOCK_N) for n elements. A program owns BLOCK_N elements. It reads their flags and
    g, and writes dx. N: n, or None if BLOCK_N divides n. BLOCK_N: a power of two, at least eight.
    """
    if N is None or block_is_full(N, BLOCK_N):
        _backward_block(flags_ptr, grad_ptr, dx_ptr, N, slope, True, OP, BLOCK_N)
    else:
        _backward_block(flags_ptr, grad_ptr, dx_ptr, N, slope, False, OP, BLOCK_N)


@triton.jit
def _backward_block(
    flags_ptr, grad_ptr, dx_ptr, N, slope,
    FULL: tl.constexpr, OP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute and store a block of the gradient."""
    offs, words = block_offsets(BLOCK_N), word_offsets(BLOCK_N)
    mask = None if FULL else offs < N
    flags = tl.load(flags_ptr + words, mask=None if FULL else words * WORD < N)
    grad = tl.load(grad_ptr + offs, mask=mask).to(tl.float32)
    # Zero times an infinite gradient would be NaN.
    below = 0.0 if OP == "relu" else tl.cast(slope, tl.float32) * grad
    store_once(dx_ptr + offs, tl.where(unpacked(flags, BLOCK_N), grad, below), mask)


def rectifier_configs(family: str) -> tuple[Configs, Configs]:
    """Return the `Configs` of the forward and the backward pass; family: stem of a kernel file."""
    return tiles(_rectify_kernel, family), tiles(_rectify_backward_kernel, family)


rectifier_fwd = cached_launch(rectifier_fwd)
rectifier_bwd = cached_launch(rectifier_bwd)

"""relu and leaky_relu, whose derivatives have two values.

A bit an element says which value, so where a backward pass may follow the forward pass writes the
bits, eight elements in a byte, and the backward pass reads them beside the gradient. Neither the
input nor the result is kept.
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


@triton.jit
def _forward_block(
    x_ptr, y_ptr, flags_ptr, N, slope,
    FULL: tl.constexpr, OP: tl.constexpr, POLICY: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs = block_offsets(BLOCK_N)
    mask = None if FULL else offs < N
    x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)
    # Of NaN relu hands all of the gradient on and leaky_relu the slope's share, as in PyTorch.
    passes = (x <= 0) == 0 if OP == "relu" else x > 0
    if OP == "relu":
        # Minus zero stays what it is.
        y = tl.where(x < 0, 0.0, x)
    else:
        # A traced graph hands floats over as float64.
        y = tl.where(passes, x, tl.cast(slope, tl.float32) * x)
    store_by(y_ptr + offs, y, mask, POLICY)
    if flags_ptr is not None:
        words = word_offsets(BLOCK_N)
        flags = packed(passes, BLOCK_N).to(tl.uint8)
        tl.store(flags_ptr + words, flags, mask=None if FULL else words * WORD < N)


@triton.jit
def _rectify_kernel(
    x_ptr, y_ptr, flags_ptr, N, slope,
    OP: tl.constexpr, POLICY: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if N is None or block_is_full(N, BLOCK_N):
        _forward_block(x_ptr, y_ptr, flags_ptr, N, slope, True, OP, POLICY, BLOCK_N)
    else:
        _forward_block(x_ptr, y_ptr, flags_ptr, N, slope, False, OP, POLICY, BLOCK_N)


@triton.jit
def _backward_block(
    flags_ptr, grad_ptr, dx_ptr, N, slope,
    FULL: tl.constexpr, OP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs, words = block_offsets(BLOCK_N), word_offsets(BLOCK_N)
    mask = None if FULL else offs < N
    flags = tl.load(flags_ptr + words, mask=None if FULL else words * WORD < N)
    grad = tl.load(grad_ptr + offs, mask=mask).to(tl.float32)
    # Zero times an infinite gradient would be NaN.
    below = 0.0 if OP == "relu" else tl.cast(slope, tl.float32) * grad
    store_once(dx_ptr + offs, tl.where(unpacked(flags, BLOCK_N), grad, below), mask)


@triton.jit
def _slope_kernel(
    flags_ptr, grad_ptr, dx_ptr, N, slope, OP: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    if N is None or block_is_full(N, BLOCK_N):
        _backward_block(flags_ptr, grad_ptr, dx_ptr, N, slope, True, OP, BLOCK_N)
    else:
        _backward_block(flags_ptr, grad_ptr, dx_ptr, N, slope, False, OP, BLOCK_N)


def rectifier_configs(family: str) -> tuple[Configs, Configs]:
    """Those of the forward and of the backward pass, of a kernel file by its stem."""
    return tiles(_rectify_kernel, family), tiles(_slope_kernel, family)


def rectifier_fwd(
    configs: Configs, op: str, x: torch.Tensor, slope: float, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result of "relu" or "leaky_relu", and the flags that `rectifier_bwd` asks for.

    flags: uint8, a word for each eight elements; None unless they are to be kept. TypeError where
    x is not floating.
    """
    check_floating(x=x)
    x = x.contiguous()
    y, n = torch.empty_like(x), x.numel()
    flags = x.new_empty(words_of(n), dtype=torch.uint8) if keep else None
    if n:
        config, policy = map_tiles(configs, x, light=not keep)
        _rectify_kernel[(-(-n // config["BLOCK_N"]),)](
            x_ptr=x, y_ptr=y, flags_ptr=flags, N=length(n, config), slope=slope, OP=op,
            POLICY=policy, **config,
        )  # fmt: skip
    return y, flags


def rectifier_bwd(
    configs: Configs, op: str, flags: torch.Tensor, grad: torch.Tensor, slope: float
) -> torch.Tensor:
    """The gradient of the input from that of the result."""
    grad = grad.contiguous()
    dx, n = torch.empty_like(grad), grad.numel()
    if n:
        config = configs.pick(grad.device, n=n, itemsize=grad.element_size())
        _slope_kernel[(-(-n // config["BLOCK_N"]),)](
            flags_ptr=flags, grad_ptr=grad, dx_ptr=dx, N=length(n, config), slope=slope, OP=op,
            **config,
        )  # fmt: skip
    return dx


rectifier_fwd = cached_launch(rectifier_fwd)
rectifier_bwd = cached_launch(rectifier_bwd)

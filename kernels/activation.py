"""Activation functions: relu, leaky_relu, gelu (by erf or by tanh), tanh, cosh.

relu: max(x, 0). leaky_relu: x where x > 0, else slope x. gelu: x Φ(x), Φ the normal distribution
function, or x sigmoid(2u), u = √(2/π) (x + 0.044715 x³), the form with tanh of Hendrycks and
Gimpel, "Gaussian Error Linear Units" (2016). tanh and cosh as they are. dx = f'(x) g, with g the
gradient of the result.

A backward pass reads g and one other tensor. That is y for tanh, whose derivative follows from y
alone, so that x can be freed; x for gelu and cosh. The derivatives of relu and leaky_relu have two
values, so their backward pass reads a bit an element beside g and keeps neither x nor y; the
forward pass writes the bits where a backward pass may follow. Memory decides only where few
instructions hide behind an element of 2 bytes, so in 16 bits exp is one exp2, and Φ is formula
7.1.26 of Abramowitz and Stegun's handbook (1964), an error below 1e-7: its exp(-x²/2) is also the
density that the derivative asks for. tanh is (1 - t) / (1 + t) with t = exp(-2|x|), and near zero,
where that cancels, a polynomial. float32 has the library's erf, and reduces the argument of exp in
the way of Cody and Waite (1980), since the error of exp2 grows with its argument.
"""

import math

import torch
import triton
import triton.language as tl

from ._runtime.autograd import needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import check_floating, check_number, check_one_of
from ._triton.math import DENSITY, LOG2E, gelu_gate, gelu_gate_slope, normal, tanh_of
from .elementwise_details.blocks import block_is_full, block_offsets, length, store_once, tiles
from .elementwise_details.relu import rectifier_bwd, rectifier_configs, rectifier_fwd

# ln 2 in two parts; the first has so few bits that its product with an exponent is exact.
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(math.log(2) - 0.693359375)


@triton.jit
def _half_exp(x, PRECISE: tl.constexpr):
    """exp(x / 2)."""
    if PRECISE:
        half = 0.5 * x
        power = tl.floor(half * LOG2E + 0.5)
        rest = half - power * LN2_HIGH - power * LN2_LOW
        # Of an infinite half, infinity less infinity is not wanted.
        rest = tl.where(tl.abs(half) < 200.0, rest, half)
        return tl.exp2(rest * LOG2E) * tl.exp2(power)
    else:
        return tl.exp2(x * (0.5 * LOG2E))


@triton.jit
def _value(x, OP: tl.constexpr, PRECISE: tl.constexpr):
    if OP == "gelu":
        return x * normal(x, PRECISE)[0]
    elif OP == "gelu_tanh":
        return x * gelu_gate(x, PRECISE)
    elif OP == "tanh":
        return tanh_of(x, PRECISE)
    else:
        grown, shrunk = _half_exp(x, PRECISE), _half_exp(-x, PRECISE)
        # Half of a square, in an order in which nothing overflows before the result does.
        return 0.5 * grown * grown + 0.5 * shrunk * shrunk


@triton.jit
def _gradient(x, grad, OP: tl.constexpr, PRECISE: tl.constexpr):
    """The gradient with respect to x; of tanh, `x` is the result."""
    if OP == "gelu":
        below, bell = normal(x, PRECISE)
        return grad * (below + DENSITY * x * bell)
    elif OP == "gelu_tanh":
        return grad * gelu_gate_slope(x, gelu_gate(x, PRECISE))
    elif OP == "tanh":
        return grad * (1 - x * x)
    else:
        grown, shrunk = _half_exp(x, PRECISE), _half_exp(-x, PRECISE)
        # Of an infinite gradient each of two terms would be infinite, and their difference NaN.
        far = (grad * (grown - shrunk)) * (0.5 * (grown + shrunk))
        x2 = x * x
        near = x + x * x2 * (1 / 6 + x2 * (1 / 120 + x2 * (1 / 5040)))
        return tl.where(x2 < 0.25, grad * near, far)


@triton.jit
def _forward_block(x_ptr, y_ptr, offs, mask, OP: tl.constexpr):
    x = tl.load(x_ptr + offs, mask=mask)
    PRECISE: tl.constexpr = x.dtype == tl.float32
    store_once(y_ptr + offs, _value(x.to(tl.float32), OP, PRECISE), mask)


@triton.jit
def _forward_kernel(x_ptr, y_ptr, N, OP: tl.constexpr, BLOCK_N: tl.constexpr):
    offs = block_offsets(BLOCK_N)
    if N is None or block_is_full(N, BLOCK_N):
        _forward_block(x_ptr, y_ptr, offs, None, OP)
    else:
        _forward_block(x_ptr, y_ptr, offs, offs < N, OP)


@triton.jit
def _backward_block(x_ptr, grad_ptr, dx_ptr, offs, mask, OP: tl.constexpr):
    x = tl.load(x_ptr + offs, mask=mask)
    grad = tl.load(grad_ptr + offs, mask=mask).to(tl.float32)
    PRECISE: tl.constexpr = x.dtype == tl.float32
    store_once(dx_ptr + offs, _gradient(x.to(tl.float32), grad, OP, PRECISE), mask)


@triton.jit
def _backward_kernel(x_ptr, grad_ptr, dx_ptr, N, OP: tl.constexpr, BLOCK_N: tl.constexpr):
    offs = block_offsets(BLOCK_N)
    if N is None or block_is_full(N, BLOCK_N):
        _backward_block(x_ptr, grad_ptr, dx_ptr, offs, None, OP)
    else:
        _backward_block(x_ptr, grad_ptr, dx_ptr, offs, offs < N, OP)


FORWARD = tiles(_forward_kernel)
BACKWARD = tiles(_backward_kernel)
RECTIFY, SLOPE = rectifier_configs("activation")


def activation_fwd(op: str, x: torch.Tensor) -> torch.Tensor:
    """The activation of each element; TypeError where x is not floating."""
    check_floating(x=x)
    x = x.contiguous()
    y, n = torch.empty_like(x), x.numel()
    if n:
        config = FORWARD.pick(x.device, n=n, itemsize=x.element_size(), op=op)
        _forward_kernel[(-(-n // config["BLOCK_N"]),)](
            x_ptr=x, y_ptr=y, N=length(n, config), OP=op, **config,
        )  # fmt: skip
    return y


def activation_bwd(op: str, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """x: the input, of tanh the result; grad: that of the result."""
    x, grad = x.contiguous(), grad.contiguous()
    dx, n = torch.empty_like(x), x.numel()
    if n:
        config = BACKWARD.pick(x.device, n=n, itemsize=x.element_size(), op=op)
        _backward_kernel[(-(-n // config["BLOCK_N"]),)](
            x_ptr=x, grad_ptr=grad, dx_ptr=dx, N=length(n, config), OP=op, **config,
        )  # fmt: skip
    return dx


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, op):
        y = activation_fwd(op, x)
        ctx.op = op
        ctx.save_for_backward(y if op == "tanh" else x)
        return y

    @staticmethod
    @once
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        return activation_bwd(ctx.op, saved, grad), None


class _Rectifier(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, op, slope):
        y, flags = rectifier_fwd(RECTIFY, op, x, slope, keep=True)
        ctx.op, ctx.slope = op, slope
        ctx.save_for_backward(flags)
        return y

    @staticmethod
    @once
    def backward(ctx, grad):
        (flags,) = ctx.saved_tensors
        return rectifier_bwd(SLOPE, ctx.op, flags, grad, ctx.slope), None, None


def _rectifier(op: str, x: torch.Tensor, slope: float) -> torch.Tensor:
    if needs_grad(x):
        return _Rectifier.apply(x, op, slope)
    return rectifier_fwd(RECTIFY, op, x, slope, False)[0]


def relu(x: torch.Tensor) -> torch.Tensor:
    """The greater of x and zero, element by element.

    x: any shape; float32, float16 or bfloat16, else TypeError. Returns the shape and dtype of x.
    Differentiable once, with gradient zero at zero; so are the other activations.
    """
    return _rectifier("relu", x, 0.0)


def leaky_relu(x: torch.Tensor, negative_slope: float) -> torch.Tensor:
    """x where it is positive, else negative_slope times x; x as `relu` takes it.

    TypeError where negative_slope is no number.
    """
    return _rectifier("leaky_relu", x, check_number("negative_slope", negative_slope))


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x times the normal distribution function of x; x as `relu` takes it.

    approximate: "none", or "tanh" for the form with tanh; else ValueError.
    """
    check_one_of("approximate", approximate, ("none", "tanh"))
    op = "gelu_tanh" if approximate == "tanh" else "gelu"
    return _Activation.apply(x, op) if needs_grad(x) else activation_fwd(op, x)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """The hyperbolic tangent of each element; x as `relu` takes it."""
    return _Activation.apply(x, "tanh") if needs_grad(x) else activation_fwd("tanh", x)


def cosh(x: torch.Tensor) -> torch.Tensor:
    """The hyperbolic cosine of each element; x as `relu` takes it."""
    return _Activation.apply(x, "cosh") if needs_grad(x) else activation_fwd("cosh", x)


activation_fwd = cached_launch(activation_fwd)
activation_bwd = cached_launch(activation_bwd)

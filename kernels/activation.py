"""Activation functions: relu, leaky_relu, gelu (by erf or by tanh), tanh, cosh.

- relu: max(x, 0)
- leaky_relu: x if x > 0, else slope x
- gelu: x Φ(x), with the normal distribution function Φ; or x sigmoid(2u) in the form with tanh,
  u = √(2/π) (x + 0.044715 x³)
- backward: dx = f'(x) g, with g the gradient of the result

GELU is from Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016).

A backward pass reads g and one other tensor. That tensor is y for tanh, so that x can be freed, and
x for gelu and cosh. The derivatives of relu and leaky_relu have two values, so their backward pass
reads a bit an element and g (`elementwise_details/relu.py`).

Memory decides only if few instructions hide behind an element of 2 bytes. In 16 bits exp is
therefore one exp2, and Φ is formula 7.1.26 of Abramowitz and Stegun's handbook (1964), an error
below 1e-7. The exp(-x²/2) of that formula is also the density in the derivative. The form of tanh
is (1 - t) / (1 + t) with t = exp(-2|x|), and a polynomial near zero, where that cancels. Kernels of
float32 have the library's erf. They reduce the argument of exp as Cody and Waite (1980) do, because
the error of exp2 grows with its argument.
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


def relu(x: torch.Tensor) -> torch.Tensor:
    """Return the greater of x and zero, element by element.

    Args:
        x: any shape; float32, float16 or bfloat16.

    Returns:
        A new tensor with the shape and dtype of x. It is differentiable once in x. The gradient at
        zero is zero.

    Raises:
        TypeError: x is no tensor or has another dtype.
        ValueError: x is not on a GPU.

    Source:
        Nair and Hinton, "Rectified linear units improve restricted Boltzmann machines" (2010).

    Example:
        >>> x = torch.ones(2, 3, device="cuda")
        >>> relu(x).shape
        torch.Size([2, 3])
    """
    return _rectifier("relu", x, 0.0)


def leaky_relu(x: torch.Tensor, negative_slope: float) -> torch.Tensor:
    """Return x where x is positive, and negative_slope times x elsewhere.

    Args:
        x: any shape; float32, float16 or bfloat16.
        negative_slope: the factor of other elements, a real number.

    Returns:
        A new tensor with the shape and dtype of x. It is differentiable once in x.

    Raises:
        TypeError: x is no tensor or has another dtype, or negative_slope is no
            number.
        ValueError: x is not on a GPU.

    Source:
        Maas et al., "Rectifier nonlinearities improve neural network acoustic models" (2013).

    Example:
        >>> x = torch.ones(2, 3, device="cuda")
        >>> leaky_relu(x, 0.01).shape
        torch.Size([2, 3])
    """
    return _rectifier("leaky_relu", x, check_number("negative_slope", negative_slope))


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Return x times the normal distribution function of x.

    Args:
        x: any shape; float32, float16 or bfloat16.
        approximate: "none", or "tanh" for the form with tanh.

    Returns:
        A new tensor with the shape and dtype of x. It is differentiable once in x.

    Raises:
        TypeError: x is no tensor or has another dtype, or approximate is no
            string.
        ValueError: x is not on a GPU, or approximate is neither "none" nor "tanh".

    Source:
        Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016).

    Example:
        >>> x = torch.ones(2, 3, device="cuda")
        >>> gelu(x).shape
        torch.Size([2, 3])
    """
    check_one_of("approximate", approximate, ("none", "tanh"))
    op = "gelu_tanh" if approximate == "tanh" else "gelu"
    return _Activation.apply(x, op) if needs_grad(x) else activation_fwd(op, x)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Return the hyperbolic tangent of each element.

    Args:
        x: any shape; float32, float16 or bfloat16.

    Returns:
        A new tensor with the shape and dtype of x. It is differentiable once in x; the
        backward pass needs the result only.

    Raises:
        TypeError: x is no tensor or has another dtype.
        ValueError: x is not on a GPU.

    Source:
        The definition; see `torch.tanh`.

    Example:
        >>> x = torch.ones(2, 3, device="cuda")
        >>> tanh(x).shape
        torch.Size([2, 3])
    """
    return _Activation.apply(x, "tanh") if needs_grad(x) else activation_fwd("tanh", x)


def cosh(x: torch.Tensor) -> torch.Tensor:
    """Return the hyperbolic cosine of each element.

    Args:
        x: any shape; float32, float16 or bfloat16.

    Returns:
        A new tensor with the shape and dtype of x. It is differentiable once in x.

    Raises:
        TypeError: x is no tensor or has another dtype.
        ValueError: x is not on a GPU.

    Source:
        The definition; see `torch.cosh`.

    Example:
        >>> x = torch.ones(2, 3, device="cuda")
        >>> cosh(x).shape
        torch.Size([2, 3])
    """
    return _Activation.apply(x, "cosh") if needs_grad(x) else activation_fwd("cosh", x)


def _rectifier(op: str, x: torch.Tensor, slope: float) -> torch.Tensor:
    if needs_grad(x):
        return _Rectifier.apply(x, op, slope)
    return rectifier_fwd(RECTIFY, op, x, slope, False)[0]


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
        y, flags = rectifier_fwd(RECTIFY, op, x, slope, save_flags=True)
        ctx.op, ctx.slope = op, slope
        ctx.save_for_backward(flags)
        return y

    @staticmethod
    @once
    def backward(ctx, grad):
        (flags,) = ctx.saved_tensors
        return rectifier_bwd(RECTIFY_BACKWARD, ctx.op, flags, grad, ctx.slope), None, None


def activation_fwd(op: str, x: torch.Tensor) -> torch.Tensor:
    """Return the activation of each element; raise TypeError if x is not floating."""
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
    """Return the gradient of the input; x: the input, or the result if op is "tanh"."""
    x, grad = x.contiguous(), grad.contiguous()
    dx, n = torch.empty_like(x), x.numel()
    if n:
        config = BACKWARD.pick(x.device, n=n, itemsize=x.element_size(), op=op)
        _backward_kernel[(-(-n // config["BLOCK_N"]),)](
            x_ptr=x, grad_ptr=grad, dx_ptr=dx, N=length(n, config), OP=op, **config,
        )  # fmt: skip
    return dx


@triton.jit
def _forward_kernel(x_ptr, y_ptr, N, OP: tl.constexpr, BLOCK_N: tl.constexpr):
    """y = f(x), computed in float32; f: "gelu", "gelu_tanh", "tanh" or "cosh", as OP says.

    Grid: cdiv(n, BLOCK_N) for n elements. A program owns BLOCK_N elements; it reads x and writes y.
    N: n, or None if BLOCK_N divides n. BLOCK_N: a power of two.
    """
    offs = block_offsets(BLOCK_N)
    if N is None or block_is_full(N, BLOCK_N):
        _forward_block(x_ptr, y_ptr, offs, None, OP)
    else:
        _forward_block(x_ptr, y_ptr, offs, offs < N, OP)


@triton.jit
def _forward_block(x_ptr, y_ptr, offs, mask, OP: tl.constexpr):
    """Compute and store a block of the result."""
    x = tl.load(x_ptr + offs, mask=mask)
    PRECISE: tl.constexpr = x.dtype == tl.float32
    store_once(y_ptr + offs, _value(x.to(tl.float32), OP, PRECISE), mask)


@triton.jit
def _backward_kernel(x_ptr, grad_ptr, dx_ptr, N, OP: tl.constexpr, BLOCK_N: tl.constexpr):
    """dx = f'(x) g, computed in float32; f as in `_forward_kernel`.

    Grid: cdiv(n, BLOCK_N) for n elements. A program owns BLOCK_N elements; it reads x and g and
    writes dx. For "tanh", x_ptr points to the result. N: n, or None if BLOCK_N divides n. BLOCK_N:
    a power of two.
    """
    offs = block_offsets(BLOCK_N)
    if N is None or block_is_full(N, BLOCK_N):
        _backward_block(x_ptr, grad_ptr, dx_ptr, offs, None, OP)
    else:
        _backward_block(x_ptr, grad_ptr, dx_ptr, offs, offs < N, OP)


@triton.jit
def _backward_block(x_ptr, grad_ptr, dx_ptr, offs, mask, OP: tl.constexpr):
    """Compute and store a block of the gradient."""
    x = tl.load(x_ptr + offs, mask=mask)
    grad = tl.load(grad_ptr + offs, mask=mask).to(tl.float32)
    PRECISE: tl.constexpr = x.dtype == tl.float32
    store_once(dx_ptr + offs, _gradient(x.to(tl.float32), grad, OP, PRECISE), mask)


@triton.jit
def _value(x, OP: tl.constexpr, PRECISE: tl.constexpr):
    """Return the activation of x in float32."""
    if OP == "gelu":
        return x * normal(x, PRECISE)[0]
    elif OP == "gelu_tanh":
        return x * gelu_gate(x, PRECISE)
    elif OP == "tanh":
        return tanh_of(x, PRECISE)
    else:
        exp_plus, exp_minus = _half_exp(x, PRECISE), _half_exp(-x, PRECISE)
        # Multiplied in an order in which no factor overflows before the result does.
        return 0.5 * exp_plus * exp_plus + 0.5 * exp_minus * exp_minus


@triton.jit
def _gradient(x, grad, OP: tl.constexpr, PRECISE: tl.constexpr):
    """Return the gradient of the input; x: the input, or the result if OP is "tanh"."""
    if OP == "gelu":
        below, bell = normal(x, PRECISE)
        return grad * (below + DENSITY * x * bell)
    elif OP == "gelu_tanh":
        return grad * gelu_gate_slope(x, gelu_gate(x, PRECISE))
    elif OP == "tanh":
        return grad * (1 - x * x)
    else:
        exp_plus, exp_minus = _half_exp(x, PRECISE), _half_exp(-x, PRECISE)
        # Not grad * exp_plus - grad * exp_minus: both terms of an infinite gradient would be
        # infinite.
        far = (grad * (exp_plus - exp_minus)) * (0.5 * (exp_plus + exp_minus))
        x2 = x * x
        near = x + x * x2 * (1 / 6 + x2 * (1 / 120 + x2 * (1 / 5040)))
        return tl.where(x2 < 0.25, grad * near, far)


@triton.jit
def _half_exp(x, PRECISE: tl.constexpr):
    """Return exp(x / 2)."""
    if PRECISE:
        half = 0.5 * x
        power = tl.floor(half * LOG2E + 0.5)
        rest = half - power * LN2_HIGH - power * LN2_LOW
        # If half is infinite, the difference of infinities would be NaN.
        rest = tl.where(tl.abs(half) < 200.0, rest, half)
        return tl.exp2(rest * LOG2E) * tl.exp2(power)
    else:
        return tl.exp2(x * (0.5 * LOG2E))


# ln 2 in two parts; the first has so few bits that its product with an exponent is exact.
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(math.log(2) - 0.693359375)
FORWARD = tiles(_forward_kernel)
BACKWARD = tiles(_backward_kernel)
RECTIFY, RECTIFY_BACKWARD = rectifier_configs("activation")
activation_fwd = cached_launch(activation_fwd)
activation_bwd = cached_launch(activation_bwd)

"""Functions of one number in float32 that several kernels compute in registers.

PRECISE: the error shows in no float32 result; otherwise it shows in no result of 16 bits.
"""

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
SIGN = tl.constexpr(-(2**31))
DENSITY = tl.constexpr(1 / math.sqrt(2 * math.pi))
# 2 u log2(e) of gelu by tanh is x (GELU_1 + GELU_3 x²).
GELU_1 = tl.constexpr(2 * math.sqrt(2 / math.pi) * math.log2(math.e))
GELU_3 = tl.constexpr(2 * math.sqrt(2 / math.pi) * math.log2(math.e) * 0.044715)


@triton.jit
def reciprocal(x, PRECISE: tl.constexpr):
    """Return 1 / x for x of at least one."""
    if PRECISE:
        return 1 / x
    else:
        # One instruction and a product. A division also guards against numbers far from one.
        root = tl.rsqrt(x)
        return root * root


@triton.jit
def tanh_of(x, PRECISE: tl.constexpr):
    """Return tanh x, as tanh |x| with the sign of x; near zero by its series, as 1 - t cancels."""
    size = tl.abs(x)
    t = tl.exp2(size * (-2 * LOG2E))
    far = (1 - t) * reciprocal(1 + t, PRECISE)
    x2 = x * x
    near = size + size * x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835))))
    y = tl.where(x2 < 0.0625, near, far)
    # The sign is copied as a bit, because minus zero has one too.
    bits = y.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & SIGN)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def gelu_gate(x, PRECISE: tl.constexpr):
    """Return sigmoid(2u), u = sqrt(2 / π) (x + 0.044715 x³); gelu by tanh is x sigmoid(2u)."""
    return reciprocal(1 + tl.exp2(x * (-GELU_1 - GELU_3 * x * x)), PRECISE)


@triton.jit
def gelu_gate_slope(x, gate):
    """Return the derivative of gelu by tanh, which is x gate."""
    # The factor that vanishes comes first, because the square of a large x is infinite.
    bend = x * gate * (1 - gate)
    return gate + bend * (LN2 * GELU_1) + bend * x * x * (3 * LN2 * GELU_3)


@triton.jit
def normal(x, PRECISE: tl.constexpr):
    """Return Φ(x) and exp(-x²/2)."""
    bell = tl.exp2(x * x * (-0.5 * LOG2E))
    if PRECISE:
        return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476), bell
    else:
        # Abramowitz and Stegun (1964), 7.1.26: 0.3275911 / √2 and half of each coefficient.
        t = reciprocal(1 + 0.23164190 * tl.abs(x), PRECISE)
        series = -0.7265760135 + t * 0.5307027145
        series = 0.7107068705 + t * series
        series = -0.142248368 + t * series
        series = 0.127414796 + t * series
        beyond = t * series * bell
        return tl.where(x < 0, beyond, 1 - beyond), bell


@triton.jit
def gelu_of(x, PRECISE: tl.constexpr, BRIEF: tl.constexpr):
    """Return x Φ(x). BRIEF: the error shows in no bfloat16 result, if x is at least -4.

    Short: max(x, 0) - y Φ(-y), y = |x|, and Φ(-y) = 2^p(y). The polynomial p is fitted to the
    relative error of Φ(-y). That is 2.4e-4 for y up to 4 and 6.1e-3 up to 13.5. BRIEF, it is 1.3e-3
    and 0.13. The form takes one exponential, no reciprocal and no choice. Below -4 the result is
    smaller than 1.3e-4.
    """
    if PRECISE:
        return x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    else:
        # Φ(-16) is zero in float32. So gelu of infinity is not infinity less infinity times zero,
        # and that of minus infinity is NaN as in PyTorch.
        y = tl.abs(tl.minimum(x, 16.0, propagate_nan=tl.PropagateNan.ALL))
        if BRIEF:
            p = 0.00263814093 + y * -7.90628546e-05
            p = -0.0338463895 + y * p
            p = -0.490134627 + y * p
            p = -1.13297713 + y * p
            below = tl.exp2(-1.00170743 + y * p)
        else:
            p = 3.08788331e-05 + y * -6.25874748e-07
            p = -0.000631250849 + y * p
            p = 0.00711286487 + y * p
            p = -0.0507352762 + y * p
            p = -0.461930692 + y * p
            p = -1.14986503 + y * p
            below = tl.exp2(-1.0000875 + y * p)
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - y * below

"""Student's t distribution for degrees of freedom that need not be whole; NumPy and nothing else.

The tail is a regularised incomplete beta function, evaluated as its continued fraction (NIST
Digital Library of Mathematical Functions, 8.17.22) by Lentz's method.
"""

import math

import numpy as np

STEPS = 500
TINY = 1e-300
_log_gamma = np.vectorize(math.lgamma, otypes=[float])


def tail(t: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """P(T > t), with a relative error below 1e-9; t and freedom (> 0) broadcast."""
    t, freedom = np.broadcast_arrays(np.asarray(t, float), np.asarray(freedom, float))
    # Either form of the square ratio, so that neither end loses its digits or overflows.
    square = np.minimum(np.abs(t), 1e150) ** 2
    far, near = freedom / (freedom + square), square / (freedom + square)
    half = 0.5 * _incomplete_beta(freedom / 2, np.full_like(freedom, 0.5), far, near)
    half = np.where(np.isinf(t), 0.0, half)
    return np.where(t > 0, half, 1 - half)


def quantile(confidence: float, freedom: np.ndarray) -> np.ndarray:
    """The t that encloses, with -t, this share of the distribution; by bisection."""
    distinct, places = np.unique(np.asarray(freedom, float), return_inverse=True)
    low, high = np.zeros_like(distinct), np.full_like(distinct, 1e4)
    for _ in range(60):
        middle = (low + high) / 2
        outside = tail(middle, distinct) > (1 - confidence) / 2
        low, high = np.where(outside, middle, low), np.where(outside, high, middle)
    return ((low + high) / 2)[places].reshape(np.shape(freedom))


def _incomplete_beta(a: np.ndarray, b: np.ndarray, x: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """I_x(a, b), where rest = 1 - x."""
    swap = x > (a + 1) / (a + b + 2)
    a, b = np.where(swap, b, a), np.where(swap, a, b)
    x, rest = np.where(swap, rest, x), np.where(swap, x, rest)
    with np.errstate(divide="ignore"):
        front = a * np.log(x) + b * np.log(rest) - np.log(a)
    front += _log_gamma(a + b) - _log_gamma(a) - _log_gamma(b)
    value = np.exp(front) / _fraction(a, b, x)
    return np.where(swap, 1 - value, value)


def _fraction(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> np.ndarray:
    """1 + d1/(1 + d2/(1 + ...)), the continued fraction of the incomplete beta function."""
    shape, every, not_zero = x.shape, np.all, _not_zero
    if x.size == 1 and a.item() > 0:
        # Plain numbers give the same to the bit; an array of one costs twenty times as much.
        a, b, x = a.item(), b.item(), x.item()
        every, not_zero = bool, _number_not_zero
    value = upper = 1.0
    lower = 0.0
    for step in range(1, STEPS):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 / not_zero(1 + term * lower)
        upper = not_zero(1 + term / upper)
        factor = upper * lower
        value = value * factor
        if every(abs(factor - 1) < 1e-12):
            break
    return np.reshape(value, shape)


def _not_zero(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < TINY, TINY, values)


def _number_not_zero(value: float) -> float:
    return TINY if abs(value) < TINY else value

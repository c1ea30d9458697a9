"""Triton's interpreter with the bfloat16 of a GPU.

Triton 3.6 cuts float32 off where it should round to nearest, and multiplies the bits of bfloat16
factors as integers. A cut has twice the error of a rounding, and all cuts go towards zero.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from triton import language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@contextlib.contextmanager
def right_bfloat16() -> Iterator[None]:
    """Within the body kernels of this process convert and multiply bfloat16 as a GPU does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "cast_impl", _casting(InterpreterBuilder.cast_impl))
        patch.setattr(InterpreterBuilder, "create_fp_to_fp", _to_float)
        patch.setattr(InterpreterBuilder, "create_dot", _dot)
        yield


def _casting(plain):
    def cast(builder, source, dtype):
        into = dtype.scalar
        if source.dtype.scalar == into or tl.bfloat16 not in (source.dtype.scalar, into):
            return plain(builder, source, dtype)
        if into == tl.bfloat16:
            return TensorHandle(rounded(source.data.astype(np.float32)), into)
        return TensorHandle(widened(source.data).astype(interpreter._get_np_dtype(into)), into)

    return cast


_plain_to_float = InterpreterBuilder.create_fp_to_fp


def _to_float(builder, source, dtype, rounding):
    if {source.dtype.scalar, dtype.scalar} == {tl.bfloat16, tl.float32}:
        return builder.cast_impl(source, dtype)
    return _plain_to_float(builder, source, dtype, rounding)


_plain_dot = InterpreterBuilder.create_dot


def _dot(builder, a, b, acc, precision, imprecise):
    a, b = (
        TensorHandle(widened(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x
        for x in (a, b)
    )
    return _plain_dot(builder, a, b, acc, precision, imprecise)


def widened(bits: np.ndarray) -> np.ndarray:
    """Return the float32 numbers of bfloat16 bits."""
    return (np.ascontiguousarray(bits).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    """Return the bits of float32 numbers, rounded to bfloat16, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    nearest = (bits + (0x7FFF + (bits >> 16 & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, nearest).astype(np.uint16)

"""Checks of a product's operands: shapes, dtypes, devices, and which of them go together."""

import torch

from .._runtime.checks import (
    FLOATING,
    check_one_of,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_that,
    shown,
)
from .._runtime.layout import as_read
from .epilogue import ACTIVATIONS


def check_operands(
    a, b, bias, residual, up, up_bias, a_scale, b_scale, activation, scale, out_dtype, into, out,
    keep,
):  # fmt: skip
    """Return the dtype of the result, and residual, a_scale and b_scale as views of its shape.

    Arguments as those of `product` in `kernels/matmul.py`. Raises TypeError for a dtype, and
    ValueError for a shape, a device, an unknown activation, or arguments that exclude each other.
    """
    batch, n = _check_factors(a, b, up)
    shape = (*batch, a.shape[-2], n)
    dtype = _result_dtype(a.dtype, out_dtype)
    if into is not None:
        if out_dtype not in (None, torch.float32):
            raise TypeError(
                f"out_dtype: {out_dtype}, expected None or torch.float32 beside accumulate_into"
            )
        dtype = torch.float32
    # Factors of 8 bits have an epilogue of the result's dtype.
    beside = a.dtype if a.dtype in FLOATING else dtype
    for name, x in (("bias", bias), ("up_bias", up_bias)):
        if x is not None:
            check_shape(name, x, (n,))
            _check_dtype(name, x, beside)
            check_same_device(a=a, **{name: x})
    check_that(
        up is not None or up_bias is None, f"up_bias: {shown(up_bias)}, expected None, as up is"
    )
    check_one_of("activation", activation, ACTIVATIONS)
    residual = _expanded("residual", residual, shape, a, beside, torch.float32)
    a_scale = _expanded("a_scale", a_scale, (*batch, a.shape[-2], 1), a, torch.float32)
    b_scale = _expanded("b_scale", b_scale, (*batch, 1, n), a, torch.float32)
    if dtype == torch.int32:
        extra = (bias, residual, up, a_scale, b_scale)
        plain = all(x is None for x in extra) and activation == "none" and scale == 1
        check_that(plain, "out_dtype: torch.int32, expected a floating dtype beside an epilogue")
    if into is not None:
        check_shape("accumulate_into", into, shape)
        _check_dtype("accumulate_into", into, torch.float32)
        check_same_device(a=a, accumulate_into=into)
        check_that(not keep, "save_preactivation: True, expected False beside accumulate_into")
    if out is not None:
        check_shape("out", out, shape)
        _check_dtype("out", out, dtype)
        check_same_device(a=a, out=out)
        check_that(not keep and into is None, "out: expected None, as into and keep are given")
    return dtype, residual, a_scale, b_scale


def _check_factors(a, b, up):
    """Return the batch dimensions and N of a product; raise if the factors do not fit."""
    for name, x in (("a", a), ("b", b)):
        check_that(x.dim() >= 2, f"{name}: {x.dim()} dimensions, expected 2 or more")
    *over_a, _, k = a.shape
    *over_b, inner, n = b.shape
    check_that(inner == k, f"b: shape {tuple(b.shape)}, expected (..., {k}, N)")
    _check_dtype("a", a, *FLOATING, torch.float8_e4m3fn, torch.int8)
    check_same_dtype(a=a, b=b)
    check_same_device(a=a, b=b)
    if up is not None:
        check_shape("up", up, b.shape)
        check_same_dtype(a=a, up=up)
        check_same_device(a=a, up=up)
    if not over_a and not over_b:
        return (), n
    longest = max(len(over_a), len(over_b))
    over_a, over_b = ([1] * (longest - len(x)) + x for x in (over_a, over_b))
    check_that(
        all(p == q or 1 in (p, q) for p, q in zip(over_a, over_b, strict=True)),
        f"b: shape {tuple(b.shape)}, expected batches that broadcast to those of {tuple(a.shape)}",
    )
    return tuple(q if p == 1 else p for p, q in zip(over_a, over_b, strict=True)), n


def _result_dtype(dtype, wanted):
    """Return the dtype of a result; TypeError if it cannot be `wanted`."""
    found = {
        torch.float8_e4m3fn: (torch.bfloat16, torch.float16, torch.float32),
        torch.int8: (torch.int32, torch.bfloat16, torch.float16, torch.float32),
    }.get(dtype, (dtype, torch.float32))
    if wanted is not None and wanted not in found:
        raise TypeError(f"out_dtype: {shown(wanted)}, expected one of {found}")
    return wanted or found[0]


def _check_dtype(name, x, *expected):
    if x.dtype not in expected:
        raise TypeError(f"{name}: {x.dtype}, expected {' or '.join(map(str, expected))}")


def _expanded(name, x, shape, a, *dtypes):
    """Return a view of x, of one of the dtypes, of a shape that it broadcasts to; None for None."""
    if x is None:
        return None
    _check_dtype(name, x, *dtypes)
    pairs = zip(reversed(x.shape), reversed(shape), strict=False)
    # A tracer takes no symbol for the size that it equals if it is looked up in a tuple.
    fits = x.dim() <= len(shape) and all(size == 1 or size == wanted for size, wanted in pairs)
    message = f"{name}: shape {tuple(x.shape)}, expected one that broadcasts to {tuple(shape)}"
    check_that(fits, message)
    check_same_device(a=a, **{name: x})
    return as_read(x).expand(shape)

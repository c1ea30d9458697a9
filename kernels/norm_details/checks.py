"""The check of arguments that layer norm and RMS norm share."""

import torch

from .._runtime.checks import check_floating, check_same_device, check_shape


def check_norm(x, residual, **vectors):
    """Raise TypeError or ValueError if the arguments of a norm do not fit each other.

    residual: of the dtype of x or float32, or None. vectors: weight and bias, by name; None is left
    out.
    """
    vectors = {name: tensor for name, tensor in vectors.items() if tensor is not None}
    check_floating(x=x, **vectors)
    if x.dim() == 0:
        raise ValueError("x: has no dimension to normalize over, expected one at least")
    n = x.shape[-1]
    for name, tensor in vectors.items():
        if tensor.dim() != 1 or tensor.shape[0] != n:
            check_shape(name, tensor, (n,))
        check_same_device(x=x, **{name: tensor})
    if residual is not None:
        if residual.dtype not in (x.dtype, torch.float32):
            raise TypeError(f"residual: {residual.dtype}, expected {x.dtype} as x has, or float32")
        check_shape("residual", residual, x.shape)
        check_same_device(x=x, residual=residual)

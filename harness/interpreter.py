"""Reductions in Triton's interpreter, which walks through them element by element in Python."""

import numpy as np


def quicken() -> None:
    """Has reductions with a combining function of their own work on whole arrays from now on.

    Neighbours are combined, then the results, as a GPU does it, in place of one after the other:
    a verification of kernels that reduce pairs spent nine tenths of its time there.
    """
    from triton.runtime.interpreter import ReduceOps

    ReduceOps.generic_reduce = _reduce


def _reduce(operation, tensors: tuple) -> list:
    """What the method of `ReduceOps` returns: a tensor for each of `tensors`, of equal shapes."""
    whole = operation.axis is None
    tensors, axis = operation.unravel(tensors, operation.axis)
    dtypes = [tensor.dtype for tensor in tensors]
    arrays = [np.moveaxis(tensor.handle.data, axis, -1) for tensor in tensors]
    while arrays[0].shape[-1] > 1:
        pairs = [
            operation.to_tensor(array[..., first::2], dtype)
            for first in (0, 1)
            for array, dtype in zip(arrays, dtypes, strict=True)
        ]
        combined = operation.combine_fn.fn(*pairs)
        combined = combined if isinstance(combined, tuple) else (combined,)
        arrays = [tensor.handle.data for tensor in combined]
    if whole and not operation.keep_dims:
        arrays = [array.item() for array in arrays]
    elif operation.keep_dims:
        arrays = [np.moveaxis(array, -1, axis) for array in arrays]
    else:
        arrays = [array[..., 0] for array in arrays]
    return [operation.to_tensor(*each) for each in zip(arrays, dtypes, strict=True)]

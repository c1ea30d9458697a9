"""Checks of arguments: an error names the argument, its value and what was expected.

A wrong kind of object or a wrong dtype raises TypeError, also a dtype that differs from another
argument's. A wrong value, shape, device or layout raises ValueError.
"""

import numbers
import reprlib

import torch

from .internals import has_tangent

FLOATING = (torch.float32, torch.float16, torch.bfloat16)
ORDERED = (
    *FLOATING,
    torch.float64,
    torch.bool,
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)
MOVABLE = (*ORDERED, torch.float8_e4m3fn, torch.float8_e5m2)
# Sums of an index and a tile's length stay below 2**31.
MOST_ITEMS = 2**31 - 2**12


def check_that(holds: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not holds:
        raise ValueError(message)


def shown(value: object) -> str:
    """Return how a message shows a value: a tensor by shape and dtype, else a short repr."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return reprlib.repr(value)


def check_tensor(name: str, value: object) -> None:
    """Raise TypeError unless the value is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {shown(value)}, expected a tensor")


def check_tensors(**named: object) -> None:
    """Raise TypeError unless each value is a tensor."""
    for name, value in named.items():
        check_tensor(name, value)


def check_number(
    name: str, value: object, low: float | None = None, high: float | None = None
) -> float:
    """Return the value as a float.

    Raise TypeError if it is no real number; a bool and a tensor are none. Raise ValueError if it
    lies outside [low, high] and both are given.
    """
    # Nearly all values are floats, and a call of a short kernel has no time for more.
    if type(value) is not float:
        # Dynamo understands these two types, but not `numbers.Real`.
        known = isinstance(value, (float, int)) and not isinstance(value, bool)
        if not known and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise TypeError(f"{name}: {shown(value)}, expected a number")
        value = float(value)
    if low is not None and not low <= value <= high:
        raise ValueError(f"{name}: {value}, expected {low} to {high}")
    return value


def check_integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """Return the value.

    Raise TypeError if it is no integer; a bool is none. Raise ValueError outside [low, high].
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {shown(value)}, expected an integer")
    if low is not None and value < low:
        raise ValueError(f"{name}: {value}, expected {low} or more")
    if high is not None and value > high:
        raise ValueError(f"{name}: {value}, expected {high} or less")
    return value


def check_flag(name: str, value: object) -> bool:
    """Return the value; raise TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: {shown(value)}, expected True or False")
    return value


def check_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise TypeError unless the value is a string, and ValueError if it is not a choice."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: {shown(value)}, expected one of {choices}")
    if value not in choices:
        raise ValueError(f"{name}: {shown(value)}, expected one of {choices}")


def check_same_dtype(**tensors: torch.Tensor) -> None:
    """Raise TypeError unless all have the dtype of the first."""
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.dtype != first.dtype:
            raise TypeError(f"{name}: {tensor.dtype}, expected {first.dtype} as {first_name} has")


def check_same_device(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless all are on the device of the first."""
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.device != first.device:
            raise ValueError(f"{name}: on {tensor.device}, expected {first.device} as {first_name}")


def check_same_meta(**tensors: torch.Tensor) -> None:
    """Raise TypeError or ValueError unless all have the dtype, shape and device of the first."""
    check_same_dtype(**tensors)
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)}, expected {tuple(first.shape)} as "
                f"{first_name} has"
            )
    check_same_device(**tensors)


def check_floating(**tensors: torch.Tensor) -> None:
    """Raise TypeError unless each has a dtype that the kernels compute in (FLOATING)."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATING:
            raise TypeError(f"{name}: {tensor.dtype}, expected float32, float16 or bfloat16")


def check_floating_pair(x: torch.Tensor, y: torch.Tensor) -> None:
    """Raise as `check_same_meta` and `check_floating` do, after a single test of x and y."""
    if not (
        x.dtype is y.dtype and x.dtype in FLOATING and x.shape == y.shape and x.device == y.device
    ):
        check_floating(x=x)
        check_same_meta(x=x, y=y)


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor has this shape."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {shape}")


def check_real(dtypes: tuple[torch.dtype, ...], **tensors: torch.Tensor) -> None:
    """Raise TypeError unless each has one of these dtypes.

    dtypes: all that the kernels can compare (ORDERED) or move (MOVABLE).
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name}: {tensor.dtype}, expected a dtype of real numbers")


def check_no_tangent(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError if one has a tangent of forward-mode differentiation; it would be lost."""
    for name, tensor in tensors.items():
        if tensor is not None and has_tangent(tensor):
            raise ValueError(
                f"{name}: has a tangent of forward-mode differentiation, which this op does not "
                "compute; expected a tensor without one"
            )


def check_in_memory(name: str, tensor: torch.Tensor, kind: str) -> None:
    """Raise ValueError unless the tensor lies in memory of a GPU or of a device of this kind."""
    if tensor.device.type not in (kind, "cuda"):
        raise ValueError(f"{name}: on {tensor.device}, expected the memory of a {kind} device")
    if tensor.numel() and not tensor.data_ptr():
        raise ValueError(
            f"{name}: on {tensor.device} without an address ({type(tensor).__name__}), expected a "
            "plain tensor in memory"
        )

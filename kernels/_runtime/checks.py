"""Checks of arguments: a wrong one is refused by its name, its value and what was expected.

TypeError is for a dtype, and for an object of another kind; ValueError for a value or a shape.
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


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def shown(value: object) -> str:
    """A value as a message shows it: a tensor by what it is, anything else by a short repr."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return reprlib.repr(value)


def tensor(name: str, value: object) -> None:
    """The value is a tensor; else TypeError."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {shown(value)}, expected a tensor")


def tensors(**named: object) -> None:
    """Each is a tensor; else TypeError names the odd one."""
    for name, value in named.items():
        tensor(name, value)


def number(name: str, value: object, low: float | None = None, high: float | None = None) -> float:
    """The value as a float. TypeError where it is no real number, as a bool and a tensor are none;
    ValueError outside [low, high], if both are given."""
    # Nearly all are, and a call of a short kernel has no time for more.
    if type(value) is not float:
        # A graph that is traced understands these two.
        known = isinstance(value, (float, int)) and not isinstance(value, bool)
        if not known and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise TypeError(f"{name}: {shown(value)}, expected a number")
        value = float(value)
    if low is not None and not low <= value <= high:
        raise ValueError(f"{name}: {value}, expected {low} to {high}")
    return value


def integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """The value. TypeError where it is no integer, as a bool is none; ValueError outside
    [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {shown(value)}, expected an integer")
    if low is not None and value < low:
        raise ValueError(f"{name}: {value}, expected {low} or more")
    if high is not None and value > high:
        raise ValueError(f"{name}: {value}, expected {high} or less")
    return value


def flag(name: str, value: object) -> bool:
    """The value; TypeError where it is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: {shown(value)}, expected True or False")
    return value


def one_of(name: str, value: object, choices: tuple) -> None:
    """The value is among the choices; else ValueError."""
    if value not in choices:
        raise ValueError(f"{name}: {shown(value)}, expected one of {choices}")


def same(**tensors: torch.Tensor) -> None:
    """All have the shape, dtype and device of the first; else ValueError names the odd one."""
    first_name, first = "", None
    for name, tensor in tensors.items():
        if first is None:
            first_name, first = name, tensor
        elif (
            tensor.shape != first.shape
            or tensor.dtype != first.dtype
            or tensor.device != first.device
        ):
            raise ValueError(
                f"{name}: {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, expected "
                f"{tuple(first.shape)} {first.dtype} on {first.device} as {first_name} has"
            )


def floating(**tensors: torch.Tensor) -> None:
    """Each has a dtype that the kernels compute in; else TypeError names the odd one."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATING:
            raise TypeError(f"{name}: {tensor.dtype}, expected float32, float16 or bfloat16")


def pair(x: torch.Tensor, y: torch.Tensor) -> None:
    """What `same` and `floating` ask of x and y, asked at once: a wrong one is looked for later."""
    if not (
        x.dtype is y.dtype and x.dtype in FLOATING and x.shape == y.shape and x.device == y.device
    ):
        same(x=x, y=y)
        floating(x=x)


def shaped(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """The tensor has this shape; else ValueError."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {shape}")


def real(dtypes: tuple[torch.dtype, ...], **tensors: torch.Tensor) -> None:
    """Each has one of these dtypes, all that the kernels can compare (ORDERED) or move (MOVABLE);
    else TypeError names the odd one."""
    for name, tensor in tensors.items():
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name}: {tensor.dtype}, expected a dtype of real numbers")


def no_tangent(**tensors: torch.Tensor | None) -> None:
    """None has a derivative of forward-mode differentiation, which would be lost; else ValueError
    names the odd one."""
    for name, tensor in tensors.items():
        if tensor is not None and has_tangent(tensor):
            raise ValueError(
                f"{name}: has a tangent of forward-mode differentiation, which this op does not "
                "compute; expected a tensor without one"
            )


def placed(name: str, tensor: torch.Tensor, kind: str) -> None:
    """The tensor lies in memory of a device of this kind, or of a GPU; else ValueError."""
    if tensor.device.type not in (kind, "cuda"):
        raise ValueError(f"{name}: on {tensor.device}, expected the memory of a {kind} device")
    if tensor.numel() and not tensor.data_ptr():
        raise ValueError(
            f"{name}: on {tensor.device} without an address ({type(tensor).__name__}), expected a "
            "plain tensor in memory"
        )

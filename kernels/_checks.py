"""Checks of arguments that keep a launch from reading out of bounds."""

import torch

FLOATING = (torch.float32, torch.float16, torch.bfloat16)


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


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

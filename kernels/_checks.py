"""Checks of arguments that keep a launch from reading out of bounds."""

import torch


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def same(**tensors: torch.Tensor) -> None:
    """All tensors have the shape and dtype of the first; else ValueError names the odd one."""
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        require(
            tensor.shape == first.shape and tensor.dtype == first.dtype,
            f"{name}: {tuple(tensor.shape)} {tensor.dtype}, "
            f"expected {tuple(first.shape)} {first.dtype} as {first_name} has",
        )


def shaped(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """The tensor has this shape; else ValueError."""
    require(tensor.shape == shape, f"{name}: shape {tuple(tensor.shape)}, expected {shape}")

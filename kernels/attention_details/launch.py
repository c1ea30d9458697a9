"""The host's side that the launchers of attention share: views, allocations, kernel arguments."""

import torch

from .._runtime.device import float32_dot
from .._runtime.layout import as_read

# Numbers of 16 bits decide what dropout keeps.
LEVELS = 2**16


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it if the entries of a row lie apart or are to be read with another sign."""
    x = as_read(x)
    return x if x.stride(-1) == 1 else x.contiguous()


def like(x: torch.Tensor) -> torch.Tensor:
    """A new tensor of x's shape with its order of axes in memory, the last one contiguous."""
    made = torch.empty_like(x)
    # Rows that overlap, as those of a sliding view do, may come out with their entries apart.
    return made if made.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def strides_of(**tensors: torch.Tensor) -> dict[str, int]:
    """The strides of batch, head and position, by parameter: `stride_qb` of a tensor named q."""
    return {
        f"stride_{name}{letter}": tensor.stride(axis)
        for name, tensor in tensors.items()
        for axis, letter in enumerate("bhs")
    }


def strides_of_mask(mask: torch.Tensor | None, shape: tuple[int, ...]) -> dict[str, int]:
    """The strides of a mask that is broadcast to [B, H, Sq, Sk]; zeros if there is none."""
    strides = (0, 0, 0, 0) if mask is None else mask.expand(shape).stride()
    return dict(zip(("stride_mb", "stride_mh", "stride_mm", "stride_mn"), strides, strict=True))


def options_of(
    q: torch.Tensor, k: torch.Tensor, left: int | None, right: int | None, dropped: int
) -> dict[str, object]:
    """The arguments that follow from shapes, window and dropout, as all kernels take them.

    left, right: sizes of the window, None if unbounded. dropped: as `attention_fwd` takes it.
    """
    (h, sq, d), (heads, sk) = q.shape[1:], k.shape[1:3]
    return {
        "H": h,
        "GROUP": h // max(1, heads),
        "SQ": sq,
        "SK": sk,
        "left": 0 if left is None else sk - sq - left,
        "right": 0 if right is None else sk - sq + right,
        "dropped": dropped,
        # If all is dropped nothing is left to be divided.
        "inverse": LEVELS / (LEVELS - dropped) if dropped < LEVELS else 0.0,
        "LEFT": left is not None,
        "RIGHT": right is not None,
        "DROPOUT": dropped > 0,
        # Only float32 has anything to split.
        "PRECISION": float32_dot() if q.dtype == torch.float32 else "ieee",
        "D": d,
        "BLOCK_D": 1 << (d - 1).bit_length(),
    }

"""Views of tensors as the kernels walk them."""

import torch


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x of shape [..., N] as [M, N], contiguous in N; copies only where the layout forces it."""
    n = x.shape[-1]
    rows = x.reshape(x.numel() // n if n else 0, n)
    return rows if rows.stride(-1) == 1 or n <= 1 else rows.contiguous()

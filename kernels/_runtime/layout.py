"""Views of tensors in the layouts that kernels read."""

import math

import torch

# The widest access of a thread.
ACCESS_BYTES = 16


def as_rows_2d(x: torch.Tensor) -> torch.Tensor:
    """Return x of shape `[..., N]` as `[M, N]`, contiguous in N, without a copy if possible."""
    n = x.shape[-1]
    rows = x.reshape(x.numel() // n if n else math.prod(x.shape[:-1]), n)
    return rows if rows.stride(-1) == 1 or n <= 1 else rows.contiguous()


def rows_and_stride(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return x of shape `[..., N]` as its rows, and the distance of two rows in elements.

    The first is x itself if it is contiguous, else `[M, N]` as `as_rows_2d` returns it.
    """
    if x.is_contiguous():
        return x, x.shape[-1]
    x = as_rows_2d(x)
    return x, x.stride(0)


def as_read(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy if x is a view with a lazy sign, which memory does not show.

    In a traced graph, the compiler makes the copy.
    """
    return x if torch.compiler.is_compiling() else x.resolve_neg()


def tma_compatible(x: torch.Tensor) -> bool:
    """Return whether a TMA descriptor can describe x of shape `[M, N]`.

    Its last stride is one, and its rows begin at multiples of 16 bytes.
    """
    # A tensor of a build has no memory, but it may begin past an aligned address.
    address = x.storage_offset() * x.element_size() if x.is_meta else x.data_ptr()
    aligned = address % ACCESS_BYTES == 0
    # Expanded rows are all the same memory: their stride is zero, which no descriptor takes.
    step = x.stride(0) * x.element_size()
    return x.stride(1) == 1 and step > 0 and step % ACCESS_BYTES == 0 and aligned

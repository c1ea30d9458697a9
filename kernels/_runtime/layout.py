"""Views of tensors as the kernels walk them."""

import math

import torch

# The widest access of a thread.
ACCESS_BYTES = 16


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x of shape [..., N] as [M, N], contiguous in N; copies only where the layout forces it."""
    n = x.shape[-1]
    rows = x.reshape(x.numel() // n if n else math.prod(x.shape[:-1]), n)
    return rows if rows.stride(-1) == 1 or n <= 1 else rows.contiguous()


def as_read(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy with the sign with which x is to be read, for a kernel that reads what lies in
    memory. A graph that is traced sees to it by itself."""
    return x if torch.compiler.is_compiling() else x.resolve_neg()


def describable(x: torch.Tensor) -> bool:
    """Whether the copy engine can walk x, of two dimensions: unit last stride, rows at multiples of
    16 bytes."""
    # A tensor of a build has no memory, but it may begin past an aligned address.
    address = x.storage_offset() * x.element_size() if x.is_meta else x.data_ptr()
    aligned = address % ACCESS_BYTES == 0
    # Rows that are all the same memory, as expanded ones are, have no stride to walk by.
    step = x.stride(0) * x.element_size()
    return x.stride(1) == 1 and step > 0 and step % ACCESS_BYTES == 0 and aligned

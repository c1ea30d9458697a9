"""Rows that begin at any element, read and written in accesses of 16 bytes.

Such an access needs an address that is a multiple of 16. If the distance of rows is no multiple of
16 elements, Triton cannot know of one, and accesses single elements.

A row of any address and length is peeled, as compilers peel a loop. Its first `lead` elements end
at a multiple of 32 bytes, a sector of the memory. The `width` elements from there on are the body:
whole vector accesses, which Triton reads as any aligned row. The rest is shorter than an access.
The elements before and behind the body are the peeled ones, a small tile of single accesses. So no
access leaves the row, and no mask cuts a vector access.

    lead, width = vector_body(row_ptr, N)
    peel_cols, peel_mask = peeled_columns(lead, width, N, row_ptr.dtype)
    peel = tl.load(row_ptr + peel_cols, mask=peel_mask)
    x = tl.load(body_ptr(row_ptr, lead) + columns, mask=columns < width)

row_ptr: a pointer, or pointers [M, 1] of several rows. lead, width: of its shape. Tensors whose
rows are peeled by the lead of one of them must be equally misaligned; `needs_peeling` asks for it.
"""

import torch
import triton
import triton.language as tl

from .._runtime.layout import ACCESS_BYTES

# Triton knows whether a size or an address is a multiple of this, and of no other number.
KNOWN = tl.constexpr(16)
ACCESS_BITS = tl.constexpr(8 * ACCESS_BYTES)
# The body begins at a sector, so two warps share none.
SECTOR_BYTES = 32
SECTOR_BITS = tl.constexpr(8 * SECTOR_BYTES)


@triton.jit
def vector_body(row_ptr, N):
    """Return the first element of the body of a row, and the number of its elements.

    N: the elements of the row, a sector or more.
    """
    BITS: tl.constexpr = row_ptr.dtype.element_ty.primitive_bitwidth
    ACCESS: tl.constexpr = ACCESS_BITS // BITS
    past = row_ptr.to(tl.int64).to(tl.int32) // (BITS // 8)
    lead = -past & (SECTOR_BITS // BITS - 1)
    return lead, (N - lead) // ACCESS * ACCESS


@triton.jit
def body_ptr(row_ptr, lead):
    """Return row_ptr + lead, and tell the compiler that vector accesses begin there."""
    # The hint is for the sum, because a hint for an argument is lost when the function is inlined.
    if len(lead.shape) == 2:
        # The compiler makes one number of [1, 1], finds two multiples said of it, and ends.
        tl.static_assert(lead.shape[0] > 1, "the pointer of one row is to be a scalar")
        return tl.multiple_of(row_ptr + lead, (KNOWN, KNOWN))
    else:
        return tl.multiple_of(row_ptr + lead, KNOWN)


@triton.jit
def peeled_columns(lead, width, N, ptr_dtype: tl.constexpr):
    """Return the columns outside of the body, and the mask of those that exist.

    Both are [E], the elements of two sectors, or [M, E] if lead and width are [M, 1].
    """
    PEELS: tl.constexpr = 2 * SECTOR_BITS // ptr_dtype.element_ty.primitive_bitwidth
    return peeled_columns_of(tl.arange(0, PEELS), lead, width, N)


@triton.jit
def peeled_columns_of(lanes, lead, width, N):
    """Return as `peeled_columns` does, for lanes 0, 1, …

    They are at least as many as two sectors have elements.
    """
    if len(lead.shape) == 2:
        lanes = lanes[None, :]
    return tl.where(lanes < lead, lanes, lanes + width), lanes < N - width


def needs_peeling(n: int, *rows: tuple[torch.Tensor, int]) -> bool:
    """Return whether a kernel is to peel rows of n elements as above.

    rows: tensors of one dtype, each with the distance of its rows in elements. The result is true
    if Triton would access single elements, and a row begins equally far past a multiple of 16 bytes
    in all tensors. It is false in a traced graph, which has no addresses, and for rows that are
    shorter than a sector.
    """
    if torch.compiler.is_dynamo_compiling() or n * rows[0][0].element_size() < SECTOR_BYTES:
        return False
    places = [(_address(x), stride) for x, stride in rows]
    if not any(size % KNOWN.value for size in (n, *(size for place in places for size in place))):
        return False
    itemsize, (begin, apart) = rows[0][0].element_size(), places[0]
    return not any(
        (address - begin) % ACCESS_BYTES or (stride - apart) * itemsize % ACCESS_BYTES
        for address, stride in places
    )


def max_body(n: int, itemsize: int) -> int:
    """Return how many elements of a row of n its body has at most."""
    access = ACCESS_BYTES // itemsize
    return n // access * access


def _address(x: torch.Tensor) -> int:
    # A tensor of a build has no memory.
    return x.storage_offset() * x.element_size() if x.is_meta else x.data_ptr()

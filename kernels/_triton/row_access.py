"""Rows that begin at any element, read and written in accesses of 16 bytes.

Such an access needs an address that is a multiple of 16. If the distance of rows is no multiple of
16 elements, Triton cannot know of one, and accesses single elements. A row of any address and
length has three parts: the `lead`, up to the first multiple of 32 bytes, which are a sector of the
memory; `width` elements from there, whole accesses; and what is left, which is shorter than an
access. The second part is a row that Triton reads as any aligned one. The other two are the
`edges`, one small tile of single accesses. So no access leaves the row: there is nothing to mask
out, and no neighbour to spare. Compilers peel loops likewise.

    lead, width = whole(row_ptr, N)
    places, there = edges(lead, width, N, row_ptr.dtype)
    edge = tl.load(row_ptr + places, mask=there)
    x = tl.load(inner(row_ptr, lead) + columns, mask=columns < width)

row_ptr: a pointer, or pointers [M, 1] of several rows. lead, width: of its shape. Tensors whose
rows are split by the lead of one of them must lie alike, which `split` asks for.
"""

import torch
import triton
import triton.language as tl

from .._runtime.layout import ACCESS_BYTES

# Triton knows of a size or an address whether it is a multiple of this, and of no other number.
KNOWN = tl.constexpr(16)
ACCESS_BITS = tl.constexpr(8 * ACCESS_BYTES)
# Where whole accesses begin: those of a warp then share no sector with those of the next one.
SECTOR_BYTES = 32
SECTOR_BITS = tl.constexpr(8 * SECTOR_BYTES)


@triton.jit
def whole(row_ptr, N):
    """Where in a row of N elements, a sector or more, whole accesses begin, and how many elements
    they have."""
    BITS: tl.constexpr = row_ptr.dtype.element_ty.primitive_bitwidth
    ACCESS: tl.constexpr = ACCESS_BITS // BITS
    past = row_ptr.to(tl.int64).to(tl.int32) // (BITS // 8)
    lead = -past & (SECTOR_BITS // BITS - 1)
    return lead, (N - lead) // ACCESS * ACCESS


@triton.jit
def inner(row_ptr, lead):
    """row_ptr + lead, of which the compiler is told that whole accesses begin there."""
    # Of a sum, since what is said of an argument is forgotten where the function is inlined.
    if len(lead.shape) == 2:
        # The compiler makes one number of [1, 1], finds two multiples said of it, and ends.
        tl.static_assert(lead.shape[0] > 1, "the pointer of one row is to be a scalar")
        return tl.multiple_of(row_ptr + lead, (KNOWN, KNOWN))
    else:
        return tl.multiple_of(row_ptr + lead, KNOWN)


@triton.jit
def edges(lead, width, N, ptr_dtype: tl.constexpr):
    """The columns that whole accesses leave, and which of them there are: two sectors' elements,
    [E], or [M, E] where lead and width are [M, 1]."""
    EDGES: tl.constexpr = 2 * SECTOR_BITS // ptr_dtype.element_ty.primitive_bitwidth
    return edges_of(tl.arange(0, EDGES), lead, width, N)


@triton.jit
def edges_of(lanes, lead, width, N):
    """As `edges`, for 0, 1, … in lanes, of which there are at least as many as in two sectors."""
    if len(lead.shape) == 2:
        lanes = lanes[None, :]
    return tl.where(lanes < lead, lanes, lanes + width), lanes < N - width


def split(n: int, *rows: tuple[torch.Tensor, int]) -> bool:
    """Whether a kernel is to split rows of n elements as above.

    rows: tensors of one dtype, each with the distance of its rows in elements. True where Triton
    would access single elements, and a row begins equally far past a multiple of 16 bytes in all
    tensors. False in a traced graph, which has no addresses to ask for, and for rows that are
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


def most_whole(n: int, itemsize: int) -> int:
    """How many elements of a row of n are in whole accesses at most."""
    access = ACCESS_BYTES // itemsize
    return n // access * access


def _address(x: torch.Tensor) -> int:
    # A tensor of a build has no memory.
    return x.storage_offset() * x.element_size() if x.is_meta else x.data_ptr()

"""Products of operands that TMA cannot read, by way of copies whose rows it can.

A descriptor wants rows that begin at multiples of 16 bytes. An operand with other rows, as that of
an odd size has, is copied to a buffer with longer ones. A result with other rows is computed in
such a buffer and copied out. The copies cost bytes, and the product gains TMA and the tensor
cores of Hopper, so FLOPs for each copied byte decide.
"""

import torch
import triton
import triton.language as tl

from .._runtime.vector_access import access_items
from .batches import Operand, Walk

# A copy pays from so many FLOPs for each of its bytes, and for the start of its kernel
# (docs/lab/matmul.md).
FLOPS_OF_BYTE, FLOPS_OF_COPY = 31, 9.4e7
# Entries of a result from which tiles without parts of K fill a GPU.
LEAST_ENTRIES = 2**17
# Rows of a copy begin at multiples of so many bytes: a line of the cache.
LINE_BYTES = 128
# Items of a tile of a copy, and its columns at most.
TILE, MOST_COLUMNS = 4096, 512


def with_copies(walk: Walk, accumulates: bool, summed: bool = False) -> Walk | None:
    """Return the launch with copies in the place of operands that need one, or None.

    It is None if copies would not pay, or cannot be: a result that is added to, or comes with its
    pre-activation, has no other place. Otherwise the operand `out` is a buffer if that of `walk`
    cannot be described, and `write_back` empties it.

    walk: one product of 16 bits. accumulates: whether the result is added to its buffer. summed:
    whether it is the sum of parts of K, which goes to any place.
    """
    a, b, up, out = (walk.operands[name] for name in ("a", "b", "up", "out"))
    (m, k), n = a.matrix.shape, b.matrix.shape[1]
    given = {"a": a, "b": b, "up": up} | ({} if summed else {"out": out})
    poor = {name: x for name, x in given.items() if x is not None and not x.stored.describable()}
    flops = 2 * m * n * k * (1 if up is None else 2)
    copied = sum(x.matrix.numel() * x.matrix.element_size() for x in poor.values())
    least = copied * FLOPS_OF_BYTE + len(poor) * FLOPS_OF_COPY
    if not poor:
        return walk
    # The copy of a result writes rows whose columns lie side by side.
    one_place = accumulates or walk.operands["pre"] is not None or out.matrix.stride(1) != 1
    if "out" in poor and one_place:
        return None
    if (not summed and m * n < LEAST_ENTRIES) or flops < least:
        return None
    copies = {name: _longer(x, name == "out") for name, x in poor.items()}
    return Walk(walk.sizes, {**walk.operands} | copies)


def write_back(whole: Walk, walk: Walk) -> None:
    """Copy the result of a padded launch to where that of `walk` belongs."""
    source, target = whole.operands["out"].matrix, walk.operands["out"].matrix
    if source is not target:
        _copy(source, target)


def _longer(x: Operand, empty: bool) -> Operand:
    """A copy of an operand with rows that TMA can read, or only its place."""
    stored = x.stored.matrix
    line = LINE_BYTES // stored.element_size()
    rows, columns = stored.shape
    copy = stored.new_empty((rows, triton.cdiv(columns, line) * line)).narrow(1, 0, columns)
    if not empty:
        _copy(stored, copy)
    return Operand(copy).transposed if x.by_columns() else Operand(copy)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Write target, whose rows are runs of memory, from a source of any strides."""
    m, n = target.shape
    block_n = min(MOST_COLUMNS, triton.next_power_of_2(n))
    block_m = TILE // block_n
    _copy_kernel[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
        source_ptr=source, target_ptr=target, stride_m=source.stride(0),
        stride_n=source.stride(1), stride_t=target.stride(0), M=m, N=n,
        ITEMS=access_items(source.element_size(), n, source.stride(0), target.stride(0)),
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip


@triton.jit
def _copy_kernel(
    source_ptr, target_ptr, stride_m, stride_n, stride_t, M, N, ITEMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """target = source, both [M, N].

    Grid: one program for each tile [BLOCK_M, BLOCK_N], by rows of tiles. Reads source, its items
    stride_m and stride_n apart. Writes target, its rows stride_t apart and its columns side by
    side. N and both distances of rows are multiples of ITEMS, those of an access. M and N need not
    be multiples of the blocks.
    """
    stride_m, stride_t = stride_m // ITEMS * ITEMS, stride_t // ITEMS * ITEMS
    N = N // ITEMS * ITEMS
    across = tl.cdiv(N, BLOCK_N)
    offs_m = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    at_m, at_n = offs_m.to(tl.int64)[:, None], offs_n.to(tl.int64)[None, :]
    mask = (at_m < M) & (at_n < N)
    x = tl.load(source_ptr + at_m * stride_m + at_n * stride_n, mask=mask)
    tl.store(target_ptr + at_m * stride_t + at_n, x, mask=mask)

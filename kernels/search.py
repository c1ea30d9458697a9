"""Bucketize: the number of sorted boundaries below x (at most x, to the right), element by element.

The search decides the cost of an element: log2(B) loads, each of which waits for the last. Among
the lanes of a warp a load goes to as many cache lines as it has answers so far. All lanes halve the
same length, so a step is a load, a comparison and a sum, with no mask and no branch. (Khuong and
Morin, "Array layouts for comparison-based searching", 2017.)

Up to 1,024 boundaries lie in shared memory, which serves any addresses in different banks at once.
There they lie in breadth-first order of the search tree, as in Eytzinger's layout of the same
paper. The nodes of a level are neighbours, so the lanes of a warp seldom meet in a bank. Programs
loop over many blocks, because each of them loads the tree.

A search among more boundaries starts in the cell of a grid (`search_details/grid.py`). Few steps
are left then, each of which would wait for the L2 cache.

A number of 16 bits has 65,536 values. If there are many more elements, a first kernel finds the
answers of all values. An element then costs one load from a table of 128 KiB. The L1 cache holds
the part of it that occurs.
"""

import torch
import triton
import triton.language as tl

from ._runtime.call_cache import cached_launch
from ._runtime.checks import (
    ORDERED,
    check_flag,
    check_real,
    check_same_device,
    check_same_dtype,
    check_tensors,
)
from ._runtime.configs import Configs
from ._runtime.device import sm_count
from ._runtime.layout import as_read
from .search_details.grid import MOST_BOUNDARIES, comparable, grid_search, placed, right_of

VALUES = 2**16
# From this number of elements on, a search of all values of 16 bits is faster.
TABLE_FROM = 2**20
# The same for the tree, and the boundaries that it may hold; with more of them, for the grid.
TREE_FROM, LEAST_TREE, MOST_TREE = 2**20, 32, 2**10
GRID_FROM = 2**20
# Programs of the tree for each multiprocessor.
RESIDENT = 8
# Boundaries whose number fits an entry of 16 bits.
NARROW = 2**15 - 1


def bucketize(
    x: torch.Tensor,
    boundaries: torch.Tensor,
    *,
    right: bool = False,
    out_int32: bool = False,
) -> torch.Tensor:
    """Return the index i of each x with boundaries[i - 1] < x <= boundaries[i].

    With `right`, boundaries[i - 1] <= x < boundaries[i].

    Args:
        x: any shape and any real dtype. A NaN comes after all boundaries.
        boundaries: `[B]`, of the dtype of x, ascending, NaN last as in torch.sort; B from 0 to
            2**31 - 1. No number lies to the right of NaN. Unsorted boundaries give meaningless
            indices.
        right: count boundaries that are equal to x.
        out_int32: return int32 indices.

    Returns:
        A new tensor with the shape of x, int64, or int32 with `out_int32`. Indices have no
        gradient.

    Raises:
        TypeError: an argument has another kind or dtype, or boundaries another dtype than x.
        ValueError: boundaries have another rank or device.

    Source:
        Khuong and Morin, "Array layouts for comparison-based searching" (2017).

    Example:
        >>> x = torch.tensor([0.5, 1.0, 7.0], device="cuda")
        >>> bucketize(x, torch.tensor([1.0, 2.0, 3.0], device="cuda")).tolist()
        [0, 0, 3]
    """
    check_tensors(x=x, boundaries=boundaries)
    check_flag("right", right)
    check_flag("out_int32", out_int32)
    check_real(ORDERED, x=x)
    check_same_dtype(x=x, boundaries=boundaries)
    check_same_device(x=x, boundaries=boundaries)
    if boundaries.dim() != 1:
        raise ValueError(f"boundaries: shape {tuple(boundaries.shape)}, expected one dimension")
    return bucketize_fwd(as_read(x), as_read(boundaries), right, out_int32)


def bucketize_fwd(
    x: torch.Tensor, boundaries: torch.Tensor, right: bool, out_int32: bool
) -> torch.Tensor:
    """Return the result of `bucketize`, whose checks are done."""
    x, boundaries = x.contiguous(), boundaries.contiguous()
    n, count = x.numel(), boundaries.numel()
    dtype = torch.int32 if out_int32 else torch.int64
    if count == 0:
        return torch.zeros(x.shape, dtype=dtype, device=x.device)
    out = torch.empty_like(x, dtype=dtype)
    if n == 0:
        return out
    if n >= GRID_FROM and MOST_TREE < count <= MOST_BOUNDARIES and x.dtype.itemsize != 2:
        grid_search(x, boundaries, out, right)
        return out
    search = {"LEVELS": (count - 1).bit_length(), "RIGHT": right}
    if n >= TABLE_FROM and x.dtype in (torch.bfloat16, torch.float16):
        entry = torch.int16 if count <= NARROW else torch.int32
        table = x.new_empty(VALUES, dtype=entry)
        _table_kernel[(VALUES // TABLE_TILE["BLOCK"],)](
            table_ptr=table, boundaries_ptr=boundaries, B=count, **search, **TABLE_TILE,
        )  # fmt: skip
        config = LOOK_UP.pick(x.device, index_bytes=out.element_size())
        _look_up_kernel[(-(-n // config["BLOCK"]),)](
            x_ptr=x, table_ptr=table, out_ptr=out, N=n, **config,
        )  # fmt: skip
        return out
    sizes = {"itemsize": x.element_size(), "index_bytes": out.element_size()}
    if n >= TREE_FROM and LEAST_TREE <= count <= MOST_TREE:
        kernel, most = _tree_kernel, RESIDENT * sm_count(x.device)
        config = TREE.pick(x.device, **sizes, levels=search["LEVELS"])
    else:
        kernel, most = _search_kernel, n
        config = SEARCH.pick(x.device, **sizes, large=count > NARROW)
    kernel[(min(-(-n // config["BLOCK"]), most),)](
        x_ptr=x, boundaries_ptr=boundaries, out_ptr=out, N=n, B=count, **search, **config,
    )  # fmt: skip
    return out


@triton.jit
def _search_kernel(
    x_ptr, boundaries_ptr, out_ptr, N, B,
    LEVELS: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[i] = index of x[i] among the boundaries, by a branch-free binary search.

    Grid: cdiv(N, BLOCK) programs of BLOCK elements. Reads x [N] and boundaries [B], B >= 1,
    ascending; writes out [N]. LEVELS: bits of B - 1. RIGHT: as in `bucketize`.
    """
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0)
    found = _position(x, boundaries_ptr, B, LEVELS, RIGHT)
    tl.store(out_ptr + offs, found.to(out_ptr.dtype.element_ty), mask=offs < N)


@triton.jit
def _position(x, boundaries_ptr, B, LEVELS: tl.constexpr, RIGHT: tl.constexpr):
    """The index of each x among B boundaries, of which there is at least one."""
    x = comparable(x)
    found = tl.zeros(x.shape, tl.int32)
    length = B
    for _ in tl.static_range(LEVELS):
        half = length // 2
        boundary = comparable(tl.load(boundaries_ptr + found + (half - 1)))
        found += tl.where(right_of(x, boundary, RIGHT), half, 0)
        length -= half
    boundary = comparable(tl.load(boundaries_ptr + found))
    return placed(found + right_of(x, boundary, RIGHT).to(tl.int32), x, B)


@triton.jit
def _tree_kernel(
    x_ptr, boundaries_ptr, out_ptr, N, B,
    LEVELS: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[i] = index of x[i] among the boundaries, by a tree in registers and shared memory.

    Grid: any number of programs, which stride over blocks of BLOCK elements. Reads x [N] and
    boundaries [B], ascending; writes out [N]. LEVELS: bits of B - 1, so 2**LEVELS >= B. RIGHT: as
    in `bucketize`.
    """
    # Nodes from one on, two children each; those past the last boundary but one repeat the last.
    node = tl.arange(0, 1 << LEVELS)
    level = tl.zeros(node.shape, tl.int32)
    for up in tl.static_range(1, LEVELS):
        level += (node >= 1 << up).to(tl.int32)
    place = (2 * (node - (1 << level)) + 1) * (1 << (LEVELS - 1 - level)) - 1
    tree = tl.load(boundaries_ptr + tl.minimum(tl.maximum(place, 0), B - 1))
    last = comparable(tl.load(boundaries_ptr + B - 1))
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(tl.program_id(0), tl.cdiv(N, BLOCK), tl.num_programs(0)):
        x = comparable(tl.load(x_ptr + offs, mask=offs < N, other=0))
        at = tl.full(offs.shape, 1, tl.int32)
        for _ in tl.static_range(LEVELS):
            at = 2 * at + right_of(x, comparable(tl.gather(tree, at, 0)), RIGHT).to(tl.int32)
        found = tl.minimum(at - (1 << LEVELS), B - 1)
        found += ((found == B - 1) & right_of(x, last, RIGHT)).to(tl.int32)
        found = placed(found, x, B)
        tl.store(out_ptr + offs, found.to(out_ptr.dtype.element_ty), mask=offs < N)
        offs += step


@triton.jit
def _table_kernel(
    table_ptr, boundaries_ptr, B, LEVELS: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """table[v] = index of the 16-bit value with bits v among the boundaries.

    Grid: 65,536 / BLOCK programs of BLOCK values. Reads boundaries [B], B >= 1, of 16-bit floats,
    ascending; writes table [65536]. LEVELS: bits of B - 1. RIGHT: as in `bucketize`.
    """
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = offs.to(tl.uint16).to(boundaries_ptr.dtype.element_ty, bitcast=True)
    found = _position(x, boundaries_ptr, B, LEVELS, RIGHT)
    tl.store(table_ptr + offs, found.to(table_ptr.dtype.element_ty))


@triton.jit
def _look_up_kernel(x_ptr, table_ptr, out_ptr, N, BLOCK: tl.constexpr):
    """out[i] = table[bits of x[i]].

    Grid: cdiv(N, BLOCK) programs of BLOCK elements. Reads x [N] of 16 bits and table [65536] of
    `_table_kernel`; writes out [N].
    """
    pid = tl.program_id(0)
    offs = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if (pid + 1).to(tl.int64) * BLOCK <= N:
        value = tl.load(x_ptr + offs, eviction_policy="evict_first").to(tl.uint16, bitcast=True)
        found = tl.load(table_ptr + value.to(tl.int32), eviction_policy="evict_last")
        tl.store(out_ptr + offs, found.to(out_ptr.dtype.element_ty), cache_modifier=".cs")
    else:
        mask = offs < N
        value = tl.load(x_ptr + offs, mask=mask, other=0).to(tl.uint16, bitcast=True)
        found = tl.load(table_ptr + value.to(tl.int32))
        tl.store(out_ptr + offs, found.to(out_ptr.dtype.element_ty), mask=mask)


CONFIGS = tuple(
    {"BLOCK": block, "num_warps": warps}
    for block in (256, 512, 1024, 2048, 4096)
    for warps in (2, 4, 8)
    if 2 <= block // (32 * warps) <= 32
)
TREE_CONFIGS = tuple(
    {"BLOCK": block, "num_warps": warps}
    for block in (1024, 2048, 4096, 8192)
    for warps in (4, 8, 16)
    if 8 <= block // (32 * warps) <= 32
)


def _choose_search(itemsize, index_bytes, large):
    return {"BLOCK": 512, "num_warps": 8} if large else {"BLOCK": 1024, "num_warps": 4}


def _choose_tree(itemsize, index_bytes, levels):
    return {"BLOCK": 4096, "num_warps": 8}


def _choose_look_up(index_bytes):
    return {"BLOCK": 2048, "num_warps": 4}


SEARCH = Configs(_search_kernel, CONFIGS, _choose_search)
TREE = Configs(_tree_kernel, TREE_CONFIGS, _choose_tree)
LOOK_UP = Configs(_look_up_kernel, CONFIGS, _choose_look_up)
TABLE_TILE = {"BLOCK": 256, "num_warps": 4}

bucketize_fwd = cached_launch(bucketize_fwd)

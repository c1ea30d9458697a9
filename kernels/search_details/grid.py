"""A search that starts near its end: a grid of equal cells over the range of the boundaries.

An entry of the grid has the first boundary of its cell, and the number of boundaries in each eighth
of it. So after one load from a table in the L1 cache few boundaries are left for an element. The
cells are the buckets of Devroye, "Lecture Notes on Bucket Algorithms" (1986). Peterson, "Addressing
for random-access storage" (1957), starts where a boundary should lie. The fullest eighth, found on
the device, sets the number of further steps.

The cells are equal on an axis that is linear around the median and logarithmic far from it. Its
value is the bits of |x - median| + s, read as an integer, where s is the length of the middle
eighth of the boundaries. So heavy tails do not push the middle into a few cells. Boundaries that
crowd nevertheless, such as equal ones, cost as many steps as a plain search.

No rounding can make the answer wrong. Each operation on the axis is monotone, also as computed.
Boundaries in lower cells than that of x are less than x, those in higher cells greater.
"""

import torch
import triton
import triton.language as tl

from .._runtime.configs import Configs
from .._runtime.device import sm_count

# Parts of a cell, four bits each; more boundaries than these count make the cell a crowded one,
# whose entry has their number in place of those of its parts.
PARTS, FULL = tl.constexpr(8), tl.constexpr(15)
CROWDED = tl.constexpr(-(2**31))
# The difference of two numbers as large as the first is finite; the second is a normal number.
HUGE, LITTLE = tl.constexpr(1.7e38), tl.constexpr(1e-37)
LEAST_CELLS, MOST_CELLS = 2**12, 2**16
# Boundaries from which on their number and the steps of a search might pass 31 bits.
MOST_BOUNDARIES = 2**30
# Warps that a multiprocessor keeps at once.
RESIDENT = 64
BUILD_TILE = {"BLOCK": 128, "num_warps": 4}


def _choose_grid(itemsize, index_bytes, cells):
    return {"BLOCK": 1024, "num_warps": 16}


CONFIGS = tuple(
    {"BLOCK": block, "num_warps": warps}
    for block in (512, 1024, 2048, 4096)
    for warps in (4, 8, 16)
    if 1 <= block // (32 * warps) <= 8
)


@triton.jit
def right_of(x, boundary, RIGHT: tl.constexpr):
    """Whether x is right of a boundary; nothing is right of NaN. `placed` handles a NaN in x."""
    if RIGHT:
        return x >= boundary
    else:
        return x > boundary


@triton.jit
def placed(found, x, B):
    """The place of x: what was found, but for NaN, which comes after all boundaries."""
    return tl.where(x == x, found, B)


@triton.jit
def comparable(x):
    """x, as float32 if it is a 16-bit float."""
    if x.dtype.is_floating() and x.dtype.primitive_bitwidth == 16:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def _finite(x):
    """x in float32, clamped to +-HUGE."""
    return tl.minimum(tl.maximum(x.to(tl.float32), -HUGE), HUGE)


@triton.jit
def _along(x, middle, near):
    """How far along the axis x lies, in float32; NaN lies at the far end."""
    x = x.to(tl.float32)
    bits = (tl.abs(x - middle) + near).to(tl.int32, bitcast=True)
    away = bits - near.to(tl.int32, bitcast=True)
    return tl.where(x < middle, -away, away).to(tl.float32)


@triton.jit
def _axis(boundaries_ptr, B, PLACES: tl.constexpr):
    """The axis of the boundaries: its middle, the length that is near, scale and shift to places.

    Each kernel computes it anew, from operations that are rounded in one way only.
    """
    middle = _finite(tl.load(boundaries_ptr + B // 2))
    lower = _finite(tl.load(boundaries_ptr + (B // 2 - B // 16)))
    near = tl.maximum(_finite(tl.load(boundaries_ptr + (B // 2 + B // 16))) - lower, LITTLE)
    # Bins of all numbers end with infinities, so the outermost boundaries do not count.
    low = _along(_finite(tl.load(boundaries_ptr + tl.minimum(1, B - 1))), middle, near)
    high = _along(_finite(tl.load(boundaries_ptr + tl.maximum(B - 2, 0))), middle, near)
    scale = tl.div_rn(tl.full((), PLACES, tl.float32), tl.maximum(high - low, 1.0))
    return middle, near, scale, -low * scale


@triton.jit
def _place(x, middle, near, scale, shift, PLACES: tl.constexpr):
    """The part of a cell that x lies in, counted through all cells; NaN lies in the last."""
    place = tl.fma(_along(x, middle, near), scale, shift)
    return tl.maximum(tl.minimum(place, PLACES - 1.0), 0.0).to(tl.uint32)


@triton.jit
def _boundaries_below(
    place, boundaries_ptr, B, middle, near, scale, shift, LEVELS: tl.constexpr, PLACES: tl.constexpr
):
    """The number of boundaries that lie in lower places."""
    found = tl.zeros(place.shape, tl.int32)
    for level in tl.static_range(LEVELS):
        width = 1 << (LEVELS - 1 - level)
        last = found + (width - 1)
        boundary = tl.load(boundaries_ptr + last, mask=last < B, other=0)
        below = _place(boundary, middle, near, scale, shift, PLACES) < place
        found += tl.where((last < B) & below, width, 0)
    return found


@triton.jit
def _entries_kernel(
    entries_ptr, boundaries_ptr, B, CELLS: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr
):
    """entries[c] = start and counts of cell c; then the longest eighth of each program.

    Grid: CELLS / BLOCK programs of BLOCK cells. Reads boundaries [B], ascending; writes entries
    int64 [CELLS + programs]: low half the first boundary, high half PARTS counts of four bits, or
    the total if CROWDED. LEVELS: bits of B.
    """
    places: tl.constexpr = CELLS * PARTS
    middle, near, scale, shift = _axis(boundaries_ptr, B, places)
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS)[None, :]
    place = cell[:, None] * PARTS + part
    start = _boundaries_below(place, boundaries_ptr, B, middle, near, scale, shift, LEVELS, places)
    end = _boundaries_below(
        place + 1, boundaries_ptr, B, middle, near, scale, shift, LEVELS, places
    )
    count = end - start
    # If boundaries are not in order, a count may be anything.
    crowded = tl.max(((count < 0) | (count > FULL)).to(tl.int32), 1) > 0
    total = tl.sum(count, 1)
    counts = tl.where(crowded, total, tl.sum(count << (4 * part), 1))
    first = tl.min(start, 1) | tl.where(crowded, CROWDED, 0)
    entry = (counts.to(tl.int64) << 32) | (first.to(tl.int64) & 0xFFFFFFFF)
    tl.store(entries_ptr + cell, entry)
    longest = tl.max(tl.where(crowded, total, tl.max(count, 1)), 0)
    tl.store(entries_ptr + CELLS + tl.program_id(0), longest.to(tl.int64))


@triton.jit
def _grid_kernel(
    x_ptr, boundaries_ptr, entries_ptr, out_ptr, N, B,
    CELLS: tl.constexpr, LENGTHS: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[i] = index of x[i] among the boundaries, searched within one eighth of a cell.

    Grid: any number of programs, which stride over blocks of BLOCK elements. Reads x [N],
    boundaries [B] and entries of `_entries_kernel`, LENGTHS of whose programs there were; writes
    out [N]. CELLS: cells of the grid. RIGHT: as in `bucketize`.
    """
    places: tl.constexpr = CELLS * PARTS
    middle, near, scale, shift = _axis(boundaries_ptr, B, places)
    longest = tl.max(tl.load(entries_ptr + CELLS + tl.arange(0, LENGTHS)), 0).to(tl.int32)
    widest = 1
    while widest <= longest:
        widest *= 2
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(tl.program_id(0), tl.cdiv(N, BLOCK), tl.num_programs(0)):
        # Past the cache that the entries and the boundaries are to have.
        x = tl.load(x_ptr + offs, mask=offs < N, other=0, cache_modifier=".cg")
        place = _place(x, middle, near, scale, shift, places)
        entry = tl.load(entries_ptr + place // PARTS, eviction_policy="evict_last")
        first = entry.to(tl.int32)
        counts = (entry >> 32).to(tl.int32).to(tl.uint32, bitcast=True)
        bit = place % PARTS * 4
        before = counts & ((1 << bit) - 1)
        pairs = (before & 0x0F0F0F0F) + ((before >> 4) & 0x0F0F0F0F)
        before = ((pairs * 0x01010101) >> 24).to(tl.int32)
        count = tl.where(first < 0, counts, (counts >> bit) & FULL).to(tl.int32)
        found = tl.where(first < 0, first & ~CROWDED, first + before)
        end = found + count
        x = comparable(x)
        width = widest
        while width > 1:
            width //= 2
            last = found + (width - 1)
            boundary = comparable(tl.load(boundaries_ptr + last, mask=last < end))
            found += tl.where((last < end) & right_of(x, boundary, RIGHT), width, 0)
        found = placed(found, x, B)
        tl.store(
            out_ptr + offs, found.to(out_ptr.dtype.element_ty), mask=offs < N, cache_modifier=".cs"
        )
        offs += step


GRID = Configs(_grid_kernel, CONFIGS, _choose_grid, family="search")


def grid_search(x: torch.Tensor, boundaries: torch.Tensor, out: torch.Tensor, right: bool) -> None:
    """Write the indices of x among the boundaries to out, int32 or int64 and of the size of x.

    boundaries: [B], B from 1 to MOST_BOUNDARIES. All contiguous and on one device.
    """
    n, count = x.numel(), boundaries.numel()
    cells = min(max(2 ** (count - 1).bit_length() // 4, LEAST_CELLS), MOST_CELLS)
    programs = cells // BUILD_TILE["BLOCK"]
    entries = torch.empty(cells + programs, dtype=torch.int64, device=x.device)
    _entries_kernel[(programs,)](
        entries_ptr=entries, boundaries_ptr=boundaries, B=count,
        CELLS=cells, LEVELS=count.bit_length(), **BUILD_TILE,
    )  # fmt: skip
    config = GRID.pick(
        x.device, itemsize=x.element_size(), index_bytes=out.element_size(), cells=cells
    )
    most = RESIDENT // config["num_warps"] * sm_count(x.device)
    _grid_kernel[(min(-(-n // config["BLOCK"]), most),)](
        x_ptr=x, boundaries_ptr=boundaries, entries_ptr=entries, out_ptr=out, N=n, B=count,
        CELLS=cells, LENGTHS=programs, RIGHT=right, **config,
    )  # fmt: skip

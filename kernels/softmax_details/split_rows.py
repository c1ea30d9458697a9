"""Softmax of rows that outgrow the registers of a program: several programs hold each.

Everything is read once. Forward each thread weighs what it holds against the maximum of that, so
one exponential an element is enough, and nobody waits for a maximum first. The weights of a row
meet in one exchange of a maximum and a sum (`_triton/exchange.py`), and a factor a thread corrects
them. Backward y and dy are held as they came, and a sum is exchanged. The hardware deals the rows
out, and programs of several rows share a multiprocessor, so that one waits and computes while
another loads. The clusters of QuACK hold a row likewise, and exchange through shared memory.

Rows of any width are held so, split (`_triton/row_access.py`) where they begin at any element.
Where accesses are single elements all the same, since tensors lie differently, more programs hold a
row and each thread less of it.

How many programs a multiprocessor has is decided by the weights, which are kept in float32. Where
the results are bfloat16 two of them share a register: of a weight between zero and one the sign
and the highest bit of the exponent are zero, which leaves nine bits for the mantissa, two more than
the result has. The result is then at most 1.25 times as far off as one rounding.
"""

import torch
import triton
import triton.language as tl

from .._runtime.layout import ACCESS_BYTES
from .._triton.exchange import empty_slots, exchange_partials, may_wait
from .._triton.math import LOG2E
from .._triton.memory import load_f32, opaque_zero, store_as, to_f32_rematerialized
from .._triton.row_access import edges, inner, most_whole, whole
from .rows import finite_or_zero

# What a thread holds of a tensor at most, in chunks of an access. Of rows whose accesses are single
# elements half as much, if those have 16 bits: each takes a register.
MOST_CHUNKS = 8
# Many small programs overlap best; of rows beyond so many bytes fewer that wait for each other are
# better, where they need no masks, for which there are no registers.
WARPS, MORE_WARPS = 4, 8
SHORT_BYTES = 131072
# So many programs of WARPS fit a multiprocessor for sure, since no thread has more than 128
# registers. One of MORE_WARPS takes the room of two, and there are half as many of them.
PER_SM = 4
# Whole accesses, and sizes that Triton knows to be multiples of them.
ALIGNMENT = 16
# Two float32 numbers in 0 to 1 to one register, rounded to nearest, and back. Written in Triton the
# compiler would move the unpacking to the packing, and keep all in float32 as before.
PACK = tl.constexpr(
    "{ .reg .b32 low, high; "
    "mad.lo.u32 low, $1, 4, 0x8000; "
    "mad.lo.u32 high, $2, 4, 0x8000; "
    "prmt.b32 $0, low, high, 0x7632; }"
)
UNPACK = tl.constexpr(
    "{ shl.b32 $0, $2, 14; "
    "and.b32 $0, $0, 0x3fffc000; "
    "shr.u32 $1, $2, 2; "
    "and.b32 $1, $1, 0x3fffc000; }"
)


@triton.jit
def _weighed(top, total, other_top, other_total):
    """The maximum of two parts of a row, and the sum of their weights against it."""
    both = tl.maximum(top, other_top)
    base = finite_or_zero(both)
    return both, total * tl.exp2(top - base) + other_total * tl.exp2(other_top - base)


@triton.jit
def _packed(weight):
    """Weights from zero to one in int16, with which a NaN is lost."""
    bits = weight.to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise(PACK, "=r,r,r", [bits], dtype=tl.int16, is_pure=False, pack=2)


@triton.jit
def _unpacked(packed):
    bits = tl.inline_asm_elementwise(
        UNPACK, "=r,=r,r", [packed], dtype=tl.int32, is_pure=False, pack=2
    )
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _forward_shared_kernel(
    x_ptr, y_ptr, slots_ptr, stride_xm, N, scale,
    ACCESS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr, HOLDERS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """y = exp(scale x - max scale x) / sum exp(scale x - max scale x) of rows of N elements.

    Grid: HOLDERS programs for each row, side by side. A program has CHUNKS blocks of BLOCK_N
    columns and waits for the others of its row, so `may_wait` must hold. Reads x, whose rows lie
    stride_xm apart; writes y, whose rows lie N apart, and two words for each program in slots,
    int32 [M, HOLDERS, 2], all NOT_READY before. scale: positive. ACCESS divides BLOCK_N; EVEN:
    HOLDERS CHUNKS BLOCK_N == N; PACKED: y is bfloat16. SPLIT: rows are split as in
    `_triton/row_access.py`, and the last program of a row has its edges.
    """
    holder = tl.program_id(0) % HOLDERS
    row = (tl.program_id(0) // HOLDERS).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    slope = tl.cast(scale, tl.float32) * LOG2E
    # A line of this tile is what one thread has.
    ACCESSES: tl.constexpr = BLOCK_N // ACCESS
    offs = tl.arange(0, ACCESSES)[:, None] * ACCESS + tl.arange(0, ACCESS)[None, :]
    offs += holder * (CHUNKS * BLOCK_N)
    width = N
    if SPLIT:
        lead, width = whole(x_ptr, N)
        places, there = edges(lead, width, N, x_ptr.dtype)
        there &= holder == HOLDERS - 1
        edge = tl.load(x_ptr + places, mask=there, other=-float("inf")).to(tl.float32)
        x_ptr = inner(x_ptr, lead)
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * BLOCK_N + offs
        chunks += (tl.load(x_ptr + columns, mask=(columns < width) | EVEN, other=-float("inf")),)
    top = chunks[0].to(tl.float32)
    for chunk in tl.static_range(1, CHUNKS):
        top = tl.maximum(top, chunks[chunk].to(tl.float32))
    # A whole number is the same wherever it is used, and its powers are exact; a product would be
    # fused with some of the differences below, and rounded in others.
    top = tl.ceil(tl.max(top, 1) * slope)
    base = finite_or_zero(top)[:, None]
    zero = opaque_zero(base)
    total = tl.zeros((ACCESSES,), tl.float32)
    weights = ()
    for chunk in tl.static_range(CHUNKS):
        weight = tl.exp2(to_f32_rematerialized(chunks[chunk], zero) * slope - base)
        total += tl.sum(weight, 1)
        if PACKED:
            # One chunk after the other, or all would be in float32 at once.
            zero = opaque_zero(total)[:, None]
            weight = _packed(weight)
        weights += (weight,)
    row_top, row_total = tl.reduce((top, total), 0, _weighed)
    if SPLIT:
        edge_top = tl.ceil(tl.max(edge, 0) * slope)
        at_edge = tl.exp2(edge * slope - finite_or_zero(edge_top))
        row_top, row_total = _weighed(row_top, row_total, edge_top, tl.sum(at_edge, 0))
    slots_ptr += row * (2 * HOLDERS)
    tops, totals = exchange_partials(slots_ptr, holder, row_top, row_total, HOLDERS)
    row_base = finite_or_zero(tl.max(tops, 0))
    row_total = tl.sum(totals * tl.exp2(tops - row_base), 0)
    # Not by the base of the thread: of one that has seen only minus infinity it is zero, and the
    # factor would be infinite where the others have seen little more.
    factor = (tl.exp2(top - row_base) / row_total)[:, None]
    if SPLIT:
        store_as(y_ptr + places, at_edge * (tl.exp2(edge_top - row_base) / row_total), there)
        y_ptr = inner(y_ptr, lead)
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * BLOCK_N + offs
        weight = _unpacked(weights[chunk]) if PACKED else weights[chunk]
        store_as(y_ptr + columns, weight * factor, (columns < width) | EVEN)


@triton.jit
def _backward_shared_kernel(
    y_ptr, dy_ptr, dx_ptr, slots_ptr, stride_ym, stride_dym, N, scale,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr,
    HOLDERS: tl.constexpr,
):  # fmt: skip
    """dx = scale y (dy - sum y dy) of rows of N elements.

    Grid, slots and constants: as of the forward kernel, with which a program shares a row. Reads y
    and dy, whose rows lie stride_ym and stride_dym apart; writes dx, whose rows lie N apart.
    """
    holder = tl.program_id(0) % HOLDERS
    row = (tl.program_id(0) // HOLDERS).to(tl.int64)
    y_ptr += row * stride_ym
    dy_ptr += row * stride_dym
    dx_ptr += row * N
    offs = holder * (CHUNKS * BLOCK_N) + tl.arange(0, BLOCK_N)
    width = N
    if SPLIT:
        lead, width = whole(y_ptr, N)
        places, there = edges(lead, width, N, y_ptr.dtype)
        there &= holder == HOLDERS - 1
        y_edge = load_f32(y_ptr + places, there)
        dy_edge = load_f32(dy_ptr + places, there)
        y_ptr, dy_ptr = inner(y_ptr, lead), inner(dy_ptr, lead)
    ys, dys = (), ()
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * BLOCK_N + offs
        inside = (columns < width) | EVEN
        ys += (tl.load(y_ptr + columns, mask=inside, other=0.0),)
        dys += (tl.load(dy_ptr + columns, mask=inside, other=0.0),)
    products = tl.zeros((BLOCK_N,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        products += ys[chunk].to(tl.float32) * dys[chunk].to(tl.float32)
    own = tl.sum(products, 0)
    if SPLIT:
        own += tl.sum(y_edge * dy_edge, 0)
    sums, _ = exchange_partials(slots_ptr + row * (2 * HOLDERS), holder, own, own, HOLDERS)
    weighted = tl.sum(sums, 0)
    if SPLIT:
        store_as(dx_ptr + places, y_edge * (dy_edge - weighted) * scale, there)
        dx_ptr = inner(dx_ptr, lead)
    zero = opaque_zero(weighted)
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * BLOCK_N + offs
        y, dy = to_f32_rematerialized(ys[chunk], zero), to_f32_rematerialized(dys[chunk], zero)
        dx = y * (dy - weighted) * scale
        store_as(dx_ptr + columns, dx, (columns < width) | EVEN)


def shares(n: int, *tensors: torch.Tensor, strides: tuple[int, ...], parted: bool) -> bool:
    """Whether programs share rows of n elements of these tensors, so many elements apart: those of
    a row wait for each other. parted: whether a kernel is to split the rows."""
    # A traced graph has no addresses to ask for, and no programs that wait.
    if torch.compiler.is_dynamo_compiling():
        return False
    wide = parted or _wide(n, *tensors, strides=strides)
    held = _held(n, tensors[0].element_size(), WARPS, wide, parted)
    return may_wait(tensors[0].device, held["HOLDERS"], PER_SM)


def _wide(n: int, *tensors: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a thread can load 16 bytes of these rows at once."""
    sizes = (n, *strides, *(tensor.data_ptr() for tensor in tensors))
    return not any(size % ALIGNMENT for size in sizes)


def _held(n: int, itemsize: int, warps: int, wide: bool, parted: bool) -> dict[str, int]:
    """How programs of so many warps share a row of n elements, each in chunks of equal length."""
    block = 32 * warps * ACCESS_BYTES // itemsize
    most = MOST_CHUNKS if wide or itemsize == 4 else MOST_CHUNKS // 2
    held = most_whole(n, itemsize) if parted else n
    holders = triton.next_power_of_2(-(-held // (most * block)))
    chunks = -(-held // (holders * block))
    return {
        "EVEN": not parted and n == holders * chunks * block,
        "SPLIT": parted,
        "CHUNKS": chunks,
        "BLOCK_N": block,
        "HOLDERS": holders,
        "num_warps": warps,
    }


def forward_shared(
    x: torch.Tensor, y: torch.Tensor, stride: int, scale: float, parted: bool
) -> None:
    """y = softmax(scale x) of rows [..., N] that lie `stride` elements apart; scale positive.

    parted: whether the kernel splits the rows.
    """
    n, itemsize = x.shape[-1], x.element_size()
    wide = parted or _wide(n, x, strides=(stride,))
    m, held = y.numel() // n, _held(n, itemsize, MORE_WARPS, wide, parted)
    if n * itemsize <= SHORT_BYTES or not held["EVEN"]:
        held = _held(n, itemsize, WARPS, wide, parted)
    holders = held["HOLDERS"]
    _forward_shared_kernel[(m * holders,)](
        x_ptr=x, y_ptr=y,
        slots_ptr=empty_slots(m, holders, x.device), stride_xm=stride, N=n, scale=scale,
        ACCESS=ACCESS_BYTES // itemsize, PACKED=y.dtype is torch.bfloat16, **held,
    )  # fmt: skip


def backward_shared(
    y: torch.Tensor,
    dy: torch.Tensor,
    dx: torch.Tensor,
    strides: tuple[int, int],
    scale: float,
    parted: bool,
) -> None:
    """dx = scale y (dy - sum y dy) of rows [..., N]; those of y and dy lie `strides` apart.

    parted: as forward.
    """
    n = y.shape[-1]
    wide = parted or _wide(n, y, dy, strides=strides)
    held = _held(n, y.element_size(), WARPS, wide, parted)
    m, holders = dx.numel() // n, held["HOLDERS"]
    _backward_shared_kernel[(m * holders,)](
        y_ptr=y, dy_ptr=dy, dx_ptr=dx,
        slots_ptr=empty_slots(m, holders, y.device), stride_ym=strides[0], stride_dym=strides[1],
        N=n, scale=scale, **held,
    )  # fmt: skip

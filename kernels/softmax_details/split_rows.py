"""Softmax of rows that outgrow the registers of a program: several programs hold each.

Each element is read once. In the forward pass a thread computes its numerators against its own
maximum. So each element takes one exponential, and no program waits for a maximum first. The
programs of a row exchange a maximum and a sum once (`_triton/exchange.py`), and each thread
multiplies its numerators by one factor. In the backward pass y and dy stay in registers in their
dtype, and the programs exchange a sum. Programs of several rows share a multiprocessor, so one
waits and computes while another one loads. QuACK's clusters hold a row likewise, but they exchange
through shared memory.

Rows that begin at any element are peeled (`_triton/row_access.py`). If the
tensors lie differently, accesses are single elements. Then more programs hold a row, and each
thread holds less of it.

The numerators are in float32, and their registers decide how many programs a multiprocessor has. If
the results are bfloat16, two numerators share a register. The sign and the highest bit of the
exponent of a number from zero to one are zero. That leaves nine bits for the mantissa, two more
than the result has, so the result is at most 1.25 times as far off as one rounding.
"""

import torch
import triton
import triton.language as tl

from .._runtime.layout import ACCESS_BYTES
from .._triton.exchange import empty_slots, exchange_partials, may_wait
from .._triton.math import LOG2E
from .._triton.memory import load_f32, opaque_zero, store_as, to_f32_rematerialized
from .._triton.row_access import body_ptr, max_body, peeled_columns, vector_body
from .rows import finite_or_zero

# The most chunks, each an access, that a thread holds of a tensor. With accesses of single elements
# it holds half as many chunks of 16-bit rows, because each element takes a register.
MOST_CHUNKS = 8
# Many small programs overlap best. Rows of more than SHORT_BYTES are faster with fewer programs
# that wait for each other, but only if they need no masks, for which there are no registers.
WARPS, MORE_WARPS = 4, 8
SHORT_BYTES = 131072
# A multiprocessor has room for so many programs of WARPS, since no thread has more than 128
# registers. A program of MORE_WARPS takes the room of two, and there are half as many of them.
PER_SM = 4
# Vector accesses need sizes and addresses that Triton knows to be multiples of this.
ALIGNMENT = 16
# Packs two float32 numbers in 0 to 1 into one register, rounded to nearest, and unpacks them. In
# Triton the compiler would move the unpacking to the packing, and keep all in float32 as before.
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
def _combined(m, l, other_m, other_l):
    """Return the maximum of two parts of a row, and the sum of their numerators against it."""
    both = tl.maximum(m, other_m)
    base = finite_or_zero(both)
    return both, l * tl.exp2(m - base) + other_l * tl.exp2(other_m - base)


@triton.jit
def _packed(numerator):
    """Return numbers from zero to one in int16; a NaN is lost."""
    bits = numerator.to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise(PACK, "=r,r,r", [bits], dtype=tl.int16, is_pure=False, pack=2)


@triton.jit
def _unpacked(packed):
    """Return the numbers of `_packed` in float32."""
    bits = tl.inline_asm_elementwise(
        UNPACK, "=r,=r,r", [packed], dtype=tl.int32, is_pure=False, pack=2
    )
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _forward_split_kernel(
    x_ptr, y_ptr, slots_ptr, stride_xm, N, scale,
    ACCESS: tl.constexpr, EVEN_N: tl.constexpr, PEELED: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """y = exp(scale x - max scale x) / sum exp(scale x - max scale x) of rows of N elements.

    Grid: M NUM_SPLITS. The programs of a row have neighbouring numbers. A program owns NUM_CHUNKS
    chunks of BLOCK_N columns and waits for the others of its row, so `may_wait` must hold. It reads
    x, whose rows lie stride_xm apart, and writes y, whose rows lie N apart. It also writes a pair
    of words to slots, int32 [M, NUM_SPLITS, 2], which are all NOT_READY before.

    scale is positive and normal. ACCESS divides BLOCK_N; a thread has ACCESS neighbours. EVEN_N:
    NUM_SPLITS NUM_CHUNKS BLOCK_N == N. PACKED: y is bfloat16. PEELED: `needs_peeling` of
    `_triton/row_access.py` holds for x and y; the last program of a row has the peeled elements.
    """
    split_id = tl.program_id(0) % NUM_SPLITS
    row = (tl.program_id(0) // NUM_SPLITS).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    scale_log2e = tl.cast(scale, tl.float32) * LOG2E
    # One thread has a line of this tile.
    ACCESSES: tl.constexpr = BLOCK_N // ACCESS
    offs = tl.arange(0, ACCESSES)[:, None] * ACCESS + tl.arange(0, ACCESS)[None, :]
    offs += split_id * (NUM_CHUNKS * BLOCK_N)
    width = N
    if PEELED:
        lead, width = vector_body(x_ptr, N)
        peel_cols, peel_mask = peeled_columns(lead, width, N, x_ptr.dtype)
        peel_mask &= split_id == NUM_SPLITS - 1
        peel = tl.load(x_ptr + peel_cols, mask=peel_mask, other=-float("inf")).to(tl.float32)
        x_ptr = body_ptr(x_ptr, lead)
    chunks = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        columns = chunk * BLOCK_N + offs
        chunks += (tl.load(x_ptr + columns, mask=(columns < width) | EVEN_N, other=-float("inf")),)
    m_lanes = chunks[0].to(tl.float32)
    for chunk in tl.static_range(1, NUM_CHUNKS):
        m_lanes = tl.maximum(m_lanes, chunks[chunk].to(tl.float32))
    # Powers of a whole number are exact. A product would be fused with some of the differences
    # below and rounded in others.
    m_lanes = tl.ceil(tl.max(m_lanes, 1) * scale_log2e)
    base = finite_or_zero(m_lanes)[:, None]
    zero = opaque_zero(base)
    l = tl.zeros((ACCESSES,), tl.float32)
    numerators = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        numerator = tl.exp2(to_f32_rematerialized(chunks[chunk], zero) * scale_log2e - base)
        l += tl.sum(numerator, 1)
        if PACKED:
            # One chunk after the other, or all would be in float32 at once.
            zero = opaque_zero(l)[:, None]
            numerator = _packed(numerator)
        numerators += (numerator,)
    row_m, row_l = tl.reduce((m_lanes, l), 0, _combined)
    if PEELED:
        peel_m = tl.ceil(tl.max(peel, 0) * scale_log2e)
        at_peel = tl.exp2(peel * scale_log2e - finite_or_zero(peel_m))
        row_m, row_l = _combined(row_m, row_l, peel_m, tl.sum(at_peel, 0))
    slots_ptr += row * (2 * NUM_SPLITS)
    ms, ls = exchange_partials(slots_ptr, split_id, row_m, row_l, NUM_SPLITS)
    row_base = finite_or_zero(tl.max(ms, 0))
    row_l = tl.sum(ls * tl.exp2(ms - row_base), 0)
    # The base of a thread that has seen only minus infinity is zero. From base, the factor of such
    # a thread would be infinite if the other threads have seen only small numbers.
    factor = (tl.exp2(m_lanes - row_base) / row_l)[:, None]
    if PEELED:
        store_as(y_ptr + peel_cols, at_peel * (tl.exp2(peel_m - row_base) / row_l), peel_mask)
        y_ptr = body_ptr(y_ptr, lead)
    for chunk in tl.static_range(NUM_CHUNKS):
        columns = chunk * BLOCK_N + offs
        numerator = _unpacked(numerators[chunk]) if PACKED else numerators[chunk]
        store_as(y_ptr + columns, numerator * factor, (columns < width) | EVEN_N)


@triton.jit
def _backward_split_kernel(
    y_ptr, dy_ptr, dx_ptr, slots_ptr, stride_ym, stride_dym, N, scale,
    EVEN_N: tl.constexpr, PEELED: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """dx = scale y (dy - sum y dy) of rows of N elements.

    Grid: M NUM_SPLITS, as in the forward kernel. A program owns NUM_CHUNKS chunks of BLOCK_N
    columns. It reads y and dy, whose rows lie stride_ym and stride_dym apart. It writes dx, whose
    rows lie N apart, and its pair of words in slots.

    The constexprs are those of `_forward_split_kernel`; if PEELED, `needs_peeling` holds for y,
    dy and dx.
    """
    split_id = tl.program_id(0) % NUM_SPLITS
    row = (tl.program_id(0) // NUM_SPLITS).to(tl.int64)
    y_ptr += row * stride_ym
    dy_ptr += row * stride_dym
    dx_ptr += row * N
    offs = split_id * (NUM_CHUNKS * BLOCK_N) + tl.arange(0, BLOCK_N)
    width = N
    if PEELED:
        lead, width = vector_body(y_ptr, N)
        peel_cols, peel_mask = peeled_columns(lead, width, N, y_ptr.dtype)
        peel_mask &= split_id == NUM_SPLITS - 1
        y_peel = load_f32(y_ptr + peel_cols, peel_mask)
        dy_peel = load_f32(dy_ptr + peel_cols, peel_mask)
        y_ptr, dy_ptr = body_ptr(y_ptr, lead), body_ptr(dy_ptr, lead)
    ys, dys = (), ()
    for chunk in tl.static_range(NUM_CHUNKS):
        columns = chunk * BLOCK_N + offs
        inside = (columns < width) | EVEN_N
        ys += (tl.load(y_ptr + columns, mask=inside, other=0.0),)
        dys += (tl.load(dy_ptr + columns, mask=inside, other=0.0),)
    products = tl.zeros((BLOCK_N,), tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        products += ys[chunk].to(tl.float32) * dys[chunk].to(tl.float32)
    own = tl.sum(products, 0)
    if PEELED:
        own += tl.sum(y_peel * dy_peel, 0)
    sums, _ = exchange_partials(slots_ptr + row * (2 * NUM_SPLITS), split_id, own, own, NUM_SPLITS)
    delta = tl.sum(sums, 0)
    if PEELED:
        store_as(dx_ptr + peel_cols, y_peel * (dy_peel - delta) * scale, peel_mask)
        dx_ptr = body_ptr(dx_ptr, lead)
    zero = opaque_zero(delta)
    for chunk in tl.static_range(NUM_CHUNKS):
        columns = chunk * BLOCK_N + offs
        y, dy = to_f32_rematerialized(ys[chunk], zero), to_f32_rematerialized(dys[chunk], zero)
        dx = y * (dy - delta) * scale
        store_as(dx_ptr + columns, dx, (columns < width) | EVEN_N)


def can_split_rows(n: int, *tensors: torch.Tensor, strides: tuple[int, ...], peeled: bool) -> bool:
    """Return whether several programs hold each row of n elements and wait for each other.

    tensors, strides: the tensors and the distances of their rows in elements. peeled: whether the
    rows are peeled.
    """
    # A traced graph has no addresses to ask for, and no programs that wait.
    if torch.compiler.is_dynamo_compiling():
        return False
    wide = peeled or _wide(n, *tensors, strides=strides)
    held = _held(n, tensors[0].element_size(), WARPS, wide, peeled)
    return may_wait(tensors[0].device, held["NUM_SPLITS"], PER_SM)


def _wide(n: int, *tensors: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Return whether a thread can load 16 bytes of these rows at once."""
    sizes = (n, *strides, *(tensor.data_ptr() for tensor in tensors))
    return not any(size % ALIGNMENT for size in sizes)


def _held(n: int, itemsize: int, warps: int, wide: bool, peeled: bool) -> dict[str, int]:
    """Return how programs of so many warps hold a row of n elements, in chunks of equal length."""
    block = 32 * warps * ACCESS_BYTES // itemsize
    most = MOST_CHUNKS if wide or itemsize == 4 else MOST_CHUNKS // 2
    held = max_body(n, itemsize) if peeled else n
    num_splits = triton.next_power_of_2(-(-held // (most * block)))
    chunks = -(-held // (num_splits * block))
    return {
        "EVEN_N": not peeled and n == num_splits * chunks * block,
        "PEELED": peeled,
        "NUM_CHUNKS": chunks,
        "BLOCK_N": block,
        "NUM_SPLITS": num_splits,
        "num_warps": warps,
    }


def forward_split(
    x: torch.Tensor, y: torch.Tensor, stride: int, scale: float, peeled: bool
) -> None:
    """Write softmax(scale x) of rows [..., N] that lie `stride` elements apart to y.

    scale is positive. peeled: as in `can_split_rows`.
    """
    n, itemsize = x.shape[-1], x.element_size()
    wide = peeled or _wide(n, x, strides=(stride,))
    m, held = y.numel() // n, _held(n, itemsize, MORE_WARPS, wide, peeled)
    if n * itemsize <= SHORT_BYTES or not held["EVEN_N"]:
        held = _held(n, itemsize, WARPS, wide, peeled)
    num_splits = held["NUM_SPLITS"]
    _forward_split_kernel[(m * num_splits,)](
        x_ptr=x, y_ptr=y,
        slots_ptr=empty_slots(m, num_splits, x.device), stride_xm=stride, N=n, scale=scale,
        ACCESS=ACCESS_BYTES // itemsize, PACKED=y.dtype is torch.bfloat16, **held,
    )  # fmt: skip


def backward_split(
    y: torch.Tensor,
    dy: torch.Tensor,
    dx: torch.Tensor,
    strides: tuple[int, int],
    scale: float,
    peeled: bool,
) -> None:
    """Write scale y (dy - sum y dy) to dx; rows of y and dy lie `strides` elements apart.

    peeled: as in `can_split_rows`.
    """
    n = y.shape[-1]
    wide = peeled or _wide(n, y, dy, strides=strides)
    held = _held(n, y.element_size(), WARPS, wide, peeled)
    m, num_splits = dx.numel() // n, held["NUM_SPLITS"]
    _backward_split_kernel[(m * num_splits,)](
        y_ptr=y, dy_ptr=dy, dx_ptr=dx,
        slots_ptr=empty_slots(m, num_splits, y.device), stride_ym=strides[0], stride_dym=strides[1],
        N=n, scale=scale, **held,
    )  # fmt: skip

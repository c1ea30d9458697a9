"""Loads and stores of tiles that compute in float32 and live in any dtype."""

import triton
import triton.language as tl

# Two bfloat16 numbers of a register in float32, whose upper half they are. The factor and the mask
# are registers. As constants they would let the compiler keep what it has widened before.
WIDEN_PAIR = tl.constexpr("mad.lo.u32 $0, $2, $3, 0; and.b32 $1, $2, $5;")


@triton.jit
def load_f32(ptrs, mask):
    """The tile in float32, zero where the mask is false."""
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_f32_hinted(ptrs, mask, POLICY: tl.constexpr):
    """As `load_f32`; POLICY says what the cache shall do with the lines afterwards."""
    return tl.load(ptrs, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def store_as(ptrs, value, mask):
    """Stores the tile in the dtype the pointers point to."""
    tl.store(ptrs, value.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def opaque_zero(value):
    """Zero in int32; the compiler does not know, and has to wait for `value`, of four bytes.

    No grid here has a third axis. A size would not do: one that is a constant, as 1 always is,
    gives the zero away.
    """
    return tl.program_id(2) & value.to(tl.int32, bitcast=True)


@triton.jit
def to_f32_rematerialized(x, zero):
    """x in float32. With a `zero` of its own each use widens anew what is kept packed; without
    one the compiler would widen once and keep the wide copy through all uses."""
    if x.dtype.primitive_bitwidth == 16:
        x = (x.to(tl.int16, bitcast=True) ^ zero.to(tl.int16)).to(x.dtype, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def pairs_to_f32_rematerialized(x, zero, HAS_PTX: tl.constexpr):
    """As `widened`; a bfloat16 number takes one instruction if the GPU has those of NVIDIA.

    The compiler's own way takes two or three. zero: int32 that broadcasts to x, or None at
    the first use.
    """
    if HAS_PTX and x.dtype == tl.bfloat16:
        factor = tl.full(x.shape, 0x10000, tl.int32)
        mask = tl.full(x.shape, -0x10000, tl.int32)
        if zero is not None:
            factor += zero
            mask += zero
        bits = tl.inline_asm_elementwise(
            WIDEN_PAIR, "=r,=r,r,r,r,r,r", [x.to(tl.int16, bitcast=True), factor, mask],
            dtype=tl.int32, is_pure=True, pack=2,
        )  # fmt: skip
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.float32) if zero is None else to_f32_rematerialized(x, zero)

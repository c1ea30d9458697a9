"""Loads and stores of tiles that compute in float32 and lie in memory in any dtype."""

import triton
import triton.language as tl

# Converts two bfloat16 numbers of a register to float32, whose upper half they are. The factor and
# the mask are registers. With constants the compiler would keep the results of an earlier use.
WIDEN_PAIR = tl.constexpr("mad.lo.u32 $0, $2, $3, 0; and.b32 $1, $2, $5;")


@triton.jit
def load_f32(ptrs, mask):
    """Return the tile in float32, zero if the mask is false."""
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_f32_hinted(ptrs, mask, POLICY: tl.constexpr):
    """Return the tile as `load_f32` does; POLICY tells the cache what to do with its lines."""
    return tl.load(ptrs, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def store_as(ptrs, value, mask):
    """Store the tile in the dtype to which the pointers point."""
    tl.store(ptrs, value.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def opaque_zero(value):
    """Return zero in int32, which the compiler cannot know before it has `value`, of four bytes.

    It is a barrier of optimization: an operation that takes the zero cannot move before `value`.
    Program number 2 is zero, because no grid here has a third axis. A size would not do, because
    Triton makes a size of 1 a constant, and the compiler would see the zero.
    """
    return tl.program_id(2) & value.to(tl.int32, bitcast=True)


@triton.jit
def to_f32_rematerialized(x, zero):
    """Return x in float32, converted anew for each `zero` of `opaque_zero`.

    So x stays packed between two uses. Otherwise the compiler would convert it once and keep the
    wide copy, of twice the registers, through all uses.
    """
    if x.dtype.primitive_bitwidth == 16:
        x = (x.to(tl.int16, bitcast=True) ^ zero.to(tl.int16)).to(x.dtype, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def pairs_to_f32_rematerialized(x, zero, HAS_PTX: tl.constexpr):
    """Return x as `to_f32_rematerialized` does; on NVIDIA a bfloat16 takes one instruction.

    The compiler's own way takes two or three. zero: int32 that broadcasts to x, or None at the
    first use.
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

"""Loads and stores of tiles that compute in float32 and live in any dtype."""

import triton
import triton.language as tl


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

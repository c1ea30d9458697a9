"""Loads and stores of tiles that compute in float32 and live in any dtype."""

import triton
import triton.language as tl

# As a default argument a bare string is not taken for a constant.
NO_POLICY = tl.constexpr("")


@triton.jit
def load_f32(ptrs, mask, POLICY: tl.constexpr = NO_POLICY):
    """The tile in float32, zero where the mask is false; POLICY is its eviction policy."""
    return tl.load(ptrs, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def store_as(ptrs, value, mask):
    """Stores the tile in the dtype the pointers point to."""
    tl.store(ptrs, value.to(ptrs.dtype.element_ty), mask=mask)

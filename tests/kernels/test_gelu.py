"""Check the short gelu of a product's epilogue at each number of 16 bits."""

import pytest
import torch

from kernels._triton import math as formulas
from tests.support.product_threads import in_torch

# The largest relative error of the tail below -4, whose numbers are smaller than 1.3e-4.
TAILS = {torch.float16: 0.007, torch.bfloat16: 0.14}


@pytest.mark.parametrize("dtype", TAILS)
def test_gelu_of_each_number_of_16_bits_errs_by_less_than_half_a_unit(dtype):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    x, brief = every.float(), dtype == torch.bfloat16
    with in_torch(formulas):
        out = formulas.gelu_of(x, False, brief)
    wide = x.double()
    true = 0.5 * wide * torch.special.erfc(-wide / 2**0.5)
    # Infinity stays, and minus infinity has no gelu, as in PyTorch.
    assert torch.equal(out[x.isinf() | x.isnan()].isnan(), true[x.isinf() | x.isnan()].isnan())
    assert out[x == torch.inf] == torch.inf
    kind = torch.finfo(dtype)
    finite = x.isfinite() & (true.abs() <= kind.max)
    unit = torch.exp2(true.abs().clamp_min(kind.tiny).log2().floor()) * kind.eps
    error = (out.double() - true).abs() / unit
    assert error[finite & (x > -4)].max() < 0.5
    tail = (x < -4) & (x > -13)
    assert ((out.double() - true).abs()[tail] <= TAILS[dtype] * true.abs()[tail]).all()
    # Further out it is as good as zero.
    assert out[finite & (x < -13)].abs().max() < 1e-36

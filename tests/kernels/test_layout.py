"""Check which tensors the GPU's copy engine can read, with memory and without, as in a build."""

import pytest
import torch

from kernels._runtime.layout import tma_compatible


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("offset", "fits"), [(0, True), (1, False), (4, False), (8, True)])
def test_a_tensor_is_described_where_its_first_element_is_aligned(device, offset, fits):
    storage = torch.empty(8 * 64 + 8, device=device, dtype=torch.float16)
    assert tma_compatible(storage[offset : offset + 512].view(8, 64)) == fits

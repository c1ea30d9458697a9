"""Check which tensors the GPU's copy engine can read, with memory and without, as in a build."""

import pytest
import torch

from kernels._runtime.layout import tma_compatible
from kernels._runtime.vector_access import access_items


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("offset", "fits"), [(0, True), (1, False), (4, False), (8, True)])
def test_a_tensor_is_described_where_its_first_element_is_aligned(device, offset, fits):
    storage = torch.empty(8 * 64 + 8, device=device, dtype=torch.float16)
    assert tma_compatible(storage[offset : offset + 512].view(8, 64)) == fits


@pytest.mark.parametrize(
    ("itemsize", "sizes", "items"),
    [(2, (64, 64), 8), (2, (5112,), 8), (2, (706, 712), 2), (4, (12, 8), 4), (2, (7, 64), 1)],
)
def test_the_items_of_an_access_divide_all_sizes(itemsize, sizes, items):
    assert access_items(itemsize, *sizes) == items

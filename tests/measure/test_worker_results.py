"""Check how the worker poisons results and compares them."""

import pytest
import torch

from harness.calls.tolerance import same_bits
from harness.measure import worker


def test_special_values_compare_by_place():
    a = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    assert worker._close(a, a.clone()) and same_bits(a, a.clone())
    for index in range(4):
        b = a.clone()
        b[index] = 5.0
        assert not worker._close(a, b) and not same_bits(a, b)
    assert not same_bits(torch.zeros(1), -torch.zeros(1))
    assert not worker._close(a, a.half())
    assert worker._close(torch.empty(0, 3), torch.empty(0, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_bits_are_compared_in_every_dtype(dtype):
    a = torch.arange(6).to(dtype).view(2, 3)
    assert same_bits(a.mT, a.mT.contiguous())
    assert not same_bits(a, a + 1)


def test_a_result_that_is_a_view_made_without_gradients_is_poisoned():
    kept = torch.ones(6, requires_grad=True).clone()
    with torch.no_grad():
        result = kept.view(2, 3)
    worker._poison((result,), ())
    assert result.isnan().all()

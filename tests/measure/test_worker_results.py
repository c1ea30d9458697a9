"""Check how the worker poisons results and compares them."""

import pytest
import torch

from harness.calls.tolerance import same_bits
from harness.measure import worker
from harness.status import Inaccurate
from tests.support.cpu_worker import CELL


@pytest.mark.parametrize("exact", [True, False])
def test_special_values_compare_by_place(exact):
    a = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    assert worker._agree(a, a.clone(), exact)
    for index in range(4):
        b = a.clone()
        b[index] = 5.0
        assert not worker._agree(a, b, exact)
    assert worker._agree(torch.zeros(1), -torch.zeros(1), exact) is not exact
    assert not worker._agree(a, a.half(), exact)
    assert not worker._agree(a, a.view(2, 2), exact)
    assert worker._agree(torch.empty(0, 3), torch.empty(0, 3), exact)


@pytest.mark.parametrize("exact", [True, False])
def test_all_parts_of_a_result_are_compared_by_its_largest_entry(exact, monkeypatch):
    monkeypatch.setattr(worker, "CHUNK", 4)
    a = torch.tensor([[1e3, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    near, far = a.clone(), a.clone()
    near[1, 3] += 0.009
    far[1, 3] += 0.02
    assert worker._agree(a, near, exact) is not exact
    assert not worker._agree(a, far, exact)
    assert worker._agree(a.mT, a.mT.contiguous(), exact)


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_large_results_are_kept_in_the_memory_of_the_host(share, make, monkeypatch):
    monkeypatch.setattr(worker, "INPUT_SHARE", share)
    made = make(lambda x, bias: 2 * x, passes=("forward",))
    made.prepare(**CELL, pass_="forward")
    made.block(3)
    made.check()
    (kept,) = made._expected[-1]
    kept[5] += 1
    with pytest.raises(Inaccurate, match="output 0 of a timed call is not bitwise equal"):
        made.check()


def test_a_copy_for_the_host_is_asked_for_by_name(monkeypatch):
    """Without a GPU the meta device takes the place of one."""
    monkeypatch.setattr(worker, "_memory", lambda share: 100)
    large, small = (torch.empty(size, device="meta") for size in (26, 25))
    asked = []
    monkeypatch.setattr(
        torch.Tensor, "to", lambda tensor, *a, **k: asked.append((tensor.numel(), a, k))
    )
    worker._kept_apart((large,))
    worker._kept_apart((small,))
    assert asked == [(26, ("cpu",), {"copy": True})]


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

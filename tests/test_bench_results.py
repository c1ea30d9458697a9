"""How the bench poisons results and compares them."""

import pytest
import torch

from harness import bench


def test_special_values_compare_by_place():
    a = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    assert bench._close(a, a.clone()) and bench._same_bits(a, a.clone())
    for index in range(4):
        b = a.clone()
        b[index] = 5.0
        assert not bench._close(a, b) and not bench._same_bits(a, b)
    assert not bench._same_bits(torch.zeros(1), -torch.zeros(1))
    assert not bench._close(a, a.half())
    assert bench._close(torch.empty(0, 3), torch.empty(0, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_bits_are_compared_in_every_dtype(dtype):
    a = torch.arange(6).to(dtype).view(2, 3)
    assert bench._same_bits(a.mT, a.mT.contiguous())
    assert not bench._same_bits(a, a + 1)


class Overwriting(torch.autograd.Function):
    """A square whose gradient is written over what was saved, as Liger's swiglu writes it."""

    @staticmethod
    def forward(ctx, x):
        rows = x.view(-1, x.shape[-1])
        ctx.save_for_backward(rows)
        return (rows * rows).view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        rows.detach().copy_(2 * rows * dy.view(rows.shape))
        return rows.view(dy.shape)


def test_a_gradient_that_is_a_view_of_what_was_saved_is_poisoned_and_compared():
    x, dy = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.clone):
        y = Overwriting.apply(x)
    first, second = (torch.autograd.grad(y, x, dy, retain_graph=True) for _ in range(2))
    assert bench._close(first[0], second[0])
    bench._poison(second, (x, y, dy))
    assert second[0].detach().isnan().all()
    assert not bench._close(second[0], first[0])

"""Check views with PyTorch's negative bit, such as the imaginary part of a conjugate."""

import pytest
import torch

from tests.support.op_calls import OPS, call_of


def lazily(tensor):
    """Return a view equal to the tensor whose memory holds the negated values."""
    view = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert view.is_neg() and torch.equal(view, tensor)
    return view


@pytest.mark.parametrize("name", OPS)
def test_a_negated_view_is_read_with_its_sign(name):
    _, function, good, options = call_of(name)
    expected = function(**good, **options)
    for key in good:
        if good[key].is_floating_point():
            found = function(**good | {key: lazily(good[key])}, **options)
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", [name for name in OPS if call_of(name)[0].differentiable])
def test_a_gradient_may_be_a_negated_view(name):
    op, function, good, options = call_of(name)
    for key, tensor in good.items():
        if op.inputs[key].grad:
            tensor.requires_grad_()
    leaves = [tensor for tensor in good.values() if tensor.requires_grad]
    outputs = function(**good, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    plain = [torch.rand_like(output) for output in outputs]
    found, expected = (
        torch.autograd.grad(outputs, leaves, given, retain_graph=True)
        for given in ([lazily(each) for each in plain], plain)
    )
    torch.testing.assert_close(found, expected)

"""Check when a launcher prepares for a backward pass."""

import torch

from kernels._runtime.autograd import needs_grad


def test_a_backward_pass_is_wanted_where_an_input_asks_for_one():
    x, weight = torch.zeros(2), torch.zeros(2, requires_grad=True)
    assert needs_grad(x, None, weight) and not needs_grad(x, None)
    with torch.no_grad():
        assert not needs_grad(weight)

"""Check that an op without a backward pass refuses an input that wants a gradient."""

import pytest
import torch

from tests.support.op_calls import WITHOUT, call_of


def wanting(name):
    """Return the function and its calls; in each call one tensor, by name, wants a gradient."""
    _, function, good, options = call_of(name)
    calls = {
        key: {**good, key: good[key].detach().clone().requires_grad_(), **options}
        for key in good
        if good[key].is_floating_point()
    }
    return function, calls


def test_some_ops_have_no_gradient():
    assert {"matmul"} <= {*WITHOUT}
    assert not any(call_of(name)[0].differentiable for name in WITHOUT)


@pytest.mark.parametrize("name", WITHOUT)
def test_an_input_that_wants_a_gradient_is_refused_by_name(name):
    function, calls = wanting(name)
    for key, given in calls.items():
        with pytest.raises(ValueError, match=rf"^{key}: requires a gradient, .*expected"):
            function(**given)
        with torch.no_grad():
            results = function(**given)
            several = results if isinstance(results, tuple) else (results,)
            assert not any(result.requires_grad for result in several)


@pytest.mark.parametrize("name", WITHOUT)
def test_an_input_that_wants_a_gradient_is_refused_in_a_traced_graph(name):
    function, calls = wanting(name)
    torch.compiler.reset()
    compiled = torch.compile(function, backend="eager")
    for key, given in calls.items():
        with pytest.raises(ValueError, match=rf"^{key}: requires a gradient, .*expected"):
            compiled(**given)

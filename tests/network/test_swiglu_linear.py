"""The gated activation with the product behind it: what it returns, and what it keeps."""

import pytest
import torch

from kernels.gated import swiglu
from kernels.linear import linear
from network.stacks._swiglu_linear import swiglu_linear

SHAPE, WIDTH = (2, 5, 24), 16


def apart(gate, up, weight):
    return linear(swiglu(gate, up), weight)


@pytest.fixture
def leaves():
    draw = torch.Generator().manual_seed(3)
    shapes = SHAPE, SHAPE, (WIDTH, SHAPE[-1])
    return [torch.randn(shape, generator=draw).half().requires_grad_() for shape in shapes]


def results(function, leaves, dout):
    out = function(*leaves)
    return out, *torch.autograd.grad(out, [x for x in leaves if x.requires_grad], dout)


def test_the_results_are_those_of_the_two_apart_bit_by_bit(leaves):
    dout = torch.randn(*SHAPE[:-1], WIDTH, generator=torch.Generator().manual_seed(4)).half()
    # Rows that lie apart, as a transposed result has them.
    for given in (dout, torch.empty(SHAPE[1], SHAPE[0], WIDTH).half().transpose(0, 1).copy_(dout)):
        mine, both = (results(each, leaves, given) for each in (swiglu_linear, apart))
        assert all(torch.equal(one, other) for one, other in zip(mine, both, strict=True))


def test_a_weight_without_a_gradient_costs_nothing(leaves, monkeypatch):
    leaves[2].requires_grad_(False)
    asked = []
    plain = swiglu_linear.__globals__["gated_bwd"]

    def watched(*given):
        asked.append(given[-1])
        return plain(*given)

    monkeypatch.setitem(swiglu_linear.__globals__, "gated_bwd", watched)
    dout = torch.ones(*SHAPE[:-1], WIDTH).half()
    mine, both = (results(each, leaves, dout) for each in (swiglu_linear, apart))
    assert all(torch.equal(one, other) for one, other in zip(mine, both, strict=True))
    assert asked == [False]


def kept(function, leaves):
    """Return the entries that a call keeps beside its arguments."""
    found, given = {}, {x.untyped_storage().data_ptr() for x in leaves}

    def note(x):
        found[x.untyped_storage().data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = function(*leaves)
    assert out.requires_grad
    return sum(entries for place, entries in found.items() if place not in given)


def test_the_result_of_the_activation_is_not_kept(leaves):
    assert kept(apart, leaves) == leaves[0].numel()
    assert kept(swiglu_linear, leaves) == 0


def test_a_second_derivative_is_refused(leaves):
    out = swiglu_linear(*leaves)
    (dgate,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="SwigluLinear"):
        dgate.sum().backward()

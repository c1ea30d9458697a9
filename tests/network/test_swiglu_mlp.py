"""The gated MLP as one part: what it returns, and what it keeps."""

import pytest
import torch

from kernels.gated import swiglu
from kernels.linear import linear
from network.stacks import _swiglu_mlp
from network.stacks._swiglu_mlp import FEW, FEW_ROWS, swiglu_mlp

SHAPE, INNER = (2, 5, 16), 24


def apart(h, gate, up, down):
    return linear(swiglu(linear(h, gate), linear(h, up)), down)


def exact(h, gate, up, down):
    z, u = h @ gate.T, h @ up.T
    return (z * torch.sigmoid(z) * u) @ down.T


def made(shape=SHAPE, dtype=torch.float32):
    draw, c = torch.Generator().manual_seed(3), shape[-1]
    scaled = (shape, 1.0), ((INNER, c), c**-0.5), ((INNER, c), c**-0.5), ((c, INNER), INNER**-0.5)
    drawn = [scale * torch.randn(size, generator=draw) for size, scale in scaled]
    return [x.to(dtype).requires_grad_() for x in drawn]


def results(function, leaves, dout):
    out = function(*leaves)
    return out, *torch.autograd.grad(out, [x for x in leaves if x.requires_grad], dout)


def errors(found, truth):
    return [
        ((one.double() - other).norm() / other.norm()).item()
        for one, other in zip(found, truth, strict=True)
    ]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 1e-3)])
def test_results_and_gradients_are_as_near_to_float64_as_those_of_the_parts(dtype, bound):
    leaves = made(dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    dout = torch.randn(SHAPE, generator=torch.Generator().manual_seed(4)).to(dtype)
    truth = results(exact, wide, dout.double())
    # Rows that lie apart, as a transposed result has them.
    turned = torch.empty(SHAPE[1], SHAPE[0], SHAPE[2], dtype=dtype).transpose(0, 1).copy_(dout)
    for given in (dout, turned):
        mine, both = (errors(results(f, leaves, given), truth) for f in (swiglu_mlp, apart))
        assert all(one <= max(1.5 * other, bound) for one, other in zip(mine, both, strict=True))
        assert max(mine) < 2 * bound


@pytest.mark.parametrize("rows", [3, FEW_ROWS, FEW_ROWS + 1, FEW - 1, FEW])
def test_without_gradients_it_is_the_same_function(rows):
    leaves = [x.detach() for x in made((1, rows, 16))]
    expected = exact(*(x.double() for x in leaves))
    assert errors([swiglu_mlp(*leaves)], [expected])[0] < 1e-6


@pytest.mark.parametrize("frozen", range(4))
def test_an_argument_without_a_gradient_gets_none(frozen, monkeypatch):
    leaves, asked = made(), []
    leaves[frozen].requires_grad_(False)

    def watched(*given):
        asked.append(given[-1])
        return plain(*given)

    plain = _swiglu_mlp.gated_bwd
    monkeypatch.setattr(_swiglu_mlp, "gated_bwd", watched)
    dout = torch.ones(SHAPE)
    mine, both = (results(each, leaves, dout) for each in (swiglu_mlp, apart))
    assert len(mine) == 4 and max(errors(mine, [x.double() for x in both])) < 2e-6
    # The result of the activation is for the gradient of down alone.
    assert asked == [frozen != 3]


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


def test_the_result_of_the_activation_is_not_kept():
    leaves = made()
    inner = leaves[0].numel() // SHAPE[-1] * INNER
    assert kept(apart, leaves) == 3 * inner
    assert kept(swiglu_mlp, leaves) == 2 * inner


def test_a_second_derivative_is_refused():
    leaves = made()
    (dgate,) = torch.autograd.grad(swiglu_mlp(*leaves).sum(), leaves[1], create_graph=True)
    with pytest.raises(RuntimeError, match="SwigluMLP"):
        dgate.sum().backward()

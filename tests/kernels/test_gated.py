"""Check swiglu and geglu: shapes, layouts, halves of one projection, extreme gates, refusals."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.machine import nvml
from kernels import gated
from kernels.gated import geglu, swiglu
from ops.gated import geglu_reference, swiglu_reference
from tests.support.examples import many

DEVICE = "cuda" if nvml.gpus() else "cpu"
BOUND = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
# Triton 3.6 truncates to bfloat16 in its interpreter.
DTYPES = list(BOUND) if nvml.gpus() else [torch.float32, torch.float16]
KINDS = {
    "swiglu": (swiglu, swiglu_reference),
    "geglu": (geglu, geglu_reference),
    "geglu erf": (
        lambda gate, up=None: geglu(gate, up, "none"),
        lambda gate, up: geglu_reference(gate, up, "none"),
    ),
}
ACTS = {"swiglu": "silu", "geglu": "gelu_tanh", "geglu erf": "gelu_erf"}
kinds = pytest.mark.parametrize("kind", KINDS)


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def close(ours, exact, dtype):
    assert ours.dtype == dtype and ours.shape == exact.shape
    size = max(exact.abs().max().item(), 1e-30) if exact.numel() else 1.0
    assert torch.all((ours.double() - exact).abs() <= BOUND[dtype] * size)


def agrees(kind, gate, up):
    """Assert that both passes lie within the dtype's bound of the reference in float64."""
    function, reference = KINDS[kind]
    given = [t.detach().requires_grad_() for t in (gate, up)]
    exact = [t.detach().double().requires_grad_() for t in (gate, up)]
    y, expected = function(*given), reference(*exact)
    dy = randn(*y.shape, dtype=y.dtype, seed=7)
    grads = torch.autograd.grad(y, given, dy)
    truth = torch.autograd.grad(expected, exact, dy.double())
    assert y.is_contiguous()
    for ours, theirs in zip((y, *grads), (expected, *truth), strict=True):
        close(ours.detach(), theirs.detach(), gate.dtype)
    *again, result = gated.gated_bwd(*(t.detach() for t in given), dy, ACTS[kind], True)
    assert result.is_contiguous() and torch.equal(result, y)
    assert all(torch.equal(one, other) for one, other in zip(again, grads, strict=True))


@kinds
@many
@given(st.data())
def test_random_shapes_and_layouts(kind, data):
    shape = [*data.draw(st.lists(st.integers(0, 4), max_size=2)), data.draw(st.integers(0, 1500))]
    dtype = data.draw(st.sampled_from(DTYPES))
    scale = data.draw(st.sampled_from([1.0, 6.0]))
    pad = data.draw(st.integers(0, 9))
    wide = scale * randn(*shape[:-1], 2 * shape[-1] + pad, dtype=dtype)
    gate, up = wide[..., : shape[-1]], wide[..., shape[-1] + pad :]
    if data.draw(st.booleans()):
        up = up.contiguous()
    agrees(kind, gate, up)


@kinds
@pytest.mark.parametrize("shape", [(2, 1024), (3, 2, 1400), (700,)])
def test_halves_of_one_projection_need_no_copy(kind, shape, monkeypatch):
    function, reference = KINDS[kind]
    wide = randn(*shape[:-1], 2 * shape[-1]).requires_grad_()
    exact = wide.detach().double().requires_grad_()

    def copies(*_):
        raise AssertionError("a half was copied")

    monkeypatch.setattr(torch.Tensor, "contiguous", copies)
    y = function(wide)
    monkeypatch.undo()
    expected = reference(*exact.chunk(2, -1))
    dy = randn(*shape, seed=5)
    (grad,) = torch.autograd.grad(y, wide, dy)
    (truth,) = torch.autograd.grad(expected, exact, dy.double())
    close(y.detach(), expected.detach(), torch.float32)
    close(grad, truth, torch.float32)
    assert torch.equal(y, function(*wide.detach().chunk(2, -1)))


@kinds
def test_one_gradient_alone(kind):
    function, _ = KINDS[kind]
    gate, up = randn(3, 70), randn(3, 70, seed=1)
    both = [t.clone().requires_grad_() for t in (gate, up)]
    expected = torch.autograd.grad(function(*both).sum(), both)
    for index in range(2):
        given = [gate, up]
        given[index] = given[index].clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(*given).sum(), given[index])
        assert torch.equal(grad, expected[index])


@kinds
def test_extreme_gates_are_finite_where_the_formula_is(kind):
    function, reference = KINDS[kind]
    values = [1e-45, 1e-38, 1e-20, 80.0, 100.0, 1e4, 1e19, 1e25, 3e38, math.inf, math.nan, 0.0]
    gate = torch.tensor([*values, *(-x for x in values)], device=DEVICE).requires_grad_()
    up = torch.full_like(gate, 0.5).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (gate, up)]
    y, expected = function(gate, up), reference(*exact)
    found = (y, *torch.autograd.grad(y.sum(), (gate, up)))
    truth = (expected, *torch.autograd.grad(expected.sum(), exact))
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(
            ours.float(), theirs.float(), rtol=2e-6, atol=1e-6, equal_nan=True
        )


def test_far_below_zero_geglu_keeps_its_digits():
    gate = torch.linspace(-5.0, -2.0, 301, device=DEVICE)
    exact = gate.double()
    normal = 0.5 * torch.special.erfc(-exact * math.sqrt(0.5))
    logistic = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3))
    for approximate, share, bound in (("tanh", logistic, 1e-5), ("none", normal, 2e-3)):
        y = geglu(gate, torch.ones_like(gate), approximate)
        assert (y.double() / (exact * share) - 1).abs().max().item() <= bound


@pytest.mark.parametrize("reference", [each for _, each in KINDS.values()])
def test_the_reference_is_differentiable_and_right(reference):
    tensors = [randn(3, 5, seed=seed).double().requires_grad_() for seed in range(2)]
    assert torch.autograd.gradcheck(reference, tensors)


@pytest.mark.parametrize("n", [200, 1000, gated.LONG])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_key_has_a_few_candidates_and_the_rule_is_one(n, itemsize):
    key = {"n": n, "itemsize": itemsize, "act": "silu"}
    suited = [c for c in gated.BLOCKS if gated._suits(c, **key)]
    assert gated._choose(**key) in suited and len(suited) <= 24
    assert n < 1000 or len(suited) > 1


half = torch.float16
REFUSALS = {
    "up: .*expected": lambda: swiglu(randn(3, 4), randn(3, 5)),
    "up: .*float16": lambda: swiglu(randn(3, 4), randn(3, 4, dtype=half)),
    r"gate: shape \(3, 5\)": lambda: geglu(randn(3, 5)),
    "gate: no dimension, expected": lambda: swiglu(randn(1)[0], randn(1)[0]),
    "gate: no dimension, expected .*N": lambda: swiglu(randn(1)[0]),
    "approximate: 'sigmoid', expected": lambda: geglu(randn(4), randn(4), "sigmoid"),
    "gate: torch.float64, expected": lambda: swiglu(randn(4).double(), randn(4).double()),
    "gate: torch.int64, expected": lambda: geglu(randn(4).long(), randn(4).long()),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_bad_arguments_are_refused(message):
    wrong_dtype = re.search("torch|float16", message)
    with pytest.raises(TypeError if wrong_dtype else ValueError, match=message):
        REFUSALS[message]()

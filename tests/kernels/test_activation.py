"""Check the activations: each 16-bit number, float32 accuracy, gradients, edges and refusals."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from harness.machine import nvml
from kernels import activation
from ops import activation as problems
from tests.support.examples import many

DEVICE = "cuda" if nvml.gpus() else "cpu"
# The interpreter truncates to bfloat16, and a GPU rounds.
HALVES = (torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float16,)
FORMS = {
    "relu": (activation.relu, torch.relu),
    "leaky_relu": (lambda x: activation.leaky_relu(x, 0.01), F.leaky_relu),
    "gelu": (activation.gelu, F.gelu),
    "gelu_tanh": (
        lambda x: activation.gelu(x, "tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
    ),
    "tanh": (activation.tanh, torch.tanh),
    "cosh": (activation.cosh, torch.cosh),
}
OPS = (
    problems.RELU,
    problems.LEAKY_RELU,
    problems.GELU,
    problems.TANH,
    problems.COSH,
)


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def both(name, x):
    """Return ours and the float64 oracle's: the result and the gradient of its sum."""
    ours, theirs = FORMS[name]
    for function, leaf in ((ours, x.clone()), (theirs, x.double())):
        leaf.requires_grad_()
        out = function(leaf)
        yield out.detach(), torch.autograd.grad(out, leaf, torch.ones_like(out))[0]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("name", ["relu", "leaky_relu", "tanh"])
def test_zeros_keep_their_sign(name, dtype):
    x = torch.tensor([0.0, -0.0] * 600, dtype=dtype, device=DEVICE)
    for leaf in (x, x.clone().requires_grad_()):
        y = FORMS[name][0](leaf)
        assert not y.any() and torch.equal(y.signbit(), x.signbit())


@pytest.mark.parametrize("upstream", [math.inf, -math.inf, 1e38, 0.0])
def test_the_gradient_of_cosh_for_any_upstream_is_pytorchs(upstream):
    x = torch.tensor([-3.0, -0.6, -0.1, 0.0, 0.2, 0.7, 5.0, 60.0, -60.0], device=DEVICE)
    x.requires_grad_()
    found, expected = (
        torch.autograd.grad(function(x), x, torch.full_like(x, upstream))[0]
        for function in FORMS["cosh"]
    )
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-6, atol=0)


def in_ulps(actual, true):
    """Return the largest error in units of the last place, over all numbers of the dtype."""
    kind = torch.finfo(actual.dtype)
    held = true.to(actual.dtype)
    finite = held.isfinite()
    beyond = ~finite
    assert torch.equal(actual[beyond].nan_to_num(7), held[beyond].nan_to_num(7))
    assert torch.equal(actual[beyond].isnan(), held[beyond].isnan())
    actual, true = actual[finite].double(), true[finite]
    unit = torch.exp2(true.abs().clamp_min(kind.tiny).log2().floor()) * kind.eps
    return ((actual - true) / unit).abs().max().item()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", FORMS)
def test_each_number_of_16_bits(name, dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).to(DEVICE)
    if dtype == torch.bfloat16:
        # Further out the oracle's own 1 + erf cancels, while bfloat16 still holds the value.
        x = x[(x.abs() < 4) | (x > 0)]
    (out, dx), (true, dtrue) = both(name, x)
    assert in_ulps(out, true) <= 1.5
    if name == "tanh":
        # The gradient follows from the rounded result, as PyTorch's does.
        dtrue = 1 - out.double() ** 2
    # Near -0.75 the derivative of gelu crosses zero, so its own size is no measure of the error.
    crossing = (x < -0.6) & (x > -0.9) if name.startswith("gelu") else x.isinf() & False
    assert in_ulps(dx[~crossing], dtrue[~crossing]) <= 1.5
    if crossing.any():
        assert (dx - dtrue)[crossing].abs().max().item() <= torch.finfo(dtype).eps / 8


@pytest.mark.parametrize("name", FORMS)
def test_float32_over_its_range(name):
    x = torch.cat([size * randn(4000, seed=7) for size in (1e-30, 1e-3, 0.3, 2.0, 30.0, 90.0)])
    (out, dx), (true, dtrue) = both(name, x)
    assert torch.equal(out.isinf(), true.float().isinf())
    for actual, oracle in ((out, true), (dx, dtrue)):
        finite = oracle.float().isfinite()
        error = (actual.double() - oracle).abs()[finite]
        # The error is relative to the value. Near the zeros of gelu and of the slopes it is
        # relative to one, and to x times a rounding of the gate.
        floor = {"gelu": 3e-7, "gelu_tanh": 3e-6, "tanh": 3e-7}.get(name, 0)
        assert (error <= 1e-6 * oracle.abs()[finite] + floor).all()


@pytest.mark.parametrize("name", FORMS)
@many
@given(st.integers(0, 5000), st.sampled_from([*HALVES, torch.float32]))
def test_shapes_and_dtypes_against_pytorch(name, n, dtype):
    x = 2 * randn(n, dtype=dtype)
    (out, dx), (true, dtrue) = both(name, x)
    assert out.dtype == dx.dtype == dtype
    # In float32 the functions are as accurate as their exponentials.
    bound = max(torch.finfo(dtype).eps, 2e-6)
    for actual, oracle in ((out, true), (dx, dtrue)):
        assert torch.allclose(actual.double(), oracle, rtol=bound, atol=2 * bound)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_references_are_differentiable_and_right(op):
    for case in {case.flags: case for case in op.edge}.values():
        x = (randn(7) + 0.1).double().requires_grad_()
        extra = op.arguments(case)
        assert torch.autograd.gradcheck(lambda x, extra=extra: op.reference(x, **extra), [x])


@pytest.mark.parametrize("name", FORMS)
def test_more_dimensions_layouts_and_expanded_gradients(name):
    ours, theirs = FORMS[name]
    x = randn(6, 5, 7).transpose(0, 2).requires_grad_()
    out = ours(x)
    assert torch.allclose(out, theirs(x), atol=1e-6)
    found = [torch.autograd.grad(each.sum(), x)[0] for each in (out, theirs(x))]
    assert torch.allclose(*found, atol=1e-6)


def test_only_the_result_of_tanh_is_kept_for_the_backward_pass():
    out = activation.tanh(randn(10).requires_grad_())
    (saved,) = out.grad_fn.saved_tensors
    assert saved.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("name", ["relu", "leaky_relu"])
@pytest.mark.parametrize("n", [0, 1, 8, 4099])
def test_a_bit_an_element_is_kept_of_a_rectifier(name, n):
    x = randn(n).requires_grad_()
    out = FORMS[name][0](x)
    (flags,) = out.grad_fn.saved_tensors
    assert flags.dtype == torch.uint8 and flags.shape == (math.ceil(n / 8),)
    bits = (flags[:, None] >> torch.arange(8, device=DEVICE)).flatten()[:n] & 1
    assert torch.equal(bits.bool(), x > 0)


@pytest.mark.parametrize("slope", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_of_rectifiers_at_special_numbers_equal_pytorch(slope, dtype):
    """Combine signed zeros, infinities and NaN as values and as gradients."""
    odd = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan]
    pairs = torch.tensor(list(itertools.product(odd, odd)), dtype=dtype, device=DEVICE)
    x, grad = (column.contiguous() for column in pairs.T)
    forms = FORMS["relu"] if slope is None else (activation.leaky_relu, F.leaky_relu)
    extra = () if slope is None else (slope,)
    found = [torch.autograd.grad(f(x.requires_grad_(), *extra), x, grad)[0] for f in forms]
    assert torch.equal(*(each.nan_to_num(7) for each in found))
    assert torch.equal(*(each.isnan() for each in found))


def test_infinite_and_absent_numbers():
    x = torch.tensor([math.inf, -math.inf, math.nan], device=DEVICE)
    for name, (ours, theirs) in FORMS.items():
        found, expected = ours(x), theirs(x.double()).float()
        assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7)), name
        assert torch.equal(found.isnan(), expected.isnan()), name


def test_cosh_is_infinite_exactly_where_float32_ends():
    x = torch.tensor([89.41598, 89.41599, -89.41598, -89.41599, 200.0], device=DEVICE)
    assert torch.equal(activation.cosh(x).isinf(), torch.cosh(x.double()).float().isinf())


def test_the_slope_of_gelu_far_out():
    x = torch.tensor([1e4, -1e4, 1e20, -1e20, 3e38, -3e38], device=DEVICE)
    for form in ("none", "tanh"):
        leaf = x.clone().requires_grad_()
        activation.gelu(leaf, form).sum().backward()
        assert torch.equal(leaf.grad, (x > 0).float())


@pytest.mark.parametrize("slope", [0, 1, -0.5, 2.5])
def test_leaky_relu_of_any_slope(slope):
    x = randn(200).requires_grad_()
    out, expected = activation.leaky_relu(x, slope), F.leaky_relu(x, slope)
    assert torch.equal(out, expected)
    found = [torch.autograd.grad(each.sum(), x)[0] for each in (out, expected)]
    assert torch.equal(*found)


@pytest.mark.parametrize("name", FORMS)
def test_refuses_other_dtypes(name):
    for dtype in (torch.int32, torch.float64):
        with pytest.raises(TypeError, match=rf"^x: {dtype}, expected float32, float16 or bfloat16"):
            FORMS[name][0](torch.ones(3, dtype=dtype, device=DEVICE))


def test_refuses_an_unknown_form():
    with pytest.raises(ValueError, match="approximate: 'erf', expected one of"):
        activation.gelu(randn(3), "erf")

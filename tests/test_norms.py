"""Layer norm and RMS norm: both passes, with and without a residual, and what they refuse."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import nvml
from kernels import _norm_backward, _norm_forward
from kernels.layer_norm import layer_norm, layer_norm_reference
from kernels.rms_norm import rms_norm, rms_norm_reference

DEVICE = "cuda" if nvml.gpus() else "cpu"
EXAMPLES = int(os.environ.get("TILEWRIGHT_EXAMPLES", "10"))
BOUND = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NORMS = {
    "layer_norm": (layer_norm, layer_norm_reference),
    "rms_norm": (rms_norm, rms_norm_reference),
}
both = pytest.mark.parametrize("name", NORMS)


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def tensors(name, shape, dtype, fused):
    """x, the vectors and the residual of a norm by name, as leaves."""
    n = shape[-1]
    made = {"x": randn(*shape, dtype=dtype, seed=1), "weight": randn(n, dtype=dtype, seed=2)}
    if name == "layer_norm":
        made["bias"] = randn(n, dtype=dtype, seed=3)
    if fused:
        made["residual"] = randn(*shape, dtype=dtype, seed=4)
    return {key: tensor.requires_grad_() for key, tensor in made.items()}


def results(function, given, eps=1e-5):
    """Outputs and gradients of a norm, for gradients of the outputs that are always the same."""
    outputs = function(**given, eps=eps)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    seeds = [randn(*y.shape, seed=5 + i).to(y.dtype) for i, y in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, list(given.values()), seeds)]


def agree(name, given):
    """Both passes lie within the dtype's bound of the reference in float64."""
    function, reference = NORMS[name]
    exact = {key: tensor.detach().double().requires_grad_() for key, tensor in given.items()}
    for ours, truth in zip(results(function, given), results(reference, exact), strict=True):
        dtype = given["x"].dtype
        assert ours.dtype == dtype and ours.shape == truth.shape
        size = max(truth.abs().max().item(), 1e-2)
        assert (ours.double() - truth).abs().max().item() <= BOUND[dtype] * size


@both
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(st.data())
def test_random_shapes(name, data):
    # The gradient of shorter rows is what rounding leaves of a difference.
    shape = [*data.draw(st.lists(st.integers(1, 5), max_size=3)), data.draw(st.integers(8, 600))]
    dtype = data.draw(st.sampled_from(list(BOUND)))
    agree(name, tensors(name, shape, dtype, data.draw(st.booleans())))


@both
@pytest.mark.parametrize(("fused", "group"), [(False, 0), (True, 0), (True, 1)])
def test_long_rows_in_one_group_and_in_several(name, fused, group, monkeypatch):
    monkeypatch.setattr(_norm_forward, "ROW_BYTES", 64)
    monkeypatch.setattr(_norm_backward, "ROW_BYTES", 64)
    monkeypatch.setattr(_norm_backward, "GROUP_BYTES", group)
    monkeypatch.setattr(_norm_backward, "SPLITS", 2)
    # The last of three groups is short, and so is the last block of a row.
    agree(name, tensors(name, (130 if group else 5, 600), torch.float32, fused))


@both
def test_a_row_in_several_chunks_equals_one_in_a_single_chunk(name, monkeypatch):
    given = tensors(name, (3, 1500), torch.bfloat16, True)
    whole = results(NORMS[name][0], given)
    monkeypatch.setattr(_norm_forward, "ROW_TILES", ((2048, 1, 256, 4),))
    for one, other in zip(whole, results(NORMS[name][0], given), strict=True):
        assert (one.double() - other.double()).norm() <= 1e-2 * one.double().norm()


@both
def test_without_gradients_the_results_are_the_same(name):
    given = tensors(name, (7, 130), torch.float16, True)
    kept = NORMS[name][0](**given)
    with torch.no_grad():
        free = NORMS[name][0](**given)
    assert all(torch.equal(one, other) for one, other in zip(kept, free, strict=True))
    assert not any(tensor.requires_grad for tensor in free)


@both
@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_outputs_may_go_unused(name, used):
    function, reference = NORMS[name]
    given = tensors(name, (4, 50), torch.float32, True)
    exact = {key: tensor.detach().double().requires_grad_() for key, tensor in given.items()}
    pair = []
    for formula, leaves in ((function, given), (reference, exact)):
        output = formula(**leaves, eps=1e-5)[used]
        wanted = [leaves["x"], leaves["residual"]]
        pair.append(torch.autograd.grad(output, wanted, torch.ones_like(output)))
    for ours, truth in zip(*pair, strict=True):
        assert torch.allclose(ours.double(), truth, atol=1e-5)


def test_the_sum_is_that_of_pytorch_to_the_bit():
    given = tensors("rms_norm", (6, 200), torch.float16, True)
    assert torch.equal(rms_norm(**given)[1], given["x"] + given["residual"])


@pytest.mark.parametrize("limit", [64, _norm_forward.ROW_BYTES])
def test_equal_entries_far_from_zero_have_no_deviation(limit, monkeypatch):
    monkeypatch.setattr(_norm_forward, "ROW_BYTES", limit)
    n = 3001
    x = torch.full((2, n), 1234.567, device=DEVICE)
    y = layer_norm(x, torch.ones(n, device=DEVICE), torch.zeros(n, device=DEVICE), 1e-5)
    assert y.abs().max().item() == 0.0


@both
def test_the_reference_is_differentiable_and_right(name):
    given = tensors(name, (3, 4), torch.float64, True)
    reference = NORMS[name][1]
    values = list(given.values())

    def formula(*values):
        return reference(**dict(zip(given, values, strict=True)), eps=1e-5)

    assert torch.autograd.gradcheck(formula, values)


def vector(n):
    return torch.ones(n, device=DEVICE)


REFUSALS = {
    "a scalar": (ValueError, "x: ", lambda: rms_norm(vector(1)[0], vector(1))),
    "integers": (TypeError, "x: torch.int64", lambda: rms_norm(vector(4).long(), vector(4))),
    "doubles": (
        TypeError,
        "weight: torch.float64",
        lambda: rms_norm(vector(4), vector(4).double()),
    ),
    "a short weight": (ValueError, r"weight: .*\(7,\)", lambda: rms_norm(randn(2, 8), vector(7))),
    "a long bias": (
        ValueError,
        r"bias: .*\(9,\)",
        lambda: layer_norm(randn(2, 8), vector(8), vector(9)),
    ),
    "a residual of another shape": (
        ValueError,
        r"residual: \(2, 7\)",
        lambda: rms_norm(randn(2, 8), vector(8), residual=randn(2, 7)),
    ),
    "a residual of another dtype": (
        ValueError,
        r"residual: .*float16",
        lambda: rms_norm(randn(2, 8), vector(8), residual=randn(2, 8, dtype=torch.float16)),
    ),
    "a weight elsewhere": (
        ValueError,
        "weight: on meta",
        lambda: rms_norm(randn(2, 8), torch.ones(8, device="meta")),
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refuses(what):
    error, words, call = REFUSALS[what]
    with pytest.raises(error, match=f"{words}.*expected"):
        call()

"""Layer norm and RMS norm: both passes, with and without a residual, and what they refuse."""

import pytest
import torch
from examples import many
from hypothesis import given
from hypothesis import strategies as st

from harness import nvml
from harness.launches import choosing
from kernels import _norm_backward
from kernels import layer_norm as ln
from kernels import rms_norm as rms
from kernels.layer_norm import layer_norm, layer_norm_reference
from kernels.rms_norm import rms_norm, rms_norm_reference

DEVICE = "cuda" if nvml.gpus() else "cpu"
BOUND = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NORMS = {
    "layer_norm": (layer_norm, layer_norm_reference),
    "rms_norm": (rms_norm, rms_norm_reference),
}
FORWARD = {"layer_norm": ln.FORWARD, "rms_norm": rms.FORWARD}
BACKWARD = {"layer_norm": ln.BACKWARD, "rms_norm": rms.BACKWARD}
both = pytest.mark.parametrize("name", NORMS)
# On one they wait for each other; the interpreter, which has them walk, takes minutes.
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="several programs hold a row on a GPU only")


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
@many
@given(st.data())
def test_random_shapes(name, data):
    # The gradient of shorter rows is what rounding leaves of a difference.
    shape = [*data.draw(st.lists(st.integers(1, 5), max_size=3)), data.draw(st.integers(8, 600))]
    dtype = data.draw(st.sampled_from(list(BOUND)))
    agree(name, tensors(name, shape, dtype, data.draw(st.booleans())))


def forward(name, rows, block, keep, warps=4):
    """Within the body of it the forward pass of a norm has this configuration."""
    config = {"BLOCK_M": rows, "BLOCK_N": block, "HOLDERS": keep, "num_warps": warps}
    return choosing(FORWARD[name], lambda **key: config)


@both
@pytest.mark.parametrize("fused", [False, True])
def test_rows_that_are_walked(name, fused, monkeypatch):
    monkeypatch.setattr(_norm_backward, "ROW_BYTES", 64)
    monkeypatch.setattr(_norm_backward, "SPLITS", 2)
    # The last block of a row is short.
    with forward(name, 1, 256, 0):
        agree(name, tensors(name, (5, 600), torch.float32, fused))


@both
@on_a_gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((3, 131072), torch.bfloat16),
        # Several rows for each group of programs: in turn of four bytes, a range of two.
        ((300, 12288), torch.float32),
        ((300, 16384), torch.float32),
        ((200, 65536), torch.bfloat16),
    ],
)
def test_rows_that_several_programs_hold(name, shape, dtype, fused):
    given = tensors(name, shape, dtype, fused)
    agree(name, given)
    for one, other in zip(*(results(NORMS[name][0], given) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


@both
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("n", [12288, 16384])
def test_long_rows_of_four_bytes(name, n, fused):
    agree(name, tensors(name, (5, n), torch.float32, fused))


@both
@on_a_gpu
def test_a_number_that_is_none_in_a_long_row_stays_in_its_row(name):
    given = tensors(name, (3, 131072), torch.float16, False)
    with torch.no_grad():
        # All bits set: as such a slot says that its sum is not there yet.
        given["x"][1, 70000:70002].view(torch.int16).fill_(-1)
    y = NORMS[name][0](**given)
    assert y[1].isnan().all() and not y[0].isnan().any() and not y[2].isnan().any()


@both
def test_uneven_rows_beyond_one_block(name):
    agree(name, tensors(name, (3, 9001), torch.float16, True))


@both
def test_a_row_in_several_chunks_equals_one_in_a_single_chunk(name):
    given = tensors(name, (3, 1500), torch.bfloat16, True)
    whole = results(NORMS[name][0], given)
    with forward(name, 1, 256, 1):
        chunked = results(NORMS[name][0], given)
    for one, other in zip(whole, chunked, strict=True):
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


@pytest.mark.parametrize("keep", [0, 1])
def test_equal_entries_far_from_zero_have_no_deviation(keep):
    n = 3001
    x = torch.full((2, n), 1234.567, device=DEVICE)
    with forward("layer_norm", 1, 1024, keep):
        y = layer_norm(x, torch.ones(n, device=DEVICE), torch.zeros(n, device=DEVICE), 1e-5)
    assert y.abs().max().item() == 0.0


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("where", [0, 1500, slice(0, 1024), slice(1024, 3000)])
def test_what_lies_far_from_the_rest_takes_no_digits(keep, where):
    x = randn(2, 3000)
    x[:, where] += 1e4
    one, zero = torch.ones(3000, device=DEVICE), torch.zeros(3000, device=DEVICE)
    with forward("layer_norm", 1, 1024, keep):
        y = layer_norm(x, one, zero, 1e-5)
    truth = layer_norm_reference(x.double(), one.double(), zero.double(), 1e-5)
    assert (y - truth).abs().max().item() <= 1e-5 * truth.abs().max().item()


@both
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_tuner_has_few_candidates(name, itemsize):
    for configs in (FORWARD[name], BACKWARD[name][0]):
        for n in (256, 1000, 1024, 2048, 4096, 8192, 12288, 16384, 65536):
            key = {"n": n, "itemsize": itemsize}
            key |= {"residual": False} if configs is FORWARD[name] else {}
            if configs is FORWARD[name] or n * itemsize <= _norm_backward.ROW_BYTES:
                suited = [c for c in configs.candidates if configs.suits(c, **key)]
                assert 1 <= len(suited) <= 12, (n, suited)


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

"""Check the gradients of the vector ops, dot in one launch, and the refusals."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.machine import nvml
from kernels import vector
from kernels._triton import arrival_counter as _arrivals
from kernels.elementwise_details.blocks import (
    BLOCKS,
    RESIDENT,
    choose_block,
    store_policy,
    suits_block,
    words_of,
)
from ops import vector as problems
from ops._vector_cases import bits_bytes
from tests.support.examples import many

DEVICE = "cuda" if nvml.gpus() else "cpu"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
lengths = st.integers(0, 5000)
# The interpreter truncates to bfloat16, and a GPU rounds.
dtypes = st.sampled_from(FLOATS if DEVICE == "cuda" else FLOATS[:2])


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def equal(actual, expected):
    """Return whether all places are equal; NaN equals NaN."""
    assert torch.equal(actual.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(actual.isnan(), expected.isnan())


@pytest.mark.parametrize("name", ["add", "mul", "maximum", "minimum"])
@many
@given(lengths, dtypes)
def test_results_and_gradients_equal_pytorch_to_the_bit(name, n, dtype):
    """Include ties among small integers, and NaN."""
    x, y = (randn(n, dtype=dtype, seed=seed).round().requires_grad_() for seed in (1, 2))
    if n:
        x.data[n // 2], y.data[n // 3] = math.nan, math.nan
    grad = randn(n, dtype=dtype, seed=3)
    ours, theirs = getattr(vector, name)(x, y), getattr(torch, name)(x, y)
    equal(ours, theirs)
    found = [torch.autograd.grad(out, (x, y), grad) for out in (ours, theirs)]
    for mine, pytorch in zip(*found, strict=True):
        equal(mine, pytorch)


@many
@given(lengths, st.floats(-3, 3, width=32), dtypes)
def test_scale_and_its_gradient_equal_pytorch_to_the_bit(n, alpha, dtype):
    x, grad = randn(n, dtype=dtype).requires_grad_(), randn(n, dtype=dtype, seed=1)
    out = vector.scale(x, alpha)
    assert torch.equal(out, x * alpha)
    assert torch.equal(torch.autograd.grad(out, x, grad)[0], grad * alpha)


@many
@given(lengths, dtypes)
def test_dot_and_its_gradients_against_float64(n, dtype):
    x, y = (randn(n, dtype=dtype, seed=seed).requires_grad_() for seed in (1, 2))
    out, true = vector.dot(x, y), torch.dot(x.double(), y.double())
    size = torch.dot(x.double().abs(), y.double().abs()).item()
    eps = torch.finfo(dtype).eps
    assert abs(out.item() - true.item()) <= eps * abs(true.item()) + 1e-6 * size
    assert torch.equal(out, vector.dot(x, y))
    grad = torch.tensor(0.7, dtype=dtype, device=DEVICE)
    dx, dy = torch.autograd.grad(out, (x, y), grad)
    assert torch.equal(dx, grad * y) and torch.equal(dy, grad * x)


@pytest.mark.parametrize("name", ["add", "mul", "maximum", "minimum", "dot"])
@pytest.mark.parametrize("place", [0, 1])
def test_an_unwanted_gradient_is_not_computed(name, place, monkeypatch):
    made = []

    def watched(backward):
        def watching(*arguments):
            made.append(backward(*arguments))
            return made[-1]

        return watching

    for backward in ("vector_bwd", "min_max_bwd"):
        monkeypatch.setattr(vector, backward, watched(getattr(vector, backward)))
    tensors = [randn(300, seed=1), randn(300, seed=2)]
    tensors[place].requires_grad_()
    out, expected = getattr(vector, name)(*tensors), getattr(torch, name)(*tensors)
    grad = torch.full_like(out, 0.7)
    found = torch.autograd.grad(out, tensors[place], grad)[0]
    assert torch.equal(found, torch.autograd.grad(expected, tensors[place], grad)[0])
    # The gradient of a sum needs no kernel.
    assert [result[1 - place] for result in made] == ([] if name == "add" else [None])


@pytest.mark.parametrize("name", ["maximum", "minimum"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_extrema_of_special_numbers_and_their_gradients_equal_pytorch(name, dtype):
    """Combine signed zeros, infinities and NaN in both inputs and in the gradient."""
    odd = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan]
    triples = torch.tensor(list(itertools.product(odd, odd, odd)), dtype=dtype, device=DEVICE)
    x, y, grad = (column.contiguous() for column in triples.T)
    x, y = x.requires_grad_(), y.requires_grad_()
    ours, theirs = getattr(vector, name)(x, y), getattr(torch, name)(x, y)
    equal(ours, theirs)
    found = [torch.autograd.grad(out, (x, y), grad) for out in (ours, theirs)]
    for mine, pytorch in zip(*found, strict=True):
        equal(mine, pytorch)


@pytest.mark.parametrize("n", [0, 1, 8, 4099])
def test_two_bits_an_element_are_kept_of_an_extremum(n):
    x, y = randn(n, seed=1).round().requires_grad_(), randn(n, seed=2).round()
    out = vector.maximum(x, y)
    (flags,) = out.grad_fn.saved_tensors
    assert flags.dtype == torch.int16 and flags.shape == (math.ceil(n / 8),)
    bits = flags.to(torch.int32)[:, None] >> torch.arange(16, device=DEVICE) & 1
    assert torch.equal(bits[:, :8].flatten()[:n].bool(), x > y)
    assert torch.equal(bits[:, 8:].flatten()[:n].bool(), x < y)


def test_the_gradient_of_a_sum_is_handed_through_and_not_copied():
    x, y = randn(100).requires_grad_(), randn(100).requires_grad_()
    grad = randn(100, seed=3)
    for found in torch.autograd.grad(vector.add(x, y), (x, y), grad):
        assert found.data_ptr() == grad.data_ptr()


@pytest.mark.parametrize("name", ["scale", "mul", "maximum", "dot"])
def test_strided_inputs_and_expanded_gradients(name):
    x, y = (randn(40, 30, seed=seed).T.requires_grad_() for seed in (1, 2))
    arguments = (x, 1.7) if name == "scale" else (x, y)
    out = getattr(vector, name)(*arguments)
    expected = getattr(problems, f"{name}_reference")(*arguments)
    assert torch.allclose(out, expected, rtol=1e-5)
    found = [torch.autograd.grad(each.sum(), x)[0] for each in (out, expected)]
    assert torch.allclose(*found, rtol=1e-5)


def test_no_function_of_autograd_where_no_gradient_is_wanted():
    x, y = randn(10).requires_grad_(), randn(10)
    assert vector.mul(x, y).grad_fn is not None
    with torch.no_grad():
        assert vector.mul(x, y).grad_fn is None
    assert vector.mul(y, y).grad_fn is None


@pytest.mark.parametrize("most", [4, vector.MOST_PARTIALS])
@pytest.mark.parametrize("n", [0, 1, 5000, 40_000])
def test_the_last_program_adds_all_sums_and_leaves_the_counter_at_zero(n, most, monkeypatch):
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(vector, "arrival_counter", lambda device: counter)
    monkeypatch.setattr(vector, "MOST_PARTIALS", most)
    # The values are integers, so each order gives the same sum.
    x, y = randn(n, seed=1).round(), randn(n, seed=2).round()
    for _ in range(2):
        assert vector.dot(x, y).item() == torch.dot(x.double(), y.double()).item()
        assert counter.item() == 0


@pytest.mark.gpu
def test_streams_and_graphs_have_counters_of_their_own():
    device = torch.device("cuda", torch.cuda.current_device())
    here = _arrivals.arrival_counter(device)
    assert _arrivals.arrival_counter(device) is here
    with torch.cuda.stream(torch.cuda.Stream()):
        assert _arrivals.arrival_counter(device).data_ptr() != here.data_ptr()
    captured = []
    for _ in range(2):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            captured.append(_arrivals.arrival_counter(device).data_ptr())
            torch.ones(1, device=device)
    assert len({here.data_ptr(), *captured}) == 3


REFUSALS = {
    "y: shape (4,), expected (3,) as x has": (ValueError, lambda: vector.add(randn(3), randn(4))),
    "y: torch.float16, expected torch.float32 as x has": (
        TypeError,
        lambda: vector.maximum(randn(3), randn(3, dtype=torch.float16)),
    ),
    "y: on meta, expected the memory of a": (
        ValueError,
        lambda: vector.dot(randn(3), torch.empty(3, device="meta")),
    ),
    "x: torch.int32, expected float32": (
        TypeError,
        lambda: vector.scale(torch.ones(3, dtype=torch.int32, device=DEVICE), 2.0),
    ),
    "x: torch.float64, expected float32": (
        TypeError,
        lambda: vector.mul(randn(3).double(), randn(3).double()),
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_bad_arguments_are_refused(what):
    kind, call = REFUSALS[what]
    with pytest.raises(kind) as refusal:
        call()
    assert str(refusal.value).startswith(what)


@given(
    n=st.integers(1, 2**33), itemsize=st.sampled_from([2, 4]), sms=st.integers(1, 200),
    light=st.booleans(),
)  # fmt: skip
def test_light_maps_have_few_programs_only_where_these_fill_the_device(n, itemsize, sms, light):
    config = choose_block(n, itemsize, light=light, sms=sms)
    assert config in BLOCKS and suits_block(config, n, itemsize)
    waves = -(-n // config["BLOCK_N"]) / (RESIDENT * sms)
    if config["num_warps"] == 2:
        assert light and waves <= 2 and -(-waves // 1) - waves <= 0.55
    else:
        assert config == choose_block(n, itemsize)


@pytest.mark.parametrize(("n", "warps"), [(2**20, 4), (2**22, 2), (2**24, 2), (2**25, 4)])
def test_light_maps_of_64_mib_on_132_multiprocessors_have_few_programs(n, warps):
    assert choose_block(n, 2, light=True, sms=132)["num_warps"] == warps


@given(n=st.integers(1, 2**33), itemsize=st.sampled_from([2, 4]), light=st.booleans())
def test_only_light_maps_leave_results_in_the_cache_and_only_what_it_has_room_for(
    n, itemsize, light
):
    stays = store_policy(n, itemsize, light) == ""
    assert stays == (light and n * itemsize <= 32 * 2**20)
    assert stays or store_policy(n, itemsize, light) == ".cs"


@many
@given(st.integers(0, 2**40))
def test_flags_take_the_bytes_that_the_problem_counts(n):
    assert words_of(n) == bits_bytes(n)

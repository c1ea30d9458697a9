"""Check softmax: scale, diagonal and mask, whole and in chunks, against formulas and PyTorch."""

import math

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from harness.machine import nvml
from kernels import softmax as family
from kernels.softmax import softmax
from ops.softmax import softmax_reference
from tests.support.examples import many

DEVICE = "cuda" if nvml.gpus() else "cpu"
BOUND = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# Rows that need a loop in both passes, in one, and in none; the first also with whole accesses.
LONG = (65552, 65546, 16385, 9000, 2050)


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def double(tensor):
    return None if tensor is None else tensor.double()


def agrees(x, scale=1.0, causal=False, mask=None):
    """Assert that both passes lie within the dtype's bound of the reference in float64."""
    x = x.detach().requires_grad_()
    exact = x.detach().double().requires_grad_()
    y = softmax(x, scale=scale, causal=causal, mask=mask)
    expected = softmax_reference(exact, scale, causal, double(mask))
    dy = randn(*x.shape, dtype=x.dtype, seed=7)
    y.backward(dy)
    expected.backward(dy.double())
    assert y.dtype == x.dtype and y.shape == x.shape
    # With a tiny scale the gradient is below the smallest number of the dtype. For bfloat16 in the
    # interpreter, the limit is the smallest normal float32 number.
    least = max(torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps, 2.0**-126)
    for ours, theirs in ((y, expected), (x.grad, exact.grad)):
        bound = max(BOUND[x.dtype] * theirs.abs().max().item(), least)
        assert (ours.double() - theirs).abs().max().item() <= bound


@many
@given(st.data())
def test_random_shapes_and_arguments(data):
    shape = [*data.draw(st.lists(st.integers(1, 5), max_size=3)), data.draw(st.integers(1, 400))]
    dtype = data.draw(st.sampled_from(list(BOUND)))
    # A row that sees no key has no formula.
    causal = len(shape) > 1 and shape[-2] <= shape[-1] and data.draw(st.booleans())
    mask = None
    if data.draw(st.booleans()):
        kept = shape[data.draw(st.integers(0, len(shape) - 1)) :]
        kept = [size if data.draw(st.booleans()) else 1 for size in kept[:-1]] + kept[-1:]
        mask = randn(*kept, dtype=dtype, seed=3)
    agrees(randn(*shape, dtype=dtype), data.draw(st.floats(-3, 3)), causal, mask)


@pytest.mark.parametrize("shape", [(70,), (5, 70), (3, 5, 70), (2, 1, 5, 70), (2, 1, 1, 70)])
def test_a_mask_is_broadcast_over_leading_dimensions(shape):
    agrees(randn(2, 3, 5, 70), 0.5, True, randn(*shape, seed=1))


def test_masks_of_any_layout():
    x = randn(2, 3, 4, 5, 30)
    for mask in (
        randn(2, 1, 1, 5, 30, seed=1),
        randn(30, 5, seed=1).T,
        randn(5, 1, seed=1),
        randn(5, 60, seed=1)[:, ::2],
        randn(30, seed=1, dtype=torch.float64).float(),
    ):
        agrees(x, 1.0, False, mask)
    agrees(x.half(), 1.0, False, randn(30, seed=1))


@pytest.mark.parametrize("n", LONG)
def test_long_rows(n):
    agrees(randn(2, n), 0.5)
    agrees(randn(3, n, dtype=torch.float16), 1.0, True, randn(n, dtype=torch.float16, seed=1))


def test_entries_past_the_diagonal_do_not_count():
    for q, k in ((40, 40), (3, 50), (2, LONG[1])):
        x, dy = randn(2, q, k), randn(2, q, k, seed=1)
        hidden = torch.ones(q, k, dtype=torch.bool, device=DEVICE).triu(1 + k - q)
        found = []
        for fill in (0.0, math.nan):
            given = x.masked_fill(hidden, fill).requires_grad_()
            y = softmax(given, causal=True)
            y.backward(dy.masked_fill(hidden, fill))
            found.append((y.detach(), given.grad))
        for plain, poisoned in zip(*found, strict=True):
            assert torch.equal(plain, poisoned)
            assert not poisoned[..., hidden].any()


def test_rows_that_see_no_key_are_zero():
    x = randn(6, 4).requires_grad_()
    y = softmax(x, causal=True)
    y.sum().backward()
    assert not y[:2].any() and not x.grad[:2].any()
    assert torch.allclose(y[2:].sum(-1), torch.ones(4, device=DEVICE))


def test_a_row_of_minus_infinity_is_nan_as_in_pytorch():
    for n in (100, *LONG):
        x = torch.full((1, n), -math.inf, device=DEVICE)
        assert softmax(x).isnan().all()
        assert softmax(torch.zeros_like(x), mask=x).isnan().all()


def test_parts_of_a_row_may_be_minus_infinity():
    x = randn(2, LONG[0]) - 1000
    x[0, :20000] = x[1, 20000:] = -math.inf
    expected = torch.softmax(x.double(), -1)
    assert torch.allclose(softmax(x).double(), expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("n", [65536, 131072 + 16, 262144])
def test_long_rows_of_bfloat16_are_a_quarter_of_a_rounding_further_off_at_most(n):
    x = 4 * randn(4, n, dtype=torch.bfloat16)
    x[1, : n // 2] = -math.inf
    x[2, n // 3 :] -= 30
    x[3, 5] = math.nan
    expected = torch.softmax(x.double(), -1)
    gap = (softmax(x).double() - expected).abs()
    # The interpreter truncates and the GPU rounds; both sum in float32.
    bound = 2**-8 + 2**-10 if DEVICE == "cuda" else 2**-7
    assert (gap[:3] <= expected[:3] * (bound + 1e-5)).all()
    assert gap[3].isnan().all()


@pytest.mark.parametrize("scale", [0.0, -1.5, 1e-30, math.inf, math.nan])
def test_zero_negative_and_infinite_scales_equal_pytorch(scale):
    x = torch.tensor([[1.0, -2.0, 3.0], [0.0, 1.0, -math.inf]], device=DEVICE)
    expected = torch.softmax(x * scale, -1)
    assert torch.allclose(softmax(x, scale=scale), expected, rtol=1e-6, equal_nan=True)


def test_the_reference_is_differentiable():
    x = randn(2, 3, 5).double().requires_grad_()
    mask = randn(3, 5, seed=1).double()
    for arguments in ((1.0, False, None), (0.5, True, None), (-2.0, True, mask)):
        assert torch.autograd.gradcheck(lambda x, a=arguments: softmax_reference(x, *a), x)


def test_the_rule_suits_what_it_chooses_for():
    for n in (64, 1000, 4096, 12288, 16384, 32768, 65536):
        for itemsize in (2, 4):
            key = {"n": n, "itemsize": itemsize, "causal": False}
            kept = {
                family.FORWARD_ROW: family.fits_in_registers(**key),
                family.BACKWARD_ROW: not family.reads_rows_twice(**key),
            }
            for configs in (each for each, whether in kept.items() if whether):
                config = configs.choose(**key)
                assert config["BLOCK_N"] <= triton.next_power_of_2(n)
                if n >= 4096:
                    assert config in configs.candidates and configs.suits(config, **key)
                tried = sum(configs.suits(each, **key) for each in configs.candidates)
                assert tried <= 12


REFUSALS = {
    "no dimension": (ValueError, lambda: softmax(randn(1)[0]), "x: shape"),
    "a diagonal of one dimension": (
        ValueError,
        lambda: softmax(randn(4), causal=True),
        "x: shape",
    ),
    "float64": (TypeError, lambda: softmax(randn(2, 4).double()), "x: torch.float64, expected"),
    "integers": (
        TypeError,
        lambda: softmax(torch.ones(2, 4, dtype=torch.int32)),
        "x: torch.int32, expected",
    ),
    "integers and a diagonal": (
        TypeError,
        lambda: softmax(torch.ones(2, 4, dtype=torch.int32), causal=True),
        "x: torch.int32, expected",
    ),
    "a dimension": (TypeError, lambda: softmax(randn(2, 4), -1), "positional"),
    "a short mask": (
        ValueError,
        lambda: softmax(randn(2, 4), mask=randn(3)),
        r"mask: shape \(3,\), expected",
    ),
    "a mask of more dimensions": (
        ValueError,
        lambda: softmax(randn(2, 4), mask=randn(1, 2, 4)),
        "mask: shape",
    ),
    "a mask of truth values": (
        TypeError,
        lambda: softmax(randn(2, 4), mask=randn(4) > 0),
        r"mask: torch\.bool, expected torch\.float32, which",
    ),
    "a mask of truth values beside half precision": (
        TypeError,
        lambda: softmax(randn(2, 4).half(), mask=randn(4) > 0),
        r"mask: torch\.bool, expected torch\.float16 or torch\.float32, which",
    ),
    "a mask elsewhere": (
        ValueError,
        lambda: softmax(randn(2, 4), mask=torch.ones(4, device="meta")),
        "mask: on meta, expected",
    ),
    "a mask that learns": (
        ValueError,
        lambda: softmax(randn(2, 4), mask=randn(4).requires_grad_()),
        "mask: requires a gradient",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_bad_arguments_are_refused(what):
    error, call, message = REFUSALS[what]
    with pytest.raises(error, match=message):
        call()

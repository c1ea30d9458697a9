"""Check the one rule that decides whether an output is right."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.calls import tolerance

values = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40)
halves = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@given(values, values, st.integers(-20, 20))
def test_distance_does_not_depend_on_the_scale(some, others, exponent):
    n = min(len(some), len(others))
    x, truth = torch.tensor(some[:n]), torch.tensor(others[:n], dtype=torch.float64)
    if truth.abs().max() < 1e-3:
        truth[0] = 1.0
    scaled = tolerance.distance(x * 2.0**exponent, truth * 2.0**exponent)
    plain = tolerance.distance(x, truth)
    assert scaled.max == pytest.approx(plain.max, rel=1e-6, abs=1e-12)
    assert scaled.rms == pytest.approx(plain.rms, rel=1e-6, abs=1e-12)


@given(values, halves, st.randoms(use_true_random=False))
def test_distance_does_not_depend_on_order_or_chunks(some, dtype, random):
    truth = torch.tensor(some, dtype=torch.float64)
    x = (truth * 1.01).to(dtype)
    order = list(range(len(some)))
    random.shuffle(order)
    whole = tolerance.distance(x, truth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tolerance, "CHUNK", 3)
        parts = tolerance.distance(x[order], truth[order])
    assert parts.max == pytest.approx(whole.max) and parts.rms == pytest.approx(whole.rms)


@given(values, halves)
def test_a_rounded_oracle_passes_even_where_eager_is_exact(some, dtype):
    truth = torch.tensor(some, dtype=torch.float64).to(dtype).double() * (1 + 2**-30)
    error = tolerance.distance(truth.to(dtype), truth)
    assert tolerance.judge(error, tolerance.Distance(0.0, 0.0), dtype).ratio <= 1


@given(halves, st.floats(0, 1e-2), st.floats(1.001, 50))
def test_the_bound_is_twice_eager_and_a_floor(dtype, eager, excess):
    floor = tolerance.FLOOR[dtype]
    allowed = 2 * eager + floor
    known = tolerance.Distance(eager, eager)
    assert tolerance.judge(tolerance.Distance(allowed, allowed), known, dtype).ratio == 1
    for worse in ((allowed * excess, 0.0), (0.0, allowed * excess)):
        assert tolerance.judge(tolerance.Distance(*worse), known, dtype).ratio > 1


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 2**-18), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)]
)
def test_one_rounding_and_a_few_of_float32_are_allowed_if_eager_is_exact(dtype, most):
    exact = tolerance.Distance(0.0, 0.0)
    assert tolerance.judge(tolerance.Distance(most, most), exact, dtype).ratio == 1
    assert tolerance.judge(tolerance.Distance(1.01 * most, most), exact, dtype).ratio > 1


def test_misplaced_infinities_are_infinitely_far():
    truth = torch.tensor([1.0, -math.inf, math.nan, 1e6], dtype=torch.float64)
    right = torch.tensor([1.0, -math.inf, math.nan, math.inf], dtype=torch.float16)
    assert tolerance.distance(right, truth) == tolerance.Distance(0.0, 0.0)
    for place, value in ((0, math.nan), (0, math.inf), (1, math.inf), (2, 0.0), (3, 65504.0)):
        wrong = right.clone()
        wrong[place] = value
        assert tolerance.distance(wrong, truth).max == math.inf


def test_an_eager_overflow_allows_nothing():
    error = tolerance.Distance(0.5, 0.5)
    lost = tolerance.Distance(math.inf, math.inf)
    assert tolerance.judge(error, lost, torch.float16).ratio > 100
    assert tolerance.judge(error, None, torch.float16).ratio > 100


def test_empty_tensors_and_integers():
    empty = torch.empty(0, 4)
    assert tolerance.distance(empty, empty.double()) == tolerance.Distance(0.0, 0.0)
    with pytest.raises(ValueError, match="shape"):
        tolerance.distance(empty, torch.empty(4, 0))
    ones = torch.ones(3, dtype=torch.int64)
    assert tolerance.judge(tolerance.distance(ones, ones), None, ones.dtype).ratio == 0
    off = tolerance.distance(ones + 1, ones)
    assert tolerance.judge(off, None, ones.dtype).ratio == math.inf


def test_an_oracle_of_zeros_is_compared_absolutely():
    truth = torch.zeros(4, dtype=torch.float64)
    assert tolerance.distance(torch.full((4,), 0.5), truth) == tolerance.Distance(0.5, 0.5)


@given(values, st.floats(0, 1), st.integers(-120, 0))
def test_noise_of_the_oracle_is_judged_by_the_size_of_the_inputs(some, noise, exponent):
    scale = 2.0**exponent
    noisy = torch.tensor(some, dtype=torch.float64) * noise * tolerance.ZERO / 16 * scale
    wrong = torch.full(noisy.shape, scale / 2)
    assert tolerance.distance(wrong, noisy, scale).max == pytest.approx(0.5, rel=1e-6)
    assert tolerance.distance(torch.zeros_like(wrong), noisy, scale).max < 1e-10


@given(values, values, st.integers(0, 39), st.floats(1, 100), halves)
def test_an_entry_further_away_never_brings_a_result_nearer(some, others, place, more, dtype):
    n = min(len(some), len(others))
    truth = torch.tensor(others[:n], dtype=torch.float64)
    x = torch.tensor(some[:n], dtype=torch.float64)
    near = tolerance.distance(x.to(dtype), truth)
    x = x.to(dtype).double()
    x[place % n] += more * (x - truth)[place % n]
    far = tolerance.distance(x.to(dtype), truth)
    # Rounding to the dtype may undo half an ulp of an entry that hardly moved.
    slack = torch.finfo(dtype).eps * x.abs().max().item() / max(truth.abs().max().item(), 1e-11)
    assert far.max >= near.max - slack and far.rms >= near.rms - slack


anything = st.builds(tolerance.Distance, st.floats(0), st.floats(0))


@given(values, st.integers(0, 39), st.none() | anything, st.none() | anything, halves)
def test_a_nan_never_passes(some, place, eager, sensitivity, dtype):
    truth = torch.tensor(some, dtype=torch.float64)
    x = truth.to(dtype)
    x[place % len(some)] = math.nan
    found = tolerance.distance(x, truth)
    assert found.max == found.rms == math.inf
    assert tolerance.judge(found, eager, dtype, sensitivity).ratio > 1


@given(anything, anything, anything, halves)
def test_a_wider_bound_never_gives_a_worse_ratio(error, eager, sensitivity, dtype):
    if not math.isfinite(error.max + error.rms + eager.max + eager.rms):
        return
    alone = tolerance.judge(error, eager, dtype).ratio
    assert tolerance.judge(error, eager, dtype, sensitivity).ratio <= alone
    doubled = tolerance.Distance(2 * error.max, 2 * error.rms)
    assert tolerance.judge(doubled, eager, dtype).ratio >= alone


@given(halves, st.lists(st.integers(-127, 127), min_size=1, max_size=30), st.integers(0, 3))
def test_a_flush_to_zero_shows_where_eager_keeps_denormal_numbers(dtype, steps, shift):
    kind = torch.finfo(dtype)
    step = kind.tiny * kind.eps
    truth = torch.tensor(steps, dtype=torch.float64) * step * 2.0**-shift
    scale = max(truth.abs().max().item(), step)
    kept = tolerance.distance(truth.to(dtype), truth, scale)
    assert kept == tolerance.Distance(0.0, 0.0)
    flushed = tolerance.distance(torch.zeros_like(truth, dtype=dtype), truth, scale)
    verdict = tolerance.judge(flushed, kept, dtype)
    # If the exact value rounds to zero, a flush to zero is no error.
    assert (verdict.ratio > 1) == (truth.abs().max() > step / 2 * (1 + tolerance.FLOOR[dtype]))


@given(anything, st.none() | anything, halves, st.integers(1, 9))
def test_zeros_never_pass_however_far_eager_is(eager, sensitivity, dtype, entries):
    truth = torch.linspace(-3, 2, entries, dtype=torch.float64)
    zeros = torch.zeros(entries, dtype=dtype)
    error = tolerance.distance(zeros, truth)
    assert tolerance.judge(error, eager, dtype, sensitivity).ratio > 1
    assert tolerance.judge(error, eager, dtype, sensitivity, tolerance.Distance(1, 1)).ratio > 1


def test_a_result_as_far_off_as_eager_must_lie_near_eager():
    truth = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    rough = torch.tensor([3.0, -1.0, 0.5], dtype=torch.bfloat16)
    eager = tolerance.distance(rough, truth)
    assert tolerance.beyond_cap(eager, rough)

    def ratio(*values):
        x = torch.tensor(values, dtype=torch.bfloat16)
        beside = tolerance.distance(x, rough.double())
        return tolerance.judge(tolerance.distance(x, truth), eager, x.dtype, None, beside).ratio

    assert ratio(3, -1, 0.5) < 1 and ratio(2.5, -0.5, 0.5) < 1 and ratio(1, -1, 0.5) < 1
    # The result is as far from the oracle as eager, on the other side; or it is all zeros.
    assert ratio(-1, -1, 0.5) > 1 and ratio(0, 0, 0) > 1 and ratio(1, 1, 1) > 1
    assert not tolerance.beyond_cap(eager, torch.full_like(rough, 3.0))
    assert not tolerance.beyond_cap(tolerance.Distance(0.1, 0.1), rough)
    assert not tolerance.beyond_cap(tolerance.Distance(math.inf, math.inf), rough)

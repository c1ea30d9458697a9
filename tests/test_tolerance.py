"""The one rule by which an output is right."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness import tolerance

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

"""Check the comparison itself: it finds each kind of wrong result and counts declined calls."""

import math

import pytest
import torch
from conformance import Declined, Tally

X = torch.linspace(-1, 1, 9).requires_grad_()


def double(x):
    return x * 2


def called(ours, theirs=double, x=X):
    tally = Tally()
    tally.call("a call", ours, theirs, [x])
    return tally


def test_the_same_function_passes():
    assert called(double).passed == 1


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (lambda x: x * 2.00001, "off by"),
        (lambda x: (x * 2)[:-1], "shape"),
        (lambda x: (x * 2).double(), "float64"),
        (lambda x: torch.where(x > 0, x * 2, math.nan), "off by nan"),
        (Halved.apply, "off by"),
        (lambda x: (x * 2, x * 2), "3 results"),
    ],
)
def test_wrong_results_are_found(ours, words):
    tally = called(ours)
    assert tally.passed == 0
    assert len(tally.wrong) == 1 and words in tally.wrong[0]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite_must_be_the_same(value):
    x = torch.tensor([1.0, value])
    assert called(double, x=x).passed == 1
    assert called(lambda x: torch.where(x.isfinite(), x * 2, 0.5), x=x).wrong


def test_declined_calls_are_counted_by_reason():
    def refuses(x):
        raise ValueError(f"x: [{len(x)}, 3], expected at most 7")

    def lacks(x):
        raise Declined("no such thing")

    assert called(refuses).declined == {"x: …, expected at most …": 1}
    assert called(lacks).declined == {"no such thing": 1}
    with pytest.raises(RuntimeError):
        called(lambda x: x.view(2, 2))

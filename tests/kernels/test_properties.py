"""Check promises of the kernels beyond their references: laws, refusals, odd shapes."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.project import registry, source_tree
from harness.project.implementations import OURS
from kernels import layer_norm, softmax, vector
from tests.support.values import DEVICE, close, dtypes, few, randn

rows = st.integers(1, 6)
columns = st.integers(1, 700)


@few
@given(rows, columns, dtypes)
def test_softmax_rows_sum_to_one_and_ignore_a_shift(m, n, dtype):
    x = randn(m, n, dtype=dtype)
    y = softmax.softmax(x)
    close(y.double().sum(-1), torch.ones(m, device=DEVICE), dtype)
    # A shift by a power of two changes no difference between entries of this size. The exponents
    # are differences of products, which the interpreter rounds.
    whole = torch.round(x * 8)
    apart = softmax.softmax(whole) - softmax.softmax(whole + 64)
    assert apart.abs().max().item() <= {torch.float32: 2e-5, torch.float16: 2e-3}[dtype]


@few
@given(rows, st.integers(2, 700), dtypes)
def test_layer_norm_rows_are_standard(m, n, dtype):
    x = randn(m, n, dtype=dtype) * 3 + 1
    one, zero = (
        torch.ones(n, device=DEVICE, dtype=dtype),
        torch.zeros(n, device=DEVICE, dtype=dtype),
    )
    y = layer_norm.layer_norm(x, one, zero, 0.0).double()
    assert y.mean(-1).abs().max().item() < 2e-3
    assert (y.var(-1, unbiased=False) - 1).abs().max().item() < 5e-3


@few
@given(st.integers(0, 9000), st.sampled_from(["add", "mul", "maximum", "minimum"]), dtypes)
def test_binary_vectors_equal_pytorch_to_the_bit(n, name, dtype):
    x, y = randn(n, dtype=dtype, seed=1), randn(n, dtype=dtype, seed=2)
    if n:
        x[n // 2] = math.nan
    expected = getattr(torch, name)(x, y)
    actual = getattr(vector, name)(x, y)
    assert torch.equal(actual.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(actual.isnan(), expected.isnan())


def test_a_row_of_minus_infinity_is_nan_as_in_pytorch():
    for n in (100, 70000):
        x = torch.full((1, n), -math.inf, device=DEVICE)
        assert softmax.softmax(x).isnan().all()


def test_more_dimensions_and_broken_layouts_give_the_same():
    x = randn(3, 5, 40)
    assert torch.equal(softmax.softmax(x)[1], softmax.softmax(x[1]))
    assert torch.equal(
        softmax.softmax(x.transpose(0, 2)), softmax.softmax(x.transpose(0, 2).clone())
    )


@pytest.mark.parametrize("name", source_tree.ops(Path(__file__).parents[2]))
def test_every_op_has_a_function_of_ours(name):
    assert callable(registry.function(name, OURS))


REFUSALS = {
    "shapes that differ": lambda: vector.add(randn(3), randn(4)),
    "no dimension": lambda: softmax.softmax(randn(1)[0]),
    "a short weight": lambda: layer_norm.layer_norm(randn(2, 8), randn(7), randn(8), 1e-5),
    "a long bias": lambda: layer_norm.layer_norm(randn(2, 8), randn(8), randn(9), 1e-5),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_bad_arguments_are_refused(what):
    with pytest.raises(ValueError, match=r"expected|has no dimension|after"):
        REFUSALS[what]()

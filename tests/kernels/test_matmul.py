"""Check matmul: the identity, bias and activation, layouts, sizes at the limits, refusals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import matmul
from kernels._runtime import checks
from ops.matmul import LEAKY_SLOPE, matmul_reference
from tests.support.values import DEVICE, close, dtypes, few, randn


@few
@given(st.integers(1, 90), st.integers(1, 90), st.booleans(), dtypes)
def test_matmul_by_the_identity_changes_nothing(m, k, transposed, dtype):
    a = randn(m, k, dtype=dtype)
    eye = torch.eye(k, dtype=dtype, device=DEVICE)
    close(matmul.matmul(a, eye.T if transposed else eye), a, dtype)


def test_expanded_factors_are_walked_by_pointers():
    a, b = randn(1, 64, dtype=torch.float16).expand(32, 64), randn(64, 32, dtype=torch.float16)
    assert not matmul.tma_compatible(a)
    close(matmul.matmul(a, b), a.double() @ b.double(), torch.float16)


def test_a_matmul_too_large_for_its_indices_is_refused(monkeypatch):
    monkeypatch.setattr(matmul, "MOST_ITEMS", 40)
    for m, n, k in ((41, 2, 2), (2, 41, 2), (2, 2, 41)):
        with pytest.raises(ValueError, match="a size of 41, expected at most 40"):
            matmul.matmul(randn(m, k), randn(k, n))
    close(matmul.matmul(torch.eye(40, device=DEVICE), randn(40, 40)), randn(40, 40), torch.float32)
    largest = max(c["BLOCK_K"] for c in (*matmul.POINTER.candidates, *matmul.DESCRIPTOR.candidates))
    assert checks.MOST_ITEMS + largest < 2**31


@pytest.mark.parametrize("activation", ["none", "gelu", "relu"])
@pytest.mark.parametrize("biased", [False, True])
def test_matmul_is_the_formula(biased, activation):
    a, b = randn(70, 33, seed=1), randn(33, 50, seed=2)
    bias = randn(50, seed=3) if biased else None
    wide = bias.double() if biased else None
    expected = matmul_reference(a.double(), b.double(), wide, activation)
    close(matmul.matmul(a, b, bias, activation), expected, a.dtype)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 2), (3, 0, 2), (3, 2, 0)])
def test_an_empty_side_gives_what_pytorch_gives(m, n, k):
    a, b = randn(m, k), randn(k, n)
    assert torch.equal(matmul.matmul(a, b), a @ b)


REFUSALS = {
    "inner sizes": lambda: matmul.matmul(randn(2, 3), randn(4, 5)),
    "three dimensions": lambda: matmul.matmul(randn(1, 2, 3), randn(3, 5)),
    "an unknown activation": lambda: matmul.matmul(randn(2, 3), randn(3, 5), None, "swish"),
    "a bias of another size": lambda: matmul.matmul(randn(2, 3), randn(3, 5), randn(4)),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_bad_arguments_are_refused(what):
    with pytest.raises(ValueError, match=r"expected|has no dimension|after"):
        REFUSALS[what]()


def test_the_slope_is_the_one_that_the_problem_defines():
    assert matmul.LEAKY_SLOPE.value == LEAKY_SLOPE

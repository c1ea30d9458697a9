"""A result with an odd number of columns lies in rows that begin at multiples of 128 bytes."""

import pytest
import torch

from kernels.linear import linear
from network.stacks._padded_rows import with_padded_rows
from tests.support.networks import apart

ROWS, COLUMNS = (2, 9), 24


def made(n, shape=ROWS, dtype=torch.float16):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, COLUMNS, generator=generator).to(dtype)
    weight, bias = torch.randn(n, COLUMNS, generator=generator), torch.randn(n, generator=generator)
    return x, weight.to(dtype), bias.to(dtype)


def called(x, weight, bias=None):
    """The result, and whether it came from the part that was there before."""
    asked = []

    def other(*given):
        asked.append(given)
        return linear(*given)

    return with_padded_rows(other)(x, weight, bias), bool(asked)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n", "pitch"), [(33, 64), (67, 128)])
def test_an_odd_result_has_longer_rows(n, pitch, with_bias):
    x, weight, bias = made(n)
    bias = bias if with_bias else None
    found, before = called(x, weight, bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert not before and found.shape == exact.shape and apart(found, exact) < 1e-3
    assert found.stride() == (ROWS[1] * pitch, pitch, 1)


def test_a_weight_that_wants_a_gradient_is_padded_only_without_one():
    x, weight, _ = made(33)
    weight.requires_grad_()
    found, before = called(x, weight)
    assert before and found.requires_grad
    with torch.no_grad():
        assert not called(x, weight)[1]


@pytest.mark.parametrize(
    ("n", "shape"), [(64, ROWS), (33, (16,)), (33, (2, 8))], ids=["even", "few", "few of two"]
)
def test_others_are_as_before(n, shape):
    found, before = called(*made(n, shape))
    assert before and found.is_contiguous()


def test_a_compiler_traces_the_part_that_was_there(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    asked = []
    with_padded_rows(lambda *given: asked.append(given))(*made(33))
    assert len(asked) == 1

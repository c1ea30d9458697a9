"""Check attention: laws of its rows, keys without a score, many heads, layouts, refusals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import attention
from ops.attention import attention_reference
from tests.support.values import DEVICE, close, few, randn


@few
@given(st.integers(1, 150), st.booleans())
def test_attention_rows_are_means_of_the_values(s, causal):
    q, k = randn(1, 2, s, 64, seed=1), randn(1, 2, s, 64, seed=2)
    constant = torch.full((1, 2, s, 64), 3.0, device=DEVICE)
    close(attention.attention(q, k, constant, causal=causal), constant, torch.float32)
    if causal:
        v = randn(1, 2, s, 64, seed=3)
        close(attention.attention(q, k, v, causal=True)[:, :, 0], v[:, :, 0], torch.float32)


@pytest.mark.parametrize("shape", [(5, 1), (1, 5), (3, 4)])
def test_attention_of_more_heads_than_a_grid_holds(shape, monkeypatch):
    q, k, v = (randn(*shape, 20, 16, seed=seed) for seed in range(3))
    monkeypatch.setattr(attention, "MOST_HEADS", 2)
    expected = attention_reference(q.double(), k.double(), v.double(), True)
    close(attention.attention(q, k, v, causal=True), expected, q.dtype)


def test_keys_that_score_minus_infinity_by_the_tile_are_as_in_pytorch():
    q = torch.full((1, 1, 100, 16), 1e20, device=DEVICE)
    k, v = torch.zeros(1, 1, 100, 16, device=DEVICE), randn(1, 1, 100, 16)
    k[..., :70, :] = -1e20
    close(
        attention.attention(q, k, v),
        torch.nn.functional.scaled_dot_product_attention(q, k, v),
        q.dtype,
    )
    k[:] = -1e20
    assert attention.attention(q, k, v).isnan().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 3, 65, 32), (1, 2, 130, 128)])
def test_attention_is_the_formula(shape, causal):
    q, k, v = (randn(*shape, seed=seed) for seed in range(3))
    expected = attention_reference(q.double(), k.double(), v.double(), causal)
    close(attention.attention(q, k, v, causal=causal), expected, q.dtype)


def test_later_keys_and_values_do_not_reach_a_causal_row():
    q, k, v = (randn(1, 2, 70, 32, seed=seed) for seed in range(3))
    before = attention.attention(q, k, v, causal=True)
    k[:, :, 40:] = 1e4
    v[:, :, 40:] = 1e4
    assert torch.equal(attention.attention(q, k, v, causal=True)[:, :, :40], before[:, :, :40])


def test_heads_between_the_rows_give_the_same():
    q = randn(2, 40, 3, 64).transpose(1, 2)
    assert torch.equal(attention.attention(q, q, q), attention.attention(*[q.contiguous()] * 3))


REFUSALS = {
    "a head dimension of 48": lambda: attention.attention(*[randn(1, 1, 4, 48)] * 3),
    "keys of another length": lambda: attention.attention(
        randn(1, 1, 4, 64), randn(1, 1, 5, 64), randn(1, 1, 5, 64)
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refuses(what):
    with pytest.raises(ValueError, match=r"expected|has no dimension|after"):
        REFUSALS[what]()

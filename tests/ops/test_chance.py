"""Check the stream of a seed against its authors' answer, and what a law of chance refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ops import _philox
from ops._laws import uneven
from ops._philox import multiply_high, philox_words
from ops.random import DROPOUT, dropout_reference
from tests.support.examples import many


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((_philox.WORD, _philox.WORD), -1, None),
    ],
)
def test_the_stream_is_that_of_philox(counter, key, words):
    """The authors' known answer, and a counter and a key whose products overflow."""
    call = counter[0] | counter[1] << 32
    first = 4 * call if words else 4 * (2**60 - 1)
    found = philox_words(key, first, 4).tolist()
    assert words is None or tuple(found) == words
    assert found == _by_hand(first // 4, key)


def _by_hand(call, seed):
    """Philox-4x32-10 in Python's integers, which do not overflow."""
    words, key = [call & _philox.WORD, call >> 32, 0, 0], [seed & _philox.WORD, seed >> 32]
    key[1] &= _philox.WORD
    for _ in range(10):
        p0, p1 = words[0] * _philox.MULTIPLIERS[0], words[2] * _philox.MULTIPLIERS[1]
        words = [
            (p1 >> 32) ^ words[1] ^ key[0],
            p1 & _philox.WORD,
            (p0 >> 32) ^ words[3] ^ key[1],
            p0 & _philox.WORD,
        ]
        key = [(k + step) & _philox.WORD for k, step in zip(key, _philox.STEPS, strict=True)]
    return words


@many
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_product_of_64_bits_has_its_upper_half(word, factor):
    low, high = torch.tensor([word & _philox.WORD]), torch.tensor([word >> 32])
    found = multiply_high(low, high, factor).item()
    assert found % 2**64 == word * factor >> 64


def wrong_dropouts():
    x, dy = torch.randn(2**16), torch.randn(2**16)
    keep = torch.rand(2**16) >= 0.1
    good = torch.where(keep, x / 0.9, 0.0)
    back = torch.where(keep, dy / 0.9, 0.0)
    every_tenth = torch.arange(2**16) % 10 != 0
    return x, dy, {
        "kept entries": (torch.where(keep, x, 0.0), back),
        "dropped:": (torch.where(torch.rand(2**16) >= 0.12, x / 0.9, 0.0), back),
        "neighbours dropped": (torch.where(every_tenth, x / 0.9, 0.0), back),
        "not zero where out was dropped": (good, torch.where(keep.flip(0), dy / 0.9, 0.0)),
        "dx: ": (good, torch.where(keep, dy, 0.0)),
    }  # fmt: skip


def test_the_properties_refuse_wrong_dropouts():
    torch.manual_seed(1)
    x, dy, wrong = wrong_dropouts()
    for why, (out, dx) in wrong.items():
        given_, results = {"x": x, "dy": dy}, {"out": out, "dx": dx}
        assert why in DROPOUT.properties(given_, results, p=0.1, seed=0)


def test_the_law_refuses_numbers_that_are_not_uniform():
    torch.manual_seed(1)
    good = torch.randint(0, 1000, (2**15,))
    assert uneven(good, 0, 1000) == ""
    assert "range" in uneven(good, 0, 999)
    assert "range" in uneven(good, 1, 1000)
    assert "chi-square" in uneven(good.clamp(max=980), 0, 1000)
    assert "chi-square" in uneven(torch.zeros_like(good), 0, 1000)
    assert "neighbours" in uneven(good.sort().values, 0, 1000)
    assert uneven(torch.zeros(3, dtype=torch.int64), 0, 1000) == ""


def test_the_gradients_of_the_reference_are_right():
    x = torch.randn(40, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: dropout_reference(t, 0.4, 3), x)

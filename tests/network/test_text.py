"""The text: real, the same each time, and cut into batches that a seed fixes."""

import pytest
import torch

from network import text


def test_the_text_is_english_and_long_enough():
    words = text.english()
    assert len(words) > 400_000
    for word in (" the ", " statement ", " expression"):
        assert words.count(word) > 100
    assert text.english() == words and len(text.digest(words)) == 64


def test_bytes_give_the_text_back():
    words = text.english()[:5000] + "äé€"
    found = text.as_bytes(words)
    assert found.dtype == torch.int64
    assert bytes(found.tolist()).decode() == words


def test_pairs_are_fewer_and_the_same_each_time():
    pytest.importorskip("tokenizers", reason="needs the libraries of requirements/network.txt")
    words = text.english()[:60_000]
    first, second = text.as_pairs(words, 600), text.as_pairs(words, 600)
    assert torch.equal(first, second)
    assert 256 <= first.max() < 600
    assert len(first) < 0.6 * len(words)


def test_targets_are_the_tokens_after():
    batches = text.Batches(torch.arange(1000), batch=5, length=7)
    ids, targets = batches[3]
    assert ids.shape == targets.shape == (5, 7)
    assert torch.equal(targets, ids + 1)
    again, _ = batches[3]
    assert torch.equal(ids, again)
    assert not torch.equal(ids, batches[4][0])
    other = text.Batches(torch.arange(1000), batch=5, length=7, seed=1)
    assert not torch.equal(ids, other[3][0])


def test_each_token_can_be_drawn_and_a_short_text_is_refused():
    batches = text.Batches(torch.arange(8), batch=64, length=6)
    ids, targets = batches[0]
    assert ids.min() == 0 and targets.max() == 7
    with pytest.raises(ValueError, match="tokens: 6, expected more than the length of 6"):
        text.Batches(torch.arange(6), batch=1, length=6)

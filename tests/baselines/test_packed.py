"""Baselines make masks and lengths of packed sequences once, and anew where they must."""

import itertools

import torch

from baselines import _packed


def ends(*lengths):
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)


def test_lengths_are_fetched_once_for_a_pair_of_boundaries(monkeypatch):
    rows, keys = ends(3, 0, 4), ends(5, 1, 4)
    expected = [3, 0, 4], [5, 1, 4]
    assert _packed.lengths_of(rows, keys) == expected
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", None)
        assert _packed.lengths_of(rows, keys) == expected
    assert _packed.lengths_of(rows, ends(1, 1, 1))[1] == [1, 1, 1]
    assert _packed.lengths_of(rows.clone(), keys) == expected


def test_one_tensor_of_boundaries_serves_rows_and_keys():
    both = ends(3, 4)
    made = [_packed.made_once(both, keys, "option", object) for keys in (both, both.clone(), both)]
    assert made[0] is made[2] is not made[1]
    assert _packed.lengths_of(both, both) == ([3, 4], [3, 4])


def test_boundaries_that_were_written_are_read_again():
    rows, keys = ends(3, 4), ends(3, 4)
    _packed.lengths_of(rows, keys)
    keys[1] = 5
    assert _packed.lengths_of(rows, keys) == ([3, 4], [5, 2])
    rows[1] = 1
    assert _packed.lengths_of(rows, keys) == ([1, 6], [5, 2])


def test_made_things_go_with_the_boundaries_and_depend_on_the_options():
    rows, keys = ends(3), ends(3)
    made = [_packed.made_once(rows, keys, option, object) for option in (1, 2, 1)]
    assert made[0] is made[2] is not made[1]
    before = len(_packed._made)
    del rows
    assert len(_packed._made) == before - 1

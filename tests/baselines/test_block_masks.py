"""The lists that rivals make of a block mask, held against each pair of a row and a key."""

import importlib
import itertools
import sys

import pytest
import torch

from baselines._torch_formulas import seen_pairs


@pytest.fixture
def flex(monkeypatch):
    """The baseline as it is imported on a machine with a GPU; nothing is compiled."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delitem(sys.modules, "baselines.flex_attention", raising=False)
    yield importlib.import_module("baselines.flex_attention")
    sys.modules.pop("baselines.flex_attention", None)


@pytest.mark.parametrize(("s", "t"), [(64, 64), (50, 83), (83, 50)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_lists_of_flex_attention_hold_every_seen_pair_and_mask_what_is_cut(flex, s, t, causal):
    block, i, j = 16, -(-s // 16), -(-t // 16)
    dense = torch.rand((2, i, j), generator=torch.Generator().manual_seed(3)) < 0.6
    q, k = torch.empty(1, 2, s, 16), torch.empty(1, 2, t, 16)
    lists = flex._lists(q, k, k, dense, block, causal)
    seen = seen_pairs(q, k, k, dense, block, causal).expand(1, 2, s, t)
    found = torch.zeros(seen.shape, dtype=torch.bool)
    parts = (
        (lists.kv_num_blocks, lists.kv_indices, lists.mask_mod),
        (lists.full_kv_num_blocks, lists.full_kv_indices, lambda *place: True),
    )
    for counts, indices, is_seen in parts:
        for h, row in itertools.product(range(2), range(i)):
            for column in indices[0, h, row, : counts[0, h, row]].tolist():
                rows = range(row * block, min(s, row * block + block))
                keys = range(column * block, min(t, column * block + block))
                for query, key in itertools.product(rows, keys):
                    found[0, h, query, key] = bool(is_seen(0, h, query, key))
    assert torch.equal(found, seen) and lists.seq_lengths == (s, t)
    # Squares that are seen in whole need no mask, which takes time.
    assert lists.full_kv_num_blocks.sum() > 0


def test_seen_pairs_are_those_of_the_kept_squares():
    dense = torch.tensor([[True, False], [False, True]])
    q, k = torch.empty(1, 1, 5, 16), torch.empty(1, 1, 6, 16)
    told = [[i // 4 == j // 4 for j in range(6)] for i in range(5)]
    assert torch.equal(seen_pairs(q, k, k, dense, 4)[0, 0], torch.tensor(told))
    causal = [[i // 4 == j // 4 and j <= i + 1 for j in range(6)] for i in range(5)]
    assert torch.equal(seen_pairs(q, k, k, dense, 4, causal=True)[0, 0], torch.tensor(causal))

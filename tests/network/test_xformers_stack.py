"""The stack of xFormers repeats keys for a backward pass alone; a stand-in takes the calls."""

import importlib
import sys
import types

import pytest
import torch

import baselines

STACK = "network.stacks.xformers"


@pytest.fixture
def heads(monkeypatch):
    """The part, and the heads of keys in each of its calls."""
    asked = []

    def attention(q, k, v, causal):
        asked.append((k.shape[1], v.shape[1], causal))
        return q

    library = types.SimpleNamespace(attention=attention)
    monkeypatch.setitem(sys.modules, "baselines.xformers", library)
    monkeypatch.setattr(baselines, "xformers", library, raising=False)
    monkeypatch.delitem(sys.modules, STACK, raising=False)
    yield importlib.import_module(STACK).PARTS["attention"], asked
    sys.modules.pop(STACK, None)


@pytest.mark.parametrize(("wanted", "expected"), [(False, 2), (True, 8)])
def test_keys_are_repeated_for_a_gradient_alone(heads, wanted, expected):
    part, asked = heads
    q, k, v = (torch.ones(1, n, 4, 16) for n in (8, 2, 2))
    part(q, k, v.requires_grad_(wanted))
    with torch.no_grad():
        part(q, k, v)
    assert asked == [(expected, expected, True), (2, 2, True)]

"""Calls that max-autotune declines, and those that it takes."""

import importlib
import sys

import pytest
import torch


@pytest.fixture
def library(monkeypatch):
    """The baseline as it is imported on a machine with a GPU; nothing is compiled."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delitem(sys.modules, "baselines.torch_compile_max", raising=False)
    module = importlib.import_module("baselines.torch_compile_max")
    monkeypatch.setattr(module, "_adamw", lambda **given: given)
    yield module
    sys.modules.pop("baselines.torch_compile_max", None)


def test_a_step_of_many_tensors_is_declined_with_their_number(library):
    with pytest.raises(NotImplementedError, match=r"^17 tensors"):
        library.adamw([torch.zeros(4)] * 17, lr=0.1)


@pytest.mark.parametrize("params", [[torch.zeros(4)] * 16, torch.zeros(40)])
def test_a_step_of_few_tensors_is_that_of_the_compiler(library, params):
    assert library.adamw(params, lr=0.1) == {"params": params, "lr": 0.1}


def test_packed_sequences_are_declined(library):
    with pytest.raises(NotImplementedError, match=r"^packed sequences are tuned"):
        library.attention_varlen(*[torch.zeros(4)] * 5, causal=True)

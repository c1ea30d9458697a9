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


@pytest.mark.parametrize(
    "op, what", [("attention_varlen", "packed"), ("block_sparse_attention", "masks of blocks")]
)
def test_attention_that_keeps_its_scores_is_declined_if_its_mask_is_no_diagonal(library, op, what):
    with pytest.raises(NotImplementedError, match=rf"^{what} .*are tuned"):
        getattr(library, op)(*[torch.zeros(4)] * 5, causal=True)

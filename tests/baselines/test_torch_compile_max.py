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
    for name in ("_adamw", "_attention"):
        monkeypatch.setattr(module, name, lambda **given: given)
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
def test_attention_that_keeps_its_scores_is_declined(library, op, what):
    with pytest.raises(NotImplementedError, match=rf"^{what} .*are tuned"):
        getattr(library, op)(*[torch.zeros(4)] * 5, causal=True)


@pytest.mark.parametrize(
    "masked", [{"causal": True}, {"mask": torch.zeros(4)}, {"softcap": 50.0}, {"window": 0}]
)
def test_dense_attention_is_declined_if_the_compiler_finds_no_other_in_it(library, masked):
    tensors = dict.fromkeys("qkv", torch.zeros(4))
    whole = {"mask": None, "causal": False, "window": None, "softcap": None}
    assert library.attention(**tensors, **whole) == tensors
    with pytest.raises(NotImplementedError, match=r"^scores in memory are tuned"):
        library.attention(**tensors, **(whole | masked))

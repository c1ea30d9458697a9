"""Check the cuBLASLt epilogues that PyTorch offers, and that other activations are declined."""

import importlib

import pytest
import torch


def test_a_product_through_cublaslt_computes_what_it_offers():
    rival = importlib.import_module("baselines.torch_cublaslt")
    a, b, bias = torch.randn(8, 16), torch.randn(16, 32), torch.randn(32)
    for given in (bias, None):
        wanted = torch.relu(a @ b + (0 if given is None else given))
        assert torch.allclose(rival.matmul(a, b, given, "relu"), wanted, atol=1e-5)
    assert rival._zeros(4, a.dtype, a.device) is rival._zeros(4, a.dtype, a.device)
    for name in ("none", "gelu", "leaky_relu", "tanh", "gelu_tanh"):
        with pytest.raises(ValueError, match=r"torch_eager|no epilogue|by erf"):
            rival.matmul(a, b, bias, name)

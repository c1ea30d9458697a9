"""cuBLASLt's epilogues through PyTorch: a product whose bias and activation are part of it.

`torch._addmm_activation` has PyTorch hand bias and activation to cuBLASLt, where `torch.addmm` and
an activation are two kernels (aten/src/ATen/native/cuda/Blas.cpp). The epilogues are ReLU and, on a
GPU, GELU by tanh.
"""

import functools

import torch

LIBRARY = "torch"
ACCUMULATES = {
    "matmul": "float32, split sums in the dtype",
    "linear": "float32, split sums in the dtype",
}
SETTINGS = {
    "matmul": "without a bias it is given one of zeros, made once for each width",
    "linear": "without a bias it is given one of zeros, made once for each width",
}


def matmul(a, b, bias=None, activation="none", residual=None, up=None, **others):
    if a.dim() > 2 or residual is not None or up is not None or others:
        raise ValueError("batches, a residual, a scale, a gate and pre-activations are not offered")
    if activation == "none":
        raise ValueError("without an activation the call is that of torch_eager")
    if activation not in ("relu", "gelu_tanh"):
        raise ValueError(f"activation {activation!r} is no epilogue of cuBLASLt")
    tanh = activation == "gelu_tanh"
    if tanh and not a.is_cuda:
        raise ValueError("on a CPU the call computes GELU by erf")
    if bias is None:
        bias = _zeros(b.shape[1], a.dtype, a.device)
    return torch._addmm_activation(bias, a, b, use_gelu=tanh)


def linear(x, weight, bias=None, activation="none", up=None):
    # PyTorch has no derivative of the call.
    return matmul(x, weight.T, bias, activation, up=up)


@functools.lru_cache(maxsize=8)
def _zeros(width, dtype, device):
    """The call takes a bias always; a model would keep this one, as it keeps any other."""
    return torch.zeros(width, dtype=dtype, device=device)

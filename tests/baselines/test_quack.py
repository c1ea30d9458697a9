"""Check how QuACK is called, with stand-ins that refuse the calls that QuACK 0.6.5 refuses."""

import importlib
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

CHUNK = 4096


def fused(rows, columns, chunk_size):
    """The rows of each call of the fused pipeline; raises where QuACK's epilogue does."""
    assert chunk_size % 128 == 0
    while rows > 0:
        taken = chunk_size if rows > chunk_size else -(-rows // 128) * 128
        if taken == columns:
            raise ValueError("operand 'v': m == n makes row/col inference ambiguous")
        rows -= taken


@pytest.fixture(scope="module")
def quack():
    """baselines.quack over stand-ins; `calls` holds the chunk sizes that the loss was asked for."""
    calls = []

    def loss(x, weight, target, chunk_size=CHUNK, ignore_index=-100, reduction="mean"):
        calls.append(chunk_size)
        if x.dtype == torch.bfloat16:
            fused(*x.shape, chunk_size)
        return x.sum()

    def supported(x, weight, chunk_size, reduction):
        return x.dtype == torch.bfloat16

    def forward(x, weight, bias, eps, return_rstd, return_mean):
        if {weight.dtype, bias.dtype} != {torch.float32}:
            raise AssertionError("Weight must be float32")
        y = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps)
        return y.to(x.dtype), x.sum(-1), x.mean(-1)

    def backward(x, weight, dy, rstd, mean):
        return dy, torch.ones_like(weight), torch.zeros_like(weight)

    names = {
        "quack": {},
        "quack.gemm_interface": {"gemm": None, "gemm_act": None, "gemm_add": None},
        "quack.linear_cross_entropy": {
            "chunked_linear_cross_entropy": loss,
            "scaled_exp_lce_supported": supported,
        },
        "quack.rmsnorm": {"layernorm_fwd": forward, "layernorm_bwd": backward},
        "quack.rotary": {"apply_rotary_emb": None},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, values in names.items():
            module = types.ModuleType(name)
            vars(module).update(values)
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "baselines.quack", raising=False)
        module = importlib.import_module("baselines.quack")
        sys.modules.pop("baselines.quack")
        yield module, calls


def meta(rows, columns, dtype):
    return torch.empty(rows, columns, dtype=dtype, device="meta")


def chunk_of(quack, rows, columns, dtype=torch.bfloat16):
    module, calls = quack
    x, weight = meta(rows, columns, dtype), meta(32000, columns, dtype)
    module.linear_cross_entropy(x, weight, torch.zeros(rows, dtype=torch.int64, device="meta"))
    return calls[-1]


def test_the_shapes_at_which_the_default_call_raises_have_a_chunk_that_works(quack):
    with pytest.raises(ValueError, match="m == n"):
        fused(8192, 4096, CHUNK)
    assert chunk_of(quack, 4096, 4096) == chunk_of(quack, 8192, 4096) == 2048
    assert chunk_of(quack, 2048, 2048) == 1024
    assert chunk_of(quack, 4096, 2048) == CHUNK
    # The default call of other dtypes has no such fault.
    assert chunk_of(quack, 4096, 4096, torch.float16) == CHUNK


@given(st.integers(1, 20000), st.sampled_from([64, 128, 896, 2048, 4096, 5120, 8192]))
def test_the_chunk_is_the_default_wherever_that_works(quack, rows, columns):
    try:
        fused(rows, columns, CHUNK)
        works = True
    except ValueError:
        works = False
    if columns > 128 or works:
        assert (chunk_of(quack, rows, columns) == CHUNK) == works


def test_parameters_in_float32_reach_the_library_and_so_do_their_gradients(quack):
    module, _ = quack
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = (torch.ones(8, requires_grad=True) for _ in range(2))
    y = module.layer_norm(x, weight, bias, 1e-5)
    found = torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))
    assert [tensor.dtype for tensor in found] == [torch.bfloat16, torch.float32, torch.float32]
    with pytest.raises(AssertionError, match="must be float32"):
        module.layer_norm(x, weight.bfloat16(), bias.bfloat16(), 1e-5)
    assert set(module.WIDE["layer_norm"]) == {"weight", "bias"}

"""Check how FlashInfer is called, with stand-ins that have the signatures of version 0.7.2."""

import importlib
import sys
import types

import pytest
import torch

from harness.calls import wide
from harness.project import registry
from harness.verify import check
from harness.verify import problem as oracle

ATTENTION, _ = registry.op("attention")


def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    wide = input.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, True) + eps) * weight).to(input.dtype)


def fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
    residual += input
    input.copy_(rmsnorm(residual, weight, eps))


def layernorm(input, gemma, beta, eps=1e-6):
    if {gemma.dtype, beta.dtype} != {torch.float32} or input.dtype != torch.bfloat16:
        raise TypeError("Need to be float32")
    norm = torch.nn.functional.layer_norm
    return norm(input.float(), input.shape[-1:], gemma, beta, eps).to(input.dtype)


def single_prefill_with_kv_cache(
    q, k, v, causal=False, kv_layout="NHD", window_left=-1, logits_soft_cap=None
):
    """q: [position, head, dimension]; k, v: [head, position, dimension] where kv_layout is HND."""
    if kv_layout != "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    window = None if window_left < 0 else window_left
    given = q.transpose(0, 1)[None], k[None], v[None]
    out = ATTENTION.reference(*given, causal=causal, window=window, softcap=logits_soft_cap)
    return out[0].transpose(0, 1).contiguous()


class BlockSparseAttentionWrapper:
    """Its plan and its run need a GPU; here the file that names it is imported alone."""


@pytest.fixture
def flashinfer(monkeypatch):
    """baselines.flashinfer over stand-ins."""
    names = {
        "flashinfer": [],
        "flashinfer.norm": [rmsnorm, fused_add_rmsnorm, layernorm],
        "flashinfer.prefill": [single_prefill_with_kv_cache],
        "flashinfer.sparse": [BlockSparseAttentionWrapper],
    }
    for name, functions in names.items():
        module = types.ModuleType(name)
        vars(module).update({function.__name__: function for function in functions})
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "baselines.flashinfer", raising=False)
    module = importlib.import_module("baselines.flashinfer")
    monkeypatch.delitem(sys.modules, "baselines.flashinfer")
    return module


def verdicts(rival, name):
    """Each plain forward cell of an op in bfloat16, with "" where it is right or why not."""
    op, _ = registry.op(name)
    function = wide.judged(getattr(rival, name), rival.WIDE.get(name, ()))
    found = []
    for case in op.edge:
        if case.layout or case.values or not all(case.sizes.values()):
            continue
        if "bfloat16" not in op.dtypes_of(case):
            continue
        problem = oracle.problem(op, case, "bfloat16", 0, "cpu", op.reference)
        try:
            in_place = name in rival.IN_PLACE
            reason = check.check(function, problem, "forward", False, in_place).reason
        except ValueError as error:
            reason = str(error)
        found.append((case, reason))
    return found


def test_its_norms_compute_their_ops(flashinfer):
    declined = {"bare", "wide", "unit_offset"}
    found = verdicts(flashinfer, "rms_norm")
    assert {reason == "" for case, reason in found if declined & {*case.flags}} == {False}
    found = [(case, reason) for case, reason in found if not declined & {*case.flags}]
    assert {reason for _, reason in found} == {""}
    assert any("residual" in case.flags for case, _ in found)
    found = verdicts(flashinfer, "layer_norm")
    assert {reason == "" for case, reason in found if "bare" in case.flags} == {False}
    found = [(case, reason) for case, reason in found if "bare" not in case.flags]
    plain = {reason for case, reason in found if "residual" not in case.flags}
    assert plain == {""}
    assert {reason for _, reason in found} - plain == {"its layer norm takes no residual"}


def test_its_attention_is_for_one_request(flashinfer):
    found = verdicts(flashinfer, "attention")
    masked = {reason for case, reason in found if "mask" in case.flags}
    assert masked == {"a batch in this layout is not offered", "an additive mask is not offered"}
    found = [(case, reason) for case, reason in found if "mask" not in case.flags]
    assert {reason for case, reason in found if case.sizes["B"] == 1} <= {""}
    declined = {reason for case, reason in found if case.sizes["B"] != 1}
    assert declined == {"a batch in this layout is not offered"}
    timed = [case for case in ATTENTION.sweep if case.sizes["B"] == 1]
    assert timed
    for causal in (False, True):
        q, k, v = (torch.randn(1, 3, 5, 16) for _ in range(3))
        wanted = ATTENTION.reference(q, k, v, causal=causal)
        assert torch.allclose(flashinfer.attention(q, k, v, causal=causal), wanted, atol=1e-6)


def test_a_kernel_for_inference_declines_gradients(flashinfer):
    x, weight = torch.ones(2, 4, requires_grad=True), torch.ones(4)
    with pytest.raises(ValueError, match="gradients are not offered"):
        flashinfer.rms_norm(x, weight, 1e-6)
    with torch.no_grad():
        assert flashinfer.rms_norm(x, weight, 1e-6).shape == x.shape

"""Test the calls of FlashAttention-3 and 4, whose libraries need a GPU, by imitations of them.

An imitation has the signature of the library's function and computes by the formula. So a call that
the library would refuse fails here too.
"""

import importlib
import sys
import types

import pytest
import torch

from baselines import _torch_formulas as formulas

pytestmark = pytest.mark.no_gpu
# The operators as the extension declares them; xformers/ops/fmha/flash3.py 0.0.35 asks for these.
FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None,"
    " Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None,"
    " Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None,"
    " Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,"
    " Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None,"
    " Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None,"
    " Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None,"
    " float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,"
    " int window_size_right=-1, int attention_chunk=0, float softcap=0.,"
    " bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0,"
    " bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
BWD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,"
    " Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None,"
    " Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,"
    " float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,"
    " int window_size_right=-1, float softcap=0., bool deterministic=False, int sm_margin=0)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def named(schema, values):
    """The arguments of a call by name, with the defaults of those left out."""
    arguments = torch._C.parse_schema(f"flash_attn_3::{schema}").arguments
    given = {argument.name: argument.default_value for argument in arguments}
    return given | dict(zip(given, values, strict=False))


def by_formula(q, k, v, given):
    """The attention of [batch, position, head, dimension], or packed, as a library is asked."""
    assert given["softmax_scale"] == pytest.approx(q.shape[-1] ** -0.5)
    assert {x.stride(-1) for x in (q, k, v)} == {1}
    causal, left = given["is_causal"], given["window_size_left"]
    assert given["window_size_right"] == (0 if causal else -1)
    options = {
        "causal": causal,
        "window": None if left < 0 else left,
        "softcap": given["softcap"] or None,
    }
    if given["cu_seqlens_q"] is not None:
        for side in "qk":
            boundaries = given[f"cu_seqlens_{side}"]
            assert boundaries.dtype == torch.int32
            assert given[f"max_seqlen_{side}"] == boundaries.diff().max()
        return formulas.attention_varlen(
            q, k, v, given["cu_seqlens_q"], given["cu_seqlens_k"], **options
        )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if given.get("seqused_k") is not None:
        return formulas.decode_attention(q, k, v, given["seqused_k"].long()).transpose(1, 2)
    return formulas.attention(q, k, v, **options).transpose(1, 2)


@pytest.fixture
def flash_attn_3(monkeypatch):
    """The baseline over operators; its `splits` are the `num_splits` of each forward call."""
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(FWD)
    library.define(BWD)
    splits = []

    def fwd(*values):
        given = named(FWD, values)
        splits.append(given["num_splits"])
        q, k, v = (given[name] for name in "qkv")
        out = by_formula(q, k, v, given).contiguous()
        return out, q.new_zeros(1), q.new_zeros(0), q.new_zeros(0)

    def bwd(*values):
        given = named(BWD, values)
        dout = given["dout"]
        assert dout.stride(-1) == 1 and given["out"].shape == dout.shape
        with torch.enable_grad():
            inputs = [given[name].detach().requires_grad_() for name in "qkv"]
            found = torch.autograd.grad(by_formula(*inputs, given), inputs, dout)
        for name, value in zip("qkv", found, strict=True):
            given[f"d{name}"].copy_(value)
        return tuple(dout.new_zeros(0) for _ in range(5))

    for schema, function in (("fwd", fwd), ("bwd", bwd)):
        library.impl(schema, function, "CPU")
    package = types.ModuleType("flash_attn_3")
    package._C = types.ModuleType("flash_attn_3._C")
    monkeypatch.setitem(sys.modules, "flash_attn_3", package)
    monkeypatch.setitem(sys.modules, "flash_attn_3._C", package._C)
    monkeypatch.delitem(sys.modules, "baselines.flash_attn_3", raising=False)
    module = importlib.import_module("baselines.flash_attn_3")
    monkeypatch.setattr(module, "splits", splits, raising=False)
    yield module
    sys.modules.pop("baselines.flash_attn_3", None)
    library._destroy()


@pytest.fixture
def flash_attn_4(monkeypatch):
    """The baseline over a function that takes names as that of flash-attn-4 4.0.0b36 does."""

    # The fourth argument is not the boundaries of rows, as it is in the other two libraries.
    def packed(
        q,
        k,
        v,
        qv=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        *,
        causal=False,
        window_size=(None, None),
        softcap=0.0,
    ):
        assert qv is None and window_size[1] == (None if window_size[0] is None else 0)
        given = {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
            "softmax_scale": q.shape[-1] ** -0.5,
            "is_causal": causal,
            "window_size_left": -1 if window_size[0] is None else window_size[0],
            "window_size_right": 0 if causal else -1,
            "softcap": softcap,
        }
        return by_formula(q, k, v, given), None

    package, cute = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
    cute.flash_attn_func, cute.flash_attn_varlen_func, package.cute = None, packed, cute
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.delitem(sys.modules, "baselines.flash_attn_4", raising=False)
    yield importlib.import_module("baselines.flash_attn_4")
    sys.modules.pop("baselines.flash_attn_4", None)


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def same(found, wanted, inputs):
    torch.testing.assert_close(found, wanted)
    dout = randn(*wanted.shape).transpose(-1, -2).contiguous().transpose(-1, -2)
    expected = torch.autograd.grad(wanted, inputs, dout)
    torch.testing.assert_close(torch.autograd.grad(found, inputs, dout), expected)


OPTIONS = [{}, {"causal": True}, {"causal": True, "window": 3}, {"softcap": 2.0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attention_with_shared_heads_and_its_gradients(flash_attn_3, options):
    inputs = [randn(2, h, s, 16).requires_grad_() for h, s in ((4, 5), (2, 9), (2, 9))]
    same(flash_attn_3.attention(*inputs, **options), formulas.attention(*inputs, **options), inputs)
    assert flash_attn_3.splits == [1]


@pytest.mark.parametrize("library", ["flash_attn_3", "flash_attn_4"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_attention_and_its_gradients(library, options, request):
    module = request.getfixturevalue(library)
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ((0, 4, 9), (0, 4, 13)))
    inputs = [randn(t, h, 16).requires_grad_() for t, h in ((9, 4), (13, 2), (13, 2))]
    given = {**options, "max_seqlen_q": 5, "max_seqlen_k": 9}
    found = module.attention_varlen(*inputs, cu_q, cu_k, **given)
    same(found, formulas.attention_varlen(*inputs, cu_q, cu_k, **options), inputs)


@pytest.mark.parametrize("lengths", [None, [7, 3]], ids=str)
def test_a_cache_is_split_as_the_library_wants(flash_attn_3, lengths):
    q, k, v = randn(2, 4, 1, 16), randn(2, 2, 8, 16), randn(2, 2, 8, 16).mT.contiguous().mT
    lengths = None if lengths is None else torch.tensor(lengths)
    wanted = formulas.decode_attention(q, k, v, lengths)
    torch.testing.assert_close(flash_attn_3.decode_attention(q, k, v, lengths), wanted)
    assert flash_attn_3.splits == [0]


def test_a_mask_is_refused(flash_attn_3):
    with pytest.raises(ValueError, match="a mask is not offered"):
        flash_attn_3.attention(*(randn(1, 1, 4, 16) for _ in range(3)), mask=randn(4, 4))

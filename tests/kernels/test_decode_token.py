"""Attention of a decoded token that comes with its key and value: rotated, written and attended."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.jit import JITFunction

from kernels import decode_attention as decoding
from kernels._runtime.call_cache import uncached
from kernels._runtime.plan_compiler import ALIGNMENT
from kernels.rotary import rotary
from tests.support.fake_gpu import compiled
from tests.support.fake_host import Host
from tests.support.values import DEVICE, few, randn

ROOT = Path(__file__).parents[2]
decode = decoding.decode_attention
BOUND = {torch.float32: 1.6e-5, torch.float16: 1.2e-2}
HALF = torch.float16
BITS = {torch.float32: torch.int32, torch.float16: torch.int16}


def same_bits(one, other):
    return torch.equal(one.view(BITS[one.dtype]), other.view(BITS[other.dtype]))


def angles(rows, r, dtype=torch.float32):
    """cos and sin: [L, R]."""
    places = torch.arange(rows)[:, None] * 100.0 ** (-torch.arange(r) / r)
    return {"cos": places.cos().to(dtype).to(DEVICE), "sin": places.sin().to(dtype).to(DEVICE)}


def made(b, h, heads, s, d, dtype=torch.float32):
    """q, k, v and the new key and value."""
    q = randn(b, h, 1, d, dtype=dtype)
    k, v = (randn(b, heads, s, d, dtype=dtype, seed=i) for i in (1, 2))
    new = {f"new_{x}": randn(b, heads, 1, d, dtype=dtype, seed=i) for i, x in ((3, "k"), (4, "v"))}
    return q, k, v, new


def ends_of(lengths, b, s):
    """The lengths that count, as numbers."""
    return [s] * b if lengths is None else [min(s, max(0, length)) for length in lengths]


def separate(q, k, v, lengths, new_k, new_v, cos=None, sin=None, **options):
    """The result by `rotary`, writes by PyTorch and attention over the caches; the caches then."""
    b, s = len(q), k.shape[2]
    k, v = k.clone(), v.clone()
    ends = ends_of(None if lengths is None else lengths.tolist(), b, s)
    if cos is not None:
        positions = torch.tensor([[max(0, end - 1)] for end in ends], device=DEVICE)
        turned = rotary(q.transpose(1, 2), new_k.transpose(1, 2), cos, sin, positions)
        q, new_k = (x.transpose(1, 2) for x in turned)
    for one, end in enumerate(ends):
        if end:
            place = torch.tensor([end - 1], device=DEVICE)
            k[one].index_copy_(1, place, new_k[one])
            v[one].index_copy_(1, place, new_v[one])
    return decode(q, k, v, lengths, return_lse=True, **options), k, v


def agrees(q, k, v, new, lengths=None, **options):
    """One launch does what the separate ones do, and the caches get the same bits."""
    ends = ends_of(lengths, len(q), k.shape[2])
    for one, end in enumerate(ends):
        # Nothing of what was there is read.
        for cache in (k, v):
            cache[one, :, max(0, end - 1) :] = math.nan
    given = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    (truth, truth_lse), keys, values = separate(q, k, v, given, **new, **options)
    out, lse = decode(q, k, v, given, **new, **options, return_lse=True)
    assert same_bits(k, keys) and same_bits(v, values)
    assert out.is_contiguous() and out.dtype == q.dtype and lse.dtype == torch.float32
    assert torch.equal(lse.isneginf(), truth_lse.isneginf())
    assert (out - truth).abs().max().item() <= BOUND[q.dtype]
    there = lse.isfinite()
    assert torch.allclose(lse[there], truth_lse[there], rtol=0, atol=1e-5)
    for one, end in enumerate(ends):
        if not end:
            assert not out[one].any() and lse[one].isneginf().all()
    return out, lse


@few
@given(st.data())
def test_random_shapes_lengths_and_splits(data):
    b, heads, s = (data.draw(st.integers(1, most)) for most in (3, 2, 300))
    d = 8 * data.draw(st.integers(2, 6))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    q, k, v, new = made(b, heads * data.draw(st.sampled_from([1, 2, 5])), heads, s, d, dtype)
    if r := data.draw(st.one_of(st.just(0), st.just(d // 2), st.integers(1, d // 2))):
        new |= angles(s, r, data.draw(st.sampled_from([dtype, torch.float32])))
    length = st.one_of(st.sampled_from([-2, 0, 1, s, s + 2]), st.integers(1, s))
    agrees(
        *(q, k, v, new),
        data.draw(st.one_of(st.none(), st.lists(length, min_size=b, max_size=b))),
        window=data.draw(st.one_of(st.none(), st.integers(0, 100))),
        softcap=data.draw(st.sampled_from([None, 0.7])),
        num_splits=data.draw(st.one_of(st.none(), st.integers(1, 9))),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("r", [0, 12])
@pytest.mark.parametrize("splits", [1, 3])
def test_each_length_about_a_tile_of_keys(dtype, r, splits):
    lengths = [0, 1, 2, 64, 65, 66, 130, 131]
    q, k, v, new = made(len(lengths), 4, 2, 130, 24, dtype)
    new |= angles(130, r) if r else {}
    agrees(q, k, v, new, lengths, num_splits=splits)
    agrees(q, k, v, new, lengths, num_splits=splits, window=40, softcap=2.0)


@pytest.mark.parametrize("window", [None, 0, 5])
@pytest.mark.parametrize("r", [0, 8])
def test_a_cache_of_one_position_holds_the_new_token_alone(window, r):
    """A size of one is a constant in a kernel, and so is what follows from it."""
    q, k, v, new = made(2, 4, 2, 1, 16)
    new |= angles(1, r) if r else {}
    out, _ = agrees(q, k, v, new, window=window)
    assert torch.equal(out, new["new_v"].repeat_interleave(2, 1))
    agrees(q, k, v, new, [1, 0], window=window)


@pytest.mark.parametrize("splits", [1, 2])
def test_more_rows_than_a_tile_holds(splits):
    q, k, v, new = made(2, 150, 2, 90, 16)
    agrees(q, k, v, new | angles(90, 5), [90, 40], num_splits=splits)


def test_a_sequence_without_keys_takes_nothing_of_its_token():
    q, k, v, new = made(2, 4, 2, 40, 16)
    new["new_v"][0], new["new_k"][0] = math.inf, math.nan
    before = [x.clone() for x in (k, v)]
    out = decode(q, k, v, torch.tensor([0, 7], device=DEVICE), **new, **angles(40, 8))
    assert not out[0].any() and out[1].isfinite().all()
    assert all(map(torch.equal, (k[0], v[0]), (x[0] for x in before)))


def test_an_empty_cache_and_an_empty_batch_take_no_token():
    q, k, v, new = made(2, 4, 2, 0, 16)
    assert not decode(q, k, v, **new, **angles(1, 8)).any()
    q, k, v, new = made(0, 4, 2, 9, 16)
    no_lengths = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert decode(q, k, v, no_lengths, **new, **angles(9, 8)).shape == (0, 4, 1, 16)


def test_a_new_key_that_scores_minus_infinity_counts_for_nothing():
    q, k, v, new = made(2, 4, 2, 40, 16)
    q = q.abs() + 0.1
    new["new_k"].fill_(-math.inf)
    out, lse = decode(q, k, v, torch.tensor([1, 7], device=DEVICE), **new, return_lse=True)
    assert not out[0].any() and lse[0].isneginf().all()
    truth, truth_lse = decode(q[1:], k[1:, :, :6], v[1:, :, :6], return_lse=True)
    assert torch.allclose(out[1:], truth, atol=1e-6) and torch.allclose(lse[1:], truth_lse)


@pytest.mark.parametrize("scale", [2.0**-100, 0.3])
def test_scale_and_lengths_of_32_bits(scale):
    q, k, v, new = made(2, 4, 2, 70, 24)
    lengths = torch.tensor([5, 70], dtype=torch.int32, device=DEVICE)
    (truth, _), keys, _ = separate(q, k, v, lengths, **new, scale=scale)
    out = decode(q, k, v, lengths, **new, scale=scale)
    assert (out - truth).abs().max() <= BOUND[q.dtype] and same_bits(k, keys)


def test_entries_beyond_the_rotated_ones_keep_their_bits():
    q, k, v, new = made(1, 2, 1, 9, 32, torch.float16)
    new["new_k"][..., 10:14] = torch.tensor([-0.0, math.inf, -math.inf, math.nan])
    new["new_v"][..., :3] = torch.tensor([-0.0, math.nan, math.inf])
    decode(q, k, v, **new, **angles(9, 5))
    assert same_bits(k[:, :, 8, 10:], new["new_k"][:, :, 0, 10:])
    assert same_bits(v[:, :, 8], new["new_v"][:, :, 0])
    assert k[:, :, 8, :10].isfinite().all()


def test_a_position_without_a_row_of_angles_is_not_a_number():
    """On a GPU; the host refuses lengths on a CPU, so the launcher is asked."""
    q, k, v, new = made(3, 4, 2, 50, 32)
    wide = {name: x.flatten() for name, x in angles(50, 6).items()}
    # The memory behind the tables holds finite numbers.
    tables = {name: x[: 20 * 6].view(20, 6) for name, x in wide.items()}
    lengths, before = torch.tensor([20, 21, 0], device=DEVICE), k.clone()
    out, lse = decoding.decode_fwd(
        q, k, v, lengths, *new.values(), *tables.values(), 0.3, 0.0, None, 2, True
    )
    assert out[0].isfinite().all() and out[1].isnan().all() and not out[2].any()
    assert lse[0].isfinite().all() and lse[1].isnan().all() and lse[2].isneginf().all()
    assert k[1, :, 20, :12].isnan().all() and same_bits(
        k[1, :, 20, 12:], new["new_k"][1, :, 0, 12:]
    )
    k[0, :, 19], k[1, :, 20] = before[0, :, 19], before[1, :, 20]
    assert same_bits(k, before)
    # So far behind the tables is no memory.
    q, k, v, new = made(1, 2, 1, 1, 32)
    k, v = (x.expand(-1, -1, 2**30, -1) for x in (k, v))
    out, _ = decoding.decode_fwd(
        q, k, v, None, *new.values(), *tables.values(), 0.3, 0.0, 0, 1, False
    )
    assert out.isnan().all()


def views(q, k, v, new):
    """The same tensors as views of a joined projection, and of caches in another order."""
    (b, h, _, d), heads = q.shape, k.shape[1]
    joined = torch.cat([q, *new.values()], 1).transpose(1, 2).reshape(b, -1)
    joined = torch.cat([joined, joined], 1)[:, : joined.shape[1]]
    parts = joined.split([h * d, heads * d, heads * d], 1)
    q, new_k, new_v = (x.unflatten(1, (-1, 1, d)) for x in parts)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    v = torch.cat([v, v], 2)[:, :, : v.shape[2]]
    return q, k, v, {"new_k": new_k, "new_v": new_v}


@pytest.mark.parametrize("r", [0, 16])
def test_views_of_a_projection_and_of_caches_need_no_copy(r, monkeypatch):
    q, k, v, new = made(3, 4, 2, 60, 32)
    lengths = torch.tensor([60, 33, 1], device=DEVICE)
    table = angles(60, r) if r else {}
    given = views(q, k, v, new)
    assert not (given[0].is_contiguous() or given[1].is_contiguous())
    expected = decode(q, k, v, lengths, **new, **table)

    def copies(*_):
        raise AssertionError("a tensor was copied")

    contiguous = torch.Tensor.contiguous
    monkeypatch.setattr(
        torch.Tensor, "contiguous", lambda x: x if x.is_contiguous() else copies(contiguous(x))
    )
    q, keys, values, new = given
    assert torch.equal(decode(q, keys, values, lengths, **new, **table), expected)
    assert same_bits(keys, k) and same_bits(values, v)


def test_rows_and_tables_whose_entries_lie_apart_are_copied():
    q, k, v, new = made(2, 4, 2, 60, 32)
    table = angles(60, 16)
    others = [x.clone() for x in (k, v)]
    expected = decode(q, k, v, **new, **table)
    apart = {name: x.mT.contiguous().mT for name, x in table.items()}
    apart |= {name: torch.stack([x, -x], -1)[..., 0] for name, x in new.items()}
    assert torch.equal(decode(q, *others, **apart), expected)
    assert same_bits(others[0], k) and same_bits(others[1], v)


def test_lengths_may_lie_apart():
    q, k, v, new = made(2, 4, 2, 60, 32)
    lengths = torch.tensor([[7, 0], [60, 0]], device=DEVICE)[:, 0]
    (truth, _), keys, _ = separate(q, k, v, lengths, **new)
    assert (decode(q, k, v, lengths, **new) - truth).abs().max() <= BOUND[q.dtype]
    assert same_bits(k, keys)


def test_autograd_notices_that_the_caches_were_written():
    q, k, v, new = made(1, 2, 2, 9, 16)
    for cache in (k, v):
        factor = torch.ones_like(cache, requires_grad=True)
        product = (factor * cache).sum()
        decode(q, k, v)
        torch.autograd.grad(product, factor, retain_graph=True)
        decode(q, k, v, **new)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(product, factor)
    with torch.inference_mode():
        q, k, v, new = made(1, 2, 2, 9, 16)
        decode(q, k, v, **new)
        assert same_bits(k[:, :, 8:], new["new_k"])


def refused(message, error=ValueError, d=16, s=9, **changed):
    """Assert that a call with some arguments changed is refused, and that nothing is written."""
    q, k, v, new = made(2, 4, 2, s, d)
    given = {"q": q, "k": k, "v": v} | new | angles(s, 4) | changed
    before = [x.clone() for x in (given["k"], given["v"])]
    with pytest.raises(error, match=f"^{message}"):
        decode(**given)
    assert all(map(torch.equal, before, (given["k"], given["v"])))


CACHE = randn(2, 2, 9, 16, seed=1)
REFUSALS = {
    "new_v: None, expected a tensor, as the other": {"new_v": None},
    "new_k: None, expected a tensor, as the other": {"new_k": None},
    "sin: None, expected a tensor, as the other": {"sin": None},
    "cos: None, expected a tensor, as the other": {"cos": None},
    r"cos: a tensor of shape \(9, 4\) .* expected None without new_k": {
        "new_k": None,
        "new_v": None,
    },
    "q: 2 positions, expected 1 beside new_k": {"q": randn(2, 4, 2, 16)},
    "q: 0 heads, expected one or more": {"q": randn(2, 0, 1, 16)},
    r"new_k: shape \(2, 2, 2, 16\), expected \(2, 2, 1, 16\)": {"new_k": randn(2, 2, 2, 16)},
    r"new_v: shape \(2, 1, 1, 16\), expected \(2, 2, 1, 16\)": {"new_v": randn(2, 1, 1, 16)},
    "new_k: requires a gradient": {"new_k": randn(2, 2, 1, 16).requires_grad_()},
    "new_v: requires a gradient": {"new_v": randn(2, 2, 1, 16).requires_grad_()},
    "k: requires a gradient": {"k": randn(2, 2, 9, 16).requires_grad_()},
    "cos: requires a gradient": {"cos": randn(9, 4).requires_grad_()},
    "sin: requires a gradient": {"sin": randn(9, 4).requires_grad_()},
    r"k: strides \(.*, 32, 2\), expected 1 last": {"k": torch.stack([CACHE, CACHE], -1)[..., 0]},
    r"v: strides \(.*, 32, 2\), expected 1 last": {"v": torch.stack([CACHE, CACHE], -1)[..., 0]},
    r"k: strides \(0, .*expected 1 last and no overlap": {"k": CACHE[:1].expand(2, -1, -1, -1)},
    r"v: strides \(.*, 8, 1\), expected 1 last and no overlap": {
        "v": torch.zeros(2, 2, 88).as_strided((2, 2, 9, 16), (176, 88, 8, 1))
    },
    "v: the same tensor as k": {"k": CACHE, "v": CACHE},
    "k: a view with a lazy sign": {"k": torch._neg_view(CACHE)},
    r"cos: shape \(9,\), expected \[L, R\]": {"cos": randn(9)},
    r"cos: shape \(9, 9\), expected \[L, R\] with L > 0 and 0 < 2R <= 16": {"cos": randn(9, 9)},
    r"cos: shape \(9, 0\), expected \[L, R\]": {"cos": randn(9, 0)},
    r"cos: shape \(0, 4\), expected \[L, R\]": {"cos": randn(0, 4)},
    r"sin: shape \(9, 3\), expected \(9, 4\) as cos has": {"sin": randn(9, 3)},
    "cos: 8 rows, expected 9 or more": {"cos": randn(8, 4), "sin": randn(8, 4)},
}
if DEVICE == "cpu":
    REFUSALS |= {
        "cos: 6 rows, expected 7 or more": {
            **{"cos": randn(6, 4), "sin": randn(6, 4)},
            "lengths": torch.tensor([3, 7]),
        },
        "new_k: on meta, expected cpu": {"new_k": torch.empty(2, 2, 1, 16, device="meta")},
        "new_v: on meta, expected cpu": {"new_v": torch.empty(2, 2, 1, 16, device="meta")},
        "sin: on meta, expected cpu": {"sin": torch.empty(9, 4, device="meta")},
    }


@pytest.mark.parametrize("message", REFUSALS)
def test_refuses(message):
    refused(message, **REFUSALS[message])


MISTYPED = {
    "new_k: torch.float16, expected torch.float32": {"new_k": randn(2, 2, 1, 16, dtype=HALF)},
    "new_v: torch.float16, expected torch.float32": {"new_v": randn(2, 2, 1, 16, dtype=HALF)},
    "new_k: 3, expected a tensor": {"new_k": 3},
    "new_v: 3, expected a tensor": {"new_v": 3},
    "cos: 3, expected a tensor": {"cos": 3},
    "sin: 3, expected a tensor": {"sin": 3},
    "cos: torch.float64, expected float32": {"cos": randn(9, 4).double()},
    "sin: torch.int64, expected float32": {"sin": randn(9, 4).long()},
}


@pytest.mark.parametrize("message", MISTYPED)
def test_refuses_what_is_of_another_kind(message):
    refused(message, TypeError, **MISTYPED[message])


def test_lengths_within_short_tables_are_taken():
    for rows, lengths in ((7, [0, 7]), (30, [31, 90])):
        q, k, v, new = made(2, 4, 2, 30, 16)
        agrees(q, k, v, new | angles(rows, 8), lengths)


def test_an_axis_of_one_may_have_any_stride():
    q, k, v, new = made(1, 4, 2, 20, 16)
    agrees(q, *(x.as_strided(x.shape, (0, 16, 32, 1)) for x in (k, v)), new, [20])
    q, k, v, new = made(2, 4, 1, 20, 16)
    agrees(q, *(x.as_strided(x.shape, (16, 0, 32, 1)) for x in (k, v)), new, [20, 7])


@pytest.fixture
def host(monkeypatch):
    """The GPU that `fake_host` imitates: it notes the launches, which Triton or a plan starts."""
    compiled(monkeypatch)
    launcher = decoding.decode_fwd.launcher

    def forget():
        launcher.plans.clear()
        launcher.seen.clear()

    forget()
    yield Host(monkeypatch)
    forget()


def told(host, tensors):
    """The launches since the last time, with a name or a number in the place of each address."""
    places = {x.data_ptr(): name for name, x in tensors.items()}
    found = []
    for kernel, grid, handed in host.begun:
        values = [
            places.setdefault(value, len(places)) if name.endswith("_ptr") and value else value
            for name, value in zip(kernel.arg_names, handed, strict=True)
        ]
        found.append((kernel, grid, values))
    host.begun.clear()
    return found


@pytest.mark.no_gpu
def test_a_plan_starts_what_the_launcher_does(host):
    """Calls with a token, with angles, with other strides and without a token, in turn."""
    forms = [
        (),
        ("token",),
        ("token", "joined"),
        ("token", "turned"),
        ("token", "turned", "joined"),
    ]
    for call in range(5):
        for form, splits in itertools.product(forms, (1, 2)):
            q, k, v, new = made(2, 4, 2, 64, 32)
            tensors = {"q": q, "k": k, "v": v, "lengths": torch.tensor([40 + call, 3])}
            if "joined" in form:
                *_, new = views(q, k, v, new)
            tensors |= new if "token" in form else {}
            tensors |= angles(64, 16) if "turned" in form else {}
            assert all(x.data_ptr() % ALIGNMENT == 0 for x in tensors.values())
            options = {"num_splits": splits, "return_lse": True}
            with uncached():
                decode(**tensors, **options)
            without = told(host, tensors)
            host.asked.clear()
            decode(**tensors, **options)
            assert told(host, tensors) == without and len(without) == splits
            assert bool(host.asked) == (call < 2), "by plan from the third call on"
            kernel, _, values = without[0]
            handed = dict(zip(kernel.arg_names, values, strict=True))
            assert isinstance(kernel, JITFunction)
            for name in ("new_k", "new_v", "cos", "sin"):
                assert handed[f"{name}_ptr"] == (name if name in tensors else None)


@pytest.mark.gpu
@pytest.mark.parametrize("turned", [False, True])
def test_the_results_have_the_same_bits_with_the_cache_and_without(turned):
    for seed in range(4):
        q, k, v, new = made(2, 4, 2, 600, 64, torch.float16)
        new |= angles(600, 32) if turned else {}
        lengths = torch.tensor([600 - seed, 80 + seed], device=DEVICE)
        others = [x.clone() for x in (k, v)]
        with uncached():
            expected = decode(q, *others, lengths, **new)
        assert same_bits(decode(q, k, v, lengths, **new), expected)
        assert same_bits(k, others[0]) and same_bits(v, others[1])


TRACED = """
import torch
import torch.utils._triton

# Otherwise Triton makes no kernels on a machine without a GPU.
torch.utils._triton.has_triton = lambda: True

import triton
from torch._dynamo.backends.common import aot_autograd

from harness.build.compiler import Offline, compile
from harness.build.recorder import Launch, recorded
from kernels.decode_attention import decode_attention


def show(graph, examples):
    for node in graph.graph.nodes:
        if "tensors_to_clone" in node.kwargs:
            print("written:", *node.kwargs["tensors_to_clone"])
    print("returned:", len(graph.graph.output_node().args[0]))
    raise SystemExit


def given(device, dtype):
    shapes = {"q": (2, 8, 1, 48), "k": (2, 2, 90, 48), "new_k": (2, 2, 1, 48), "cos": (90, 20)}
    shapes |= {"v": shapes["k"], "new_v": shapes["new_k"], "sin": shapes["cos"]}
    lengths = torch.ones(2, dtype=torch.int64, device=device)
    return {"lengths": lengths} | {
        name: torch.ones(shape, dtype=dtype, device=device) for name, shape in shapes.items()
    }


for dtype in (torch.bfloat16, torch.float32):
    for window in (None, 30):
        with recorded() as calls:
            decode_attention(**given("meta", dtype), window=window)
        kernel, arguments, _ = calls[0]
        made = compile(Launch(kernel, arguments, None, None, ""), "90")
        print("stores:", made.asm["ttir"].count("tt.store"))
triton.runtime.driver.set_active(Offline("90"))
call = given("cpu", torch.float16)
try:
    one = call["k"][:1].expand(2, -1, -1, -1)
    torch.compile(decode_attention, fullgraph=True, backend="eager")(**call | {"k": one})
except torch._dynamo.exc.Unsupported as error:
    print("refused:", "expected 1 last and no overlap" in str(error))
backend = aot_autograd(fw_compiler=show)
torch.compile(decode_attention, fullgraph=True, backend=backend)(**call)
"""


@pytest.mark.slow
def test_the_kernel_compiles_and_a_traced_graph_knows_that_it_writes_the_caches():
    # In this process the kernels are the interpreter's, which can be neither compiled nor traced.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", TRACED]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    # One split writes key, value and result. The graph returns both caches and the result.
    written = ["written: k_ptr v_ptr out_ptr", "returned: 3"]
    assert said == ["stores: 3"] * 4 + ["refused: True"] + written

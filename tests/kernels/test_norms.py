"""Check layer norm and RMS norm: both passes, with and without a residual, and their refusals."""

import contextlib
import functools
import inspect
import json
import math
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from harness.machine import nvml
from kernels import layer_norm as ln
from kernels import rms_norm as rms
from kernels._runtime.vector_access import access_items
from kernels._triton.exchange import may_wait
from kernels.layer_norm import layer_norm
from kernels.norm_details import backward as _norm_backward
from kernels.norm_details import columns as _norm_columns
from kernels.norm_details.forward_tiles import Tile, forward_configs
from kernels.rms_norm import rms_norm
from ops.layer_norm import layer_norm_reference
from ops.rms_norm import rms_norm_reference
from tests.support.examples import many
from tests.support.interleaved import Schedule, interleaved

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if nvml.gpus() else "cpu"
BOUND = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NORMS = {
    "layer_norm": (layer_norm, layer_norm_reference),
    "rms_norm": (rms_norm, rms_norm_reference),
}
FAMILIES = {"layer_norm": ln, "rms_norm": rms}
FORWARD = {"layer_norm": ln.FORWARD, "rms_norm": rms.FORWARD}
BACKWARD = {"layer_norm": ln.BACKWARD, "rms_norm": rms.BACKWARD}
both = pytest.mark.parametrize("name", NORMS)


def is_aligned(n, itemsize):
    """Whether rows of n elements, one after the other, are read in whole accesses."""
    return _norm_backward.is_aligned(access_items(itemsize, n), itemsize)


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def tensors(name, shape, dtype, fused):
    """Return x, the vectors and the residual of a norm by name, as leaves."""
    n = shape[-1]
    made = {"x": randn(*shape, dtype=dtype, seed=1), "weight": randn(n, dtype=dtype, seed=2)}
    if name == "layer_norm":
        made["bias"] = randn(n, dtype=dtype, seed=3)
    if fused:
        made["residual"] = randn(*shape, dtype=dtype, seed=4)
    return {key: tensor.requires_grad_() for key, tensor in made.items()}


def results(function, given, eps=1e-5, dtypes=None):
    """Return outputs and gradients of a norm; the gradients of the outputs are always the same.

    dtypes: what they are rounded to, by default the dtypes of the outputs.
    """
    outputs = function(**given, eps=eps)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    dtypes = [y.dtype for y in outputs] if dtypes is None else dtypes
    seeds = [randn(*y.shape, seed=5 + i) for i, y in enumerate(outputs)]
    seeds = [s.to(d).to(y.dtype) for s, d, y in zip(seeds, dtypes, outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, list(given.values()), seeds)]


def agree(name, given):
    """Assert that both passes lie within the dtype's bound of the reference in float64."""
    function, reference = NORMS[name]
    exact = {key: tensor.detach().double().requires_grad_() for key, tensor in given.items()}
    for ours, truth in zip(results(function, given), results(reference, exact), strict=True):
        dtype = given["x"].dtype
        assert ours.dtype == dtype and ours.shape == truth.shape
        size = max(truth.abs().max().item(), 1e-2)
        assert (ours.double() - truth).abs().max().item() <= BOUND[dtype] * size


@both
@many
@given(st.data())
def test_random_shapes(name, data):
    # In shorter rows the gradient is the rounding error of a difference.
    shape = [*data.draw(st.lists(st.integers(1, 5), max_size=3)), data.draw(st.integers(8, 600))]
    dtype = data.draw(st.sampled_from(list(BOUND)))
    agree(name, tensors(name, shape, dtype, data.draw(st.booleans())))


@contextlib.contextmanager
def forward(name, reads, block, splits=1, rows=1):
    """Within the body the forward pass reads each row `reads` times, in the given blocks."""
    family, before = FAMILIES[name], FAMILIES[name].FORWARD
    tiles = (Tile(math.inf, reads, splits, rows, block, 4),)
    family.FORWARD = forward_configs(name, tiles, tiles)
    try:
        yield
    finally:
        family.FORWARD = before


@both
@pytest.mark.parametrize("fused", [False, True])
def test_rows_that_are_read_twice(name, fused, monkeypatch):
    monkeypatch.setattr(_norm_backward, "is_whole", lambda n, *_: False)
    monkeypatch.setattr(_norm_backward, "SUMS_SPLITS", 2)
    # The last block of a row is short.
    with forward(name, 2, 256):
        agree(name, tensors(name, (5, 600), torch.float32, fused))


# Rows of one block, of several chunks, and of several programs; some are unaligned.
UNEVEN = [
    *((n, torch.float16) for n in (5120, 6656, 7168, 8193, 9216, 10240, 14336, 16383)),
    *((n, torch.float16) for n in (18432, 20001, 32767, 33024)),
    *((n, torch.float32) for n in (5121, 12289, 18432)),
]


@both
@pytest.mark.parametrize("n, dtype", UNEVEN)
def test_uneven_rows_are_read_once_backward(name, n, dtype):
    fused = n % 3 == 0
    # In the interpreter the programs of a row take turns; on a GPU they run beside each other.
    with interleaved(Schedule("in turn")) as runs:
        agree(name, tensors(name, (2, n), dtype, fused))
    if DEVICE == "cpu":
        kernels = [run.kernel for run in runs]
        whole = _norm_backward.is_whole(n, dtype.itemsize, is_aligned(n, dtype.itemsize))
        kernel = "_norm_backward_row_kernel" if whole else "_norm_backward_split_kernel"
        assert kernels[1:] == [kernel, "_norm_sum_parts_kernel"]


@both
@pytest.mark.parametrize("n", [50257, 66064])
def test_long_uneven_rows_are_read_once_forward(name, n):
    given = tensors(name, (2, n), torch.float16, n % 2 == 0)
    with torch.no_grad():
        # The first entries of one row and the last split of the other lie far off.
        given["x"][1, :50] += 100.0
        given["x"][0, -3000:] += 100.0
    with interleaved(Schedule("in turn")) as runs, torch.no_grad():
        ours = NORMS[name][0](**given, eps=1e-5)
    exact = {key: tensor.detach().double() for key, tensor in given.items()}
    truth = NORMS[name][1](**exact, eps=1e-5)
    if n % 2 == 0:
        ours, truth = ours[0], truth[0]
    assert (ours.double() - truth).abs().max() <= 1e-3 * truth.abs().max()
    if DEVICE == "cpu":
        assert [run.looks > 0 for run in runs] == [True]


H200 = torch.device("meta")


@both
@pytest.mark.parametrize("n", [5576, 9000, 16376, 65536])
def test_rows_that_begin_anywhere_have_the_tile_of_an_odd_width(name, n):
    """A tile of whole accesses would spill registers if elements are read one by one."""
    plans = [_norm_backward.row_plan(BACKWARD[name], n, 2, aligned, H200, 2) for aligned in (1, 0)]
    assert plans[0] != plans[1]
    odd = _norm_backward.row_plan(BACKWARD[name], n + 1, 2, False, H200, 2)
    assert plans[1][:2] == odd[:2]
    x, w = torch.empty((9, n + 1), dtype=torch.bfloat16, device="meta")[:, :n], torch.empty(n)
    dy = torch.empty((9, n), dtype=torch.bfloat16, device="meta")
    seen = []
    with mock.patch.object(_norm_backward, "row_plan", side_effect=lambda *a: seen.append(a)):
        for given in (x, x.contiguous()):
            with contextlib.suppress(TypeError):  # there is no plan
                plain(given, w.to("meta"), dy)
    assert [arguments[3] for arguments in seen] == [False, True]


def plain(x, weight, dy):
    """The backward pass without its cache of launches."""
    backward = inspect.unwrap(_norm_backward.norm_backward)
    return backward(ln.BACKWARD, x, weight, None, None, dy, None, True, False)


def bytes_moved(name, n, itemsize):
    """Return the bytes a row moves by the rules' choice: x, dy, dx backward; x, y forward."""
    aligned = is_aligned(n, itemsize)
    once = _norm_backward.row_plan(BACKWARD[name], n, itemsize, aligned, H200, 2)[1] > 0
    tile = FORWARD[name].rule(n, itemsize, False)
    # A second read by the same program hits a cache if a multiprocessor's rows fit into it.
    kept = (tile.reads == 1 and may_wait(H200, tile.splits)) or n * itemsize <= 65536
    return (3 if once else 5) * n * itemsize, (2 if kept else 3) * n * itemsize


@both
@pytest.mark.parametrize("itemsize", [2, 4])
def test_rows_of_any_width_are_read_once(name, itemsize):
    for n in range(1, 32769):
        once = 3 * n * itemsize, 2 * n * itemsize
        assert bytes_moved(name, n, itemsize) == once, n


@both
@pytest.mark.parametrize("itemsize", [2, 4])
def test_long_rows_move_as_many_bytes_as_powers_of_two(name, itemsize):
    longest = 524288 // itemsize
    for n in (*range(32769, longest, 61), *(2**k + d for k in range(15, 18) for d in (-1, 1))):
        below, above = 1 << (n.bit_length() - 1), 1 << (n - 1).bit_length()
        for pass_ in (0, 1):
            each = bytes_moved(name, n, itemsize)[pass_] / n
            for power in (below, above):
                if power <= longest:
                    assert each <= 1.1 * bytes_moved(name, power, itemsize)[pass_] / power, n


@both
@many
@given(n=st.integers(1, 2**20), splits=st.integers(1, 64), power=st.integers(7, 14))
def test_splits_and_chunks_cover_each_column_once(name, n, splits, power):
    block = 2**power
    span = _norm_columns.span_of(n, splits)
    chunks, full = _norm_columns.chunks_of(n, splits, block)
    owned = [range(s * span, min((s + 1) * span, n)) for s in range(splits)]
    assert sum(map(len, owned)) == n and chunks * block >= span
    assert 0 <= full <= chunks and full * block <= min(map(len, owned))
    assert splits == 1 or span % 32 == 0
    assert (full == chunks) == (n % (splits * block) == 0)


# These are nn.LayerNorm(bias=False), elementwise_affine=False, and further torch.nn.functional
# calls.
ABSENT = [
    ("layer_norm", {"bias"}),
    ("layer_norm", {"weight"}),
    ("layer_norm", {"weight", "bias"}),
    ("rms_norm", {"weight"}),
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("n", [16, 200, 1500])
@pytest.mark.parametrize("name, absent", ABSENT)
def test_a_norm_without_weight_or_bias(name, absent, n, fused, monkeypatch):
    """The longest rows are computed by the kernels that read them twice."""
    monkeypatch.setattr(_norm_backward, "is_whole", lambda n, *_: n < 1000)
    given = tensors(name, (3, n), torch.float32, fused)
    with torch.no_grad():
        given["x"] += 2
    given = {key: tensor for key, tensor in given.items() if key not in absent}
    exact = {key: tensor.detach().double().requires_grad_() for key, tensor in given.items()}

    def pytorch(x, weight=None, bias=None, residual=None, eps=1e-5):
        total = x if residual is None else x + residual
        vectors = [weight, bias] if name == "layer_norm" else [weight]
        y = getattr(F, name)(total, (n,), *vectors, eps)
        return y if residual is None else (y, total)

    with forward(name, 2, 256) if n == 1500 else contextlib.nullcontext():
        ours = results(NORMS[name][0], given)
    for one, truth in zip(ours, results(pytorch, exact), strict=True):
        assert one.shape == truth.shape and one.dtype == torch.float32
        assert (one.double() - truth).abs().max() <= 1e-5 * max(truth.abs().max().item(), 1e-2)


@pytest.mark.parametrize("name, absent", ABSENT)
def test_a_norm_without_vectors_has_no_gradient_for_them(name, absent):
    given = tensors(name, (3, 24), torch.float32, False)
    given |= dict.fromkeys(absent)
    NORMS[name][0](**given, eps=1e-5).sum().backward()
    for key, tensor in given.items():
        assert tensor is None or tensor.grad is not None, key


def agree_in_their_dtypes(name, given, **options):
    """Assert that outputs and gradients have their own dtypes and lie within the bound of them."""
    exact = {key: tensor.detach().double().requires_grad_() for key, tensor in given.items()}
    function, reference = (functools.partial(f, **options) for f in NORMS[name])
    dtypes = [given["x"].dtype, *([given["residual"].dtype] if "residual" in given else [])]
    dtypes += [tensor.dtype for tensor in given.values()]
    found = results(function, given)
    expected = results(reference, exact, dtypes=dtypes[: len(found) - len(given)])
    for ours, truth, dtype in zip(found, expected, dtypes, strict=True):
        assert ours.dtype == dtype and ours.shape == truth.shape
        size = max(truth.abs().max().item(), 1e-2)
        assert (ours.double() - truth).abs().max().item() <= BOUND[dtype] * size
    return found


# Rows that a program keeps, and rows that the kernels of two reads take.
@pytest.mark.parametrize("n", [16, 200, 1500])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("fused", [False, True])
def test_the_factor_of_gemma_is_one_more_than_the_weight(n, dtype, fused, monkeypatch):
    monkeypatch.setattr(_norm_backward, "is_whole", lambda n, *_: n < 1000)
    given = tensors("rms_norm", (3, n), dtype, fused)
    with forward("rms_norm", 2, 256) if n == 1500 else contextlib.nullcontext():
        agree_in_their_dtypes("rms_norm", given, add_unit_offset=True)


def test_the_offset_is_added_in_float32():
    # In float16 one and this weight would be one.
    weight = torch.full((64,), 2.0**-12, dtype=torch.float16, device=DEVICE)
    x = randn(3, 64)
    y, plain = rms_norm(x, weight, add_unit_offset=True), rms_norm(x)
    torch.testing.assert_close(y, plain * (1 + 2.0**-12), rtol=1e-6, atol=0)


@both
@pytest.mark.parametrize("n", [16, 200, 1500])
def test_a_wide_residual_keeps_its_digits(name, n, monkeypatch):
    monkeypatch.setattr(_norm_backward, "is_whole", lambda n, *_: n < 1000)
    given = tensors(name, (3, n), torch.float16, False)
    given["residual"] = randn(3, n, seed=4).mul(300).requires_grad_()
    with forward(name, 2, 256) if n == 1500 else contextlib.nullcontext():
        _, total, dx, *_, dr = agree_in_their_dtypes(name, given)
    assert torch.equal(total, given["x"].float() + given["residual"])
    # Both gradients are one number, which is rounded once for x.
    assert torch.equal(dx, dr.half())


@both
@pytest.mark.parametrize("n", [12288, 33024])
def test_a_wide_residual_of_rows_that_several_programs_hold(name, n):
    given = tensors(name, (2, n), torch.float16, False)
    given["residual"] = randn(2, n, seed=4).requires_grad_()
    with interleaved(Schedule("in turn")) as runs:
        agree_in_their_dtypes(name, given)
    if DEVICE == "cpu":
        assert "_norm_backward_split_kernel" in [run.kernel for run in runs]
        assert ("_norm_forward_split_kernel" in [run.kernel for run in runs]) == (n > 32768)


@both
def test_the_tile_of_a_wide_residual_is_that_of_the_sum(name, monkeypatch):
    asked, family = [], FAMILIES[name]
    rule = family.FORWARD.rule

    def noting(n, itemsize, residual):
        asked.append(itemsize)
        return rule(n, itemsize, residual)

    monkeypatch.setattr(family, "FORWARD", family.FORWARD._replace(rule=noting))
    x = randn(2, 24, dtype=torch.float16)
    NORMS[name][0](x, residual=x)
    NORMS[name][0](x, residual=x.float())
    assert asked == [2, 4]


@both
def test_a_wide_residual_of_no_rows(name):
    given = tensors(name, (0, 24), torch.float16, False)
    given["residual"] = randn(0, 24).requires_grad_()
    dtypes = [tensor.dtype for tensor in results(NORMS[name][0], given)]
    assert dtypes[:2] == [torch.float16, torch.float32] and dtypes[-1] == torch.float32


@both
@pytest.mark.gpu  # Several programs share a row; in the interpreter one takes minutes.
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((3, 131072), torch.bfloat16),
        # Each group of programs has several rows: in turn with four bytes, a range with two.
        ((300, 12288), torch.float32),
        ((300, 16384), torch.float32),
        ((200, 65536), torch.bfloat16),
    ],
)
def test_rows_that_several_programs_hold(name, shape, dtype, fused):
    given = tensors(name, shape, dtype, fused)
    agree(name, given)
    for one, other in zip(*(results(NORMS[name][0], given) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


@both
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("n", [12288, 16384])
def test_long_rows_of_four_bytes(name, n, fused):
    agree(name, tensors(name, (5, n), torch.float32, fused))


@both
@pytest.mark.gpu  # Several programs share a row; in the interpreter one takes minutes.
def test_a_nan_in_a_long_row_stays_in_its_row(name):
    given = tensors(name, (3, 131072), torch.float16, False)
    with torch.no_grad():
        # All bits are set, which in a slot means that its sum has not arrived.
        given["x"][1, 70000:70002].view(torch.int16).fill_(-1)
    y = NORMS[name][0](**given)
    assert y[1].isnan().all() and not y[0].isnan().any() and not y[2].isnan().any()


@both
def test_uneven_rows_beyond_one_block(name):
    agree(name, tensors(name, (3, 9001), torch.float16, True))


@both
def test_a_row_in_several_chunks_equals_one_in_a_single_chunk(name):
    given = tensors(name, (3, 1500), torch.bfloat16, True)
    whole = results(NORMS[name][0], given)
    with forward(name, 1, 256):
        chunked = results(NORMS[name][0], given)
    for one, other in zip(whole, chunked, strict=True):
        assert (one.double() - other.double()).norm() <= 1e-2 * one.double().norm()


@both
def test_without_gradients_the_results_are_the_same(name):
    given = tensors(name, (7, 130), torch.float16, True)
    kept = NORMS[name][0](**given)
    with torch.no_grad():
        free = NORMS[name][0](**given)
    assert all(torch.equal(one, other) for one, other in zip(kept, free, strict=True))
    assert not any(tensor.requires_grad for tensor in free)


@both
@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_outputs_may_go_unused(name, used):
    function, reference = NORMS[name]
    given = tensors(name, (4, 50), torch.float32, True)
    exact = {key: tensor.detach().double().requires_grad_() for key, tensor in given.items()}
    pair = []
    for formula, leaves in ((function, given), (reference, exact)):
        output = formula(**leaves, eps=1e-5)[used]
        wanted = [leaves["x"], leaves["residual"]]
        pair.append(torch.autograd.grad(output, wanted, torch.ones_like(output)))
    for ours, truth in zip(*pair, strict=True):
        assert torch.allclose(ours.double(), truth, atol=1e-5)


def test_the_sum_is_that_of_pytorch_to_the_bit():
    given = tensors("rms_norm", (6, 200), torch.float16, True)
    assert torch.equal(rms_norm(**given)[1], given["x"] + given["residual"])


@pytest.mark.parametrize("reads", [1, 2])
def test_equal_entries_far_from_zero_have_no_deviation(reads):
    n = 3001
    x = torch.full((2, n), 1234.567, device=DEVICE)
    with forward("layer_norm", reads, 1024):
        y = layer_norm(x, torch.ones(n, device=DEVICE), torch.zeros(n, device=DEVICE), 1e-5)
    assert y.abs().max().item() == 0.0


@pytest.mark.parametrize("reads", [1, 2])
@pytest.mark.parametrize("where", [0, 1500, slice(0, 1024), slice(1024, 3000)])
def test_an_outlier_takes_no_digits_from_the_rest(reads, where):
    x = randn(2, 3000)
    x[:, where] += 1e4
    one, zero = torch.ones(3000, device=DEVICE), torch.zeros(3000, device=DEVICE)
    with forward("layer_norm", reads, 1024):
        y = layer_norm(x, one, zero, 1e-5)
    truth = layer_norm_reference(x.double(), one.double(), zero.double(), 1e-5)
    assert (y - truth).abs().max().item() <= 1e-5 * truth.abs().max().item()


@both
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_tuner_has_few_candidates(name, itemsize):
    for n in (256, 1000, 1024, 2048, 4096, 8192, 12288, 16384, 65536, 262144):
        tile = FORWARD[name].rule(n, itemsize, False)
        one = FORWARD[name][0 if tile.reads == 2 else 1 if tile.splits == 1 else 2]
        suited = [c for c in one.candidates if one.suits(c, n=n, itemsize=itemsize, residual=False)]
        assert 1 <= len(suited) <= 12, (n, suited)
        key = {"n": n, "itemsize": itemsize, "aligned": is_aligned(n, itemsize)}
        other = BACKWARD[name][0 if _norm_backward.is_whole(**key) else 1]
        suited = [c for c in other.candidates if other.suits(c, **key)]
        assert 1 <= len(suited) <= 12, (n, suited)


@both
def test_the_reference_is_differentiable_and_right(name):
    given = tensors(name, (3, 4), torch.float64, True)
    reference = NORMS[name][1]
    values = list(given.values())

    def formula(*values):
        return reference(**dict(zip(given, values, strict=True)), eps=1e-5)

    assert torch.autograd.gradcheck(formula, values)


@pytest.mark.parametrize("split", [False, True])
def test_outliers_at_the_start_take_no_digits_from_the_rest(split):
    """The shift is the mean of the first 128 entries, so nearly all squares about it cancel."""
    n = 70000
    x = randn(2, n)
    x[:, :128] += 1e4
    one, zero = torch.ones(n, device=DEVICE), torch.zeros(n, device=DEVICE)
    with interleaved(Schedule("in turn")) if split else contextlib.nullcontext():
        y = layer_norm(x, one, zero, 1e-5)
    truth = layer_norm_reference(x.double(), one.double(), zero.double(), 1e-5)
    assert (y - truth).abs().max().item() <= 5e-7 * truth.abs().max().item()


def vector(n):
    return torch.ones(n, device=DEVICE)


REFUSALS = {
    "a scalar": (ValueError, "x: ", lambda: rms_norm(vector(1)[0], vector(1))),
    "integers": (TypeError, "x: torch.int64", lambda: rms_norm(vector(4).long(), vector(4))),
    "doubles": (
        TypeError,
        "weight: torch.float64",
        lambda: rms_norm(vector(4), vector(4).double()),
    ),
    "a short weight": (ValueError, r"weight: .*\(7,\)", lambda: rms_norm(randn(2, 8), vector(7))),
    "a long bias": (
        ValueError,
        r"bias: .*\(9,\)",
        lambda: layer_norm(randn(2, 8), vector(8), vector(9)),
    ),
    "a residual of another shape": (
        ValueError,
        r"residual: shape \(2, 7\)",
        lambda: rms_norm(randn(2, 8), vector(8), residual=randn(2, 7)),
    ),
    "a residual of another dtype": (
        TypeError,
        "residual: torch.float16",
        lambda: rms_norm(randn(2, 8), vector(8), residual=randn(2, 8, dtype=torch.float16)),
    ),
    "a residual narrower than x": (
        TypeError,
        "residual: torch.bfloat16",
        lambda: rms_norm(
            randn(2, 8, dtype=torch.float16), residual=randn(2, 8, dtype=torch.bfloat16)
        ),
    ),
    "an offset without a weight": (
        ValueError,
        "add_unit_offset: True",
        lambda: rms_norm(randn(2, 8), add_unit_offset=True),
    ),
    "a weight elsewhere": (
        ValueError,
        "weight: on meta",
        lambda: rms_norm(randn(2, 8), torch.ones(8, device="meta")),
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_bad_arguments_are_refused(what):
    error, words, call = REFUSALS[what]
    with pytest.raises(error, match=f"{words}.*expected"):
        call()


COMPILED = """
import json, re
from harness.build import compiler, recorder
from harness.project import registry
from ops._spec import make_case

op, found = registry.op("layer_norm")[0], {}
for n in (5576, 43512):
    for each in recorder.launched(op, make_case(M=9, N=n), "bfloat16"):
        if "parts" not in each.name:
            ptx = compiler.compile(each, "90").asm["ptx"]
            stores = re.findall(r"st\\.global\\S*?(?:\\.v\\d)?\\.b(?:16|32|64)", ptx)
            loads = re.findall(r"(?:ld\\.global|cp\\.async)\\S*?\\.b16", ptx)
            single = sum(".v" not in store and store.endswith("b16") for store in stores)
            found[each.name] = (single, len(loads), sum(".v4.b32" in store for store in stores))
print(json.dumps(found))
"""


@pytest.mark.no_gpu
def test_rows_that_are_a_multiple_of_8_long_are_read_in_whole_accesses():
    """Triton knows of multiples of 16 alone, and would take such rows item by item."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = ("forward_row", "forward_split", "backward_row", "backward_split")
    assert sorted(found) == sorted(f"_norm_{name}_kernel" for name in names)
    for name, (single_stores, single_loads, stores) in found.items():
        # The first mean of a split is that of a few single items.
        assert single_stores == 0 and single_loads <= 4 * ("forward_split" in name), name
        assert stores, name

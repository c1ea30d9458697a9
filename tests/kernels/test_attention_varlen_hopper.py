"""Packed attention's kernels for Hopper: on threads, and compiled for sm_90.

The threads (`tests/support/gluon_threads.py`) run the kernels' own Python with late products, so
they check sequences, masks, orders of barriers and numbers. They know no layout and no register.
"""

import itertools
import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.experimental.gluon import language as gl

from kernels import attention_varlen as varlen
from kernels._runtime.configs import Configs
from kernels._runtime.device import assume_device
from kernels.attention_details import backward_hopper as dense_backward
from kernels.attention_details import forward_hopper as dense
from kernels.attention_details import (
    packed_backward_hopper,
    packed_forward_hopper,
    sequences_hopper,
)
from kernels.attention_details.launch import like
from kernels.attention_details.sequences_hopper import BOUND, TOO_MANY_ROWS
from kernels.attention_varlen import attention_varlen
from tests.support import hopper_build
from tests.support.attention import oracle, rounded
from tests.support.gluon_threads import StuckError, on_threads
from tests.support.values import close, differs, few

# Rows and keys of each sequence, rows and keys past the last one, heads, key heads, window.
CALLS = [
    ([300], [300], 0, 2, 2, (None, None)),
    ([130, 256, 1, 90], [130, 256, 1, 90], 0, 2, 1, (None, 0)),
    ([70, 0, 200], [300, 40, 0], 0, 2, 2, (None, None)),
    ([70, 0, 200], [300, 40, 0], 9, 2, 2, (None, 0)),
    ([300, 130], [90, 470], 150, 3, 1, (None, 0)),
    ([400, 20, 257], [400, 20, 257], 5, 2, 2, (130, 0)),
    ([333, 10], [500, 300], 0, 2, 1, (64, 100)),
    ([0, 0], [0, 0], 40, 1, 1, (None, 0)),
    # Two, four and eight heads share tiles of rows.
    ([300, 1], [300, 170], 0, 4, 2, (None, None)),
    ([70, 0, 45], [300, 40, 70], 9, 8, 2, (None, 0)),
    ([33, 90], [150, 60], 0, 8, 1, (40, 0)),
    ([3] * 40, [5] * 40, 0, 1, 1, (None, 0)),
]


def made(rows, keys, after, h, heads, d=64, dtype=torch.float16):
    """q, k, v and both boundaries; `after` rows and keys lie past the last sequence."""
    generator = torch.Generator().manual_seed(sum(rows) + 7 * sum(keys))
    sizes = ((sum(rows) + after, h), (sum(keys) + after, heads), (sum(keys) + after, heads))
    tensors = [torch.randn(s, n, d, generator=generator).to(dtype) for s, n in sizes]
    ends = (torch.tensor([*itertools.accumulate(x, initial=0)]) for x in (rows, keys))
    first, second = ends
    return *tensors, first.int(), second


def forward_of(q, k, v, cu_q, cu_k, window, config, sm_count=3, **broken):
    """The result, lse and statistics of the kernel on threads, on memory that holds no numbers."""
    out = torch.full_like(like(q), float("nan"))
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"))
    stats = lse.clone()[None]
    square = packed_forward_hopper.ends_in_squares(q, k, cu_k is cu_q, window[1])
    with assume_device(sm_count=sm_count), on_threads(packed_forward_hopper, **broken):
        packed_forward_hopper.packed_forward_hopper(
            q, k, v, out, lse, stats, cu_q, cu_k, 0.125, *window, len(k), square, config
        )
    return out, lse, stats


def exact(q, k, v, cu_q, cu_k, window, scale=0.125):
    """The result and lse in float64, sequence by sequence."""
    options = {"window": tuple(-1 if size is None else size for size in window), "scale": scale}
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
    pairs = itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist())
    for (start, end), (first, last) in zip(*pairs, strict=True):
        parts = q[start:end], k[first:last], v[first:last]
        parts = (x.double().transpose(0, 1)[None] for x in parts)
        truth, total = oracle(*parts, **options)
        out[start:end], lse[:, start:end] = truth[0].transpose(0, 1), total[0]
    return out, lse


def grads_of(q, k, v, cu_q, cu_k, window, config, out, lse, dout, dlse, **broken):
    """The gradients of q, k and v by the kernels on threads, from results in float64."""
    stats = torch.where(lse.isneginf(), math.inf, lse / math.log(2)).float()[None]
    with on_threads(packed_backward_hopper, **broken):
        return packed_backward_hopper.packed_backward_hopper(
            q, k, v, out.half(), stats, dout, dlse, cu_q, cu_k, 0.125, *window, len(q), config
        )


def truths_of(q, k, v, cu_q, cu_k, window, dout):
    """The result and the gradients of q, k and v in float64; None where there is no gradient."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, _ = exact(*leaves, cu_q, cu_k, window, scale=None)
    return out.detach(), torch.autograd.grad(out, leaves, dout.double(), allow_unused=True)


def agrees(tensors, window, config):
    truth, truth_lse = exact(*tensors, window)
    out, lse, stats = forward_of(*tensors, window, config)
    seen = truth_lse.isfinite()
    assert differs(out, truth) < 5e-4 and not out.transpose(0, 1)[~seen].any()
    assert torch.equal(lse.isneginf(), ~seen) and torch.equal(stats[0].isposinf(), ~seen)
    if seen.any():
        close(lse[seen], truth_lse[seen], torch.float32)
        close(stats[0][seen] * math.log(2), truth_lse[seen], torch.float32)


def grads_agree(tensors, window, config):
    q, k, v, cu_q, cu_k = tensors
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = exact(*leaves, cu_q, cu_k, window)
    seen = lse.isfinite()
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).half()
    dlse = torch.linspace(-1, 1, lse.numel()).view(lse.shape) * seen
    truths = torch.autograd.grad(
        (out, lse.where(seen, 0)), leaves, (dout.double(), dlse.double()), allow_unused=True
    )
    results = out.detach(), lse.detach(), dout, dlse
    grads = grads_of(*tensors, window, config, *results)
    for x, grad, truth in zip((q, k, v), grads, truths, strict=True):
        assert grad.dtype == x.dtype and grad.stride() == like(x).stride()
        assert differs(grad, torch.zeros_like(x) if truth is None else truth) < 1e-3


@pytest.mark.no_gpu
@pytest.mark.parametrize("config", packed_forward_hopper.CONFIGS)
@pytest.mark.parametrize("call", CALLS)
def test_the_forward_pass_on_threads_is_that_of_float64(call, config):
    *sizes, window = call
    agrees(made(*sizes), window, config)


# Rows of each sequence, which has as many keys, rows past the last one, heads, key heads, window.
SQUARES = [
    ([300], 0, 2, 2, (None, 0)),
    ([130, 256, 1, 90], 0, 3, 1, (None, 0)),
    ([64, 65, 0, 191, 192], 130, 1, 1, (None, 0)),
    ([128, 384], 7, 1, 1, (130, 0)),
]
# Two heads share tiles; rows see keys after their own; there is no diagonal.
NO_SQUARES = [
    ([150, 200], 3, 2, 1, (None, 0)),
    ([150, 200], 3, 1, 1, (None, 3)),
    ([150, 200], 3, 1, 1, (None, None)),
]


@pytest.fixture
def first_widths(monkeypatch):
    """How many keys of their first tiles the groups take scores of, as they run."""
    plain, widths = packed_forward_hopper.begin_softmax, set()

    def begin_softmax(scores, *rest):
        widths.add(scores.shape[1])
        return plain.fn(scores, *rest)

    monkeypatch.setattr(packed_forward_hopper, "begin_softmax", begin_softmax)
    return widths


@pytest.mark.no_gpu
@pytest.mark.parametrize("config", packed_forward_hopper.CONFIGS)
@pytest.mark.parametrize("call", SQUARES + NO_SQUARES)
def test_one_tensor_of_boundaries_leaves_out_half_of_a_square(call, config, first_widths):
    rows, *sizes, window = call
    *tensors, cu, _ = made(rows, rows, *sizes)
    agrees((*tensors, cu, cu), window, config)
    square = call in SQUARES and config["BLOCK_N"] == 128
    assert first_widths == ({64, 128} if square else {config["BLOCK_N"]})


@pytest.mark.no_gpu
def test_two_tensors_of_boundaries_promise_no_square(first_widths):
    agrees(made([300], [300], 0, 1, 1), (None, 0), packed_forward_hopper.CONFIGS[0])
    assert first_widths == {128}


@pytest.mark.no_gpu
def test_boundaries_that_a_tensor_cuts_off_promise_no_square():
    """One tensor tells of 300 rows and keys, and there are 200 keys."""
    q, k, v, cu, _ = made([300], [200], 0, 1, 1)
    config = packed_forward_hopper.CONFIGS[0]
    one, two = (forward_of(q, k, v, cu, x, (None, 0), config) for x in (cu, cu.clone()))
    assert all(map(torch.equal, one, two))


# All calls with one configuration, some with the others.
BACKWARD = [(call, 0) for call in CALLS] + [(CALLS[n], i) for n in (3, 5, 6) for i in (1, 2, 3, 4)]


@pytest.mark.no_gpu
@pytest.mark.parametrize(("call", "config"), BACKWARD)
def test_the_backward_pass_on_threads_is_that_of_float64(call, config):
    *sizes, window = call
    grads_agree(made(*sizes), window, packed_backward_hopper.CONFIGS[config])


@pytest.mark.no_gpu
def test_more_sequences_than_boundaries_that_are_read_at_once(monkeypatch):
    monkeypatch.setattr(sequences_hopper, "AT_ONCE", gl.constexpr(4))
    # As if they were too many to have an order.
    monkeypatch.setattr(packed_forward_hopper, "SORTED", gl.constexpr(9))
    rows = [30, 0, 0, 150, 0, 7, 1, 0, 60]
    agrees(made(rows, rows, 20, 1, 1), (None, 0), packed_forward_hopper.CONFIGS[0])


@pytest.mark.no_gpu
@pytest.mark.parametrize(("fewer", "order"), [(5, [2, 0, 1, 3, 4]), (4, [0, 1, 2, 3, 4])])
def test_few_sequences_are_taken_by_their_keys_and_more_in_their_order(monkeypatch, fewer, order):
    """Number 3 is short, number 4 are the rows past the last sequence, which see no key."""
    monkeypatch.setattr(packed_forward_hopper, "SORTED", gl.constexpr(fewer))
    rows, keys = [150, 260, 90, 7], [300, 300, 310, 1]
    q, k, v, cu_q, cu_k = made(rows, keys, 140, 2, 2)
    plain, taken = packed_forward_hopper.tell, []

    def tell(numbers, *rest):
        taken.append([int(number) for number in numbers])
        plain.fn(numbers, *rest)

    monkeypatch.setattr(packed_forward_hopper, "tell", tell)
    config = packed_forward_hopper.CONFIGS[0]
    out, lse, _ = forward_of(q, k, v, cu_q, cu_k, (None, 0), config, sm_count=1)
    truth, truth_lse = exact(q, k, v, cu_q, cu_k, (None, 0))
    assert differs(out, truth) < 5e-4 and torch.equal(lse.isneginf(), truth_lse.isneginf())
    *taken, end = taken
    assert end[0] == -1
    starts = cu_q.tolist()
    found = [starts.index(first_row) for _, _, first_row, *_ in taken]
    assert list(dict.fromkeys(found)) == order
    # Each tile of each head once, those of a sequence from its end, and heads side by side.
    tiles = [(head, tile, index) for (head, tile, *_), index in zip(taken, found, strict=True)]
    counts = [-(-n // 128) for n in (*rows, 140)]
    assert sorted(tiles) == sorted(
        (h, t, i) for h in (0, 1) for i in range(5) for t in range(counts[i])
    )
    assert [tile for head, tile, index in tiles if (head, index) == (0, 1)] == [2, 1, 0]
    assert [head for head, *_ in tiles] == [0, 1] * sum(counts)


@pytest.mark.no_gpu
@pytest.mark.parametrize(("fewer", "order"), [(5, [1, 0, 2, 3, 4]), (4, [0, 1, 2, 3, 4])])
def test_few_sequences_give_gradients_by_their_rows_and_more_in_their_order(
    monkeypatch, fewer, order
):
    """Number 4 are the keys past the last sequence, which no row sees."""
    monkeypatch.setattr(packed_backward_hopper, "SORTED", gl.constexpr(fewer))
    rows, keys = [150, 260, 90, 7], [300, 300, 310, 1]
    tensors = made(rows, keys, 140, 2, 2)
    plain, taken = packed_backward_hopper.copy_keys, []

    def copy_keys(at, *rest):
        _, end, head, first, _ = map(int, at)
        # A tile's last coordinate but one is the bound less the rows that are left.
        taken.append((head, end, BOUND.value - first))
        plain.fn(at, *rest)

    monkeypatch.setattr(packed_backward_hopper, "copy_keys", copy_keys)
    grads_agree(tensors, (None, 0), packed_backward_hopper.CONFIGS[0])
    ends = [*itertools.accumulate(keys), sum(keys) + 140]
    assert list(dict.fromkeys(ends.index(end) for _, end, _ in taken)) == order
    # Each tile of each head once, and heads side by side.
    expected = [(end, n - start) for end, n in zip(ends, (*keys, 140), strict=True)
                for start in range(0, n, 128)]  # fmt: skip
    for head in (0, 1):
        assert sorted((end, left) for h, end, left in taken if h == head) == sorted(expected)
    assert [head for head, *_ in taken] == [0, 1] * len(expected)


@pytest.mark.no_gpu
@pytest.mark.parametrize("window", [(None, None), (None, 0)])
def test_values_that_are_not_finite_stay_in_their_sequence(window):
    q, k, v, cu_q, cu_k = made([140, 90, 70], [200, 90, 130], 30, 2, 1)
    config = packed_forward_hopper.CONFIGS[0]
    expected, expected_lse, _ = forward_of(q, k, v, cu_q, cu_k, window, config)
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)):
        x[cu[1] : cu[2]] = math.nan
        x[cu[3] :] = math.inf
    found, lse, _ = forward_of(q, k, v, cu_q, cu_k, window, config)
    for mine in (slice(0, 140), slice(230, 300)):
        assert torch.equal(found[mine], expected[mine])
        assert torch.equal(lse[:, mine], expected_lse[:, mine])
    assert found[140:230].isnan().all() and not found[300:].any()


@pytest.mark.no_gpu
@pytest.mark.parametrize("window", [(None, None), (None, 0)])
def test_gradients_that_are_not_finite_stay_in_their_sequence(window):
    q, k, v, cu_q, cu_k = made([140, 90, 70], [200, 90, 130], 30, 2, 1)
    out, lse = exact(q, k, v, cu_q, cu_k, window)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).half()
    config, results = packed_backward_hopper.CONFIGS[1], (out, lse, dout, None)
    expected = grads_of(q, k, v, cu_q, cu_k, window, config, *results)
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k), (dout, cu_q)):
        x[cu[1] : cu[2]] = math.nan
        x[cu[3] :] = math.inf
    found = grads_of(q, k, v, cu_q, cu_k, window, config, *results)
    for grad, same, cu in zip(found, expected, (cu_q, cu_k, cu_k), strict=True):
        for mine in (slice(0, cu[1]), slice(cu[2], cu[3])):
            assert same[mine].isfinite().all() and torch.equal(grad[mine], same[mine])


@pytest.mark.no_gpu
@pytest.mark.parametrize("d", [64, 128])
def test_gradients_of_sequences_with_one_key_are_the_rounding_of_their_sums(d):
    tensors = made([1, 0, 70], [1, 0, 1], 0, 6, 3, d)
    dout = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(3)).half()
    out, lse = (x.detach() for x in exact(*tensors, (None, None)))
    _, truths = truths_of(*tensors, (None, None), dout)
    assert not truths[0].any() and truths[2].any()
    results = out, lse, dout, None
    grads = grads_of(*tensors, (None, None), packed_backward_hopper.CONFIGS[0], *results)
    for ours, exactly in zip(grads, truths, strict=True):
        assert rounded(ours, exactly, dout)


def laid_out(x, how):
    """x in memory of another layout, between entries that are not a number."""
    total, h, d = x.shape
    shape, strides = {
        "padded heads": ((total, h, d + 8), (h * (d + 8), d + 8, 1)),
        "heads first": ((total, h, d), (d, total * d, 1)),
        "padded rows": ((total, h + 1, d), ((h + 1) * d + 16, d, 1)),
        "an odd stride of one row": ((total, h, d), (h * d + 3 * (total == 1), d, 1)),
        "an odd stride of one head": ((total, h, d), (h * d, 3 if h == 1 else d, 1)),
    }[how]
    before = after = 64
    spanned = sum(max(0, n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    filled = x.new_full((before + spanned + after,), math.nan)
    made = filled.as_strided(shape, strides, before)[:, :h, :d]
    made.copy_(x)
    return made


LAYOUTS = ["padded heads", "heads first", "padded rows"]
ONES = ["an odd stride of one row", "an odd stride of one head"]


@pytest.mark.no_gpu
@pytest.mark.parametrize("how", [*LAYOUTS, *ONES])
def test_any_layout_that_tma_takes_is_read_where_it_lies(how):
    """A stride of one row or head is never used."""
    one = how in ONES
    rows, keys = ([200, 30], [1, 0]) if one else ([200, 30], [150, 140])
    q, k, v, cu_q, cu_k = made(rows, keys, 0, 2 - one, 2 - one)
    tensors = *(laid_out(x, how) for x in (q, k, v)), cu_q, cu_k
    with mock.patch.object(dense, "is_hopper", lambda device: True):
        assert packed_forward_hopper.suits_packed(*tensors[:3], 256)
    agrees(tensors, (None, 0), packed_forward_hopper.CONFIGS[0])
    grads_agree(tensors, (None, 0), packed_backward_hopper.CONFIGS[0])


@pytest.mark.no_gpu
def test_keys_past_the_end_give_no_gradient_where_all_scores_are_low():
    """The keys that TMA reads there are zero. Their weights would be infinite, and dq no number."""
    q, k, v, cu_q, cu_k = made([100, 90], [100, 70], 0, 1, 1)
    q[..., 0], k[..., 0] = 15.0, -15.0
    grads_agree((q, k, v, cu_q, cu_k), (None, None), packed_backward_hopper.CONFIGS[0])


@pytest.mark.no_gpu
def test_boundaries_that_fall_or_lie_outside_lead_to_no_other_memory():
    q, k, v, _, _ = made([300], [300], 0, 1, 1)
    wrong = torch.tensor([0, 250, 90, -70, 2**40, 300])
    config = packed_forward_hopper.CONFIGS[0]
    out, lse, _ = forward_of(q, k, v, wrong, wrong, (None, None), config)
    config, results = packed_backward_hopper.CONFIGS[0], (out, lse, out, None)
    grads = grads_of(q, k, v, wrong, wrong, (None, None), config, *results)
    assert all(x.shape == q.shape for x in (out, *grads))


@pytest.mark.no_gpu
def test_the_counter_of_tiles_is_zero_again(monkeypatch):
    counters = []

    def counter(device):
        counters.append(torch.zeros(1, dtype=torch.int32))
        return counters[-1]

    monkeypatch.setattr(packed_forward_hopper, "arrival_counter", counter)
    for rows in ([500, 300], [3] * 9):
        tensors = made(rows, rows, 0, 2, 2)
        forward_of(*tensors, (None, 0), packed_forward_hopper.CONFIGS[0])
    assert [each.item() for each in counters] == [0, 0]


# The sets of barriers of the kernel, in its order.
WAITS = ["q full", "told", "k full", "k free", "v full", "v free", "read"]


@pytest.mark.no_gpu
@pytest.mark.parametrize("which", range(len(WAITS)), ids=WAITS)
def test_a_wait_that_is_left_out_is_found(which):
    """Each wait of the kernel is needed."""
    # Numbers are told early if each tile of rows walks few keys.
    rows = [100] * 12 if WAITS[which] == "read" else [600, 300, 170]
    q, k, v, cu_q, cu_k = made(rows, rows, 0, 8, 8)
    truth, _ = exact(q, k, v, cu_q, cu_k, (None, None))
    # Values of a neighbour that are not made zero are seen if they are infinite.
    v[600:] = math.inf
    config, found = packed_forward_hopper.CONFIGS[0], None
    # Threads that happen to run in order hide it; the first disorder ends the search.
    for _ in range(40):
        try:
            out, _, _ = forward_of(
                q, k, v, cu_q, cu_k, (None, None), config, unwaited=which, patience=2.0
            )
        except (AssertionError, StuckError) as error:
            found = error
        else:
            found = not differs(out[:600], truth[:600]) < 5e-4
        if found:
            break
    assert found


# Those of the backward kernel.
BACKWARD_WAITS = ["kv full", "q full", "dout full", "free"]


@pytest.mark.no_gpu
@pytest.mark.parametrize("which", range(len(BACKWARD_WAITS)), ids=BACKWARD_WAITS)
def test_a_wait_of_the_backward_pass_that_is_left_out_is_found(which):
    rows = [600, 300, 170]
    q, k, v, cu_q, cu_k = made(rows, rows, 0, 4, 2)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = exact(*leaves, cu_q, cu_k, (None, None))
    truths = torch.autograd.grad(out, leaves, out)
    dout = out.detach().half()
    for x in (k, dout):
        x[600:] = math.inf
    results = out.detach(), lse.detach(), dout, None
    config, found = packed_backward_hopper.CONFIGS[0], None
    for _ in range(40):
        try:
            grads = grads_of(
                q, k, v, cu_q, cu_k, (None, None), config, *results, unwaited=which, patience=2.0
            )
        except (AssertionError, StuckError) as error:
            found = error
        else:
            pairs = zip(grads, truths, strict=True)
            found = not all(differs(grad[:600], truth[:600]) < 1e-3 for grad, truth in pairs)
        if found:
            break
    assert found


@pytest.fixture(scope="module")
def built():
    return hopper_build.built("packed")


@pytest.mark.slow
@pytest.mark.no_gpu
def test_the_binaries_use_the_tensor_cores_and_wait_where_they_are_told(built):
    assert len(built) == 16
    for name, row in built.items():
        hopper_build.check(name, row)
        if "forward" in name:
            assert row["spill_stores"] == row["spill_loads"] == 0, name


@pytest.mark.no_gpu
def test_the_public_function_takes_these_kernels():
    q, k, v, cu_q, cu_k = made([400, 270], [430, 270], 20, 4, 2)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).half()
    truth, expected = truths_of(q, k, v, cu_q, cu_k, (100, 0), dout)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with (
        # No interpreter has Hopper's instructions.
        mock.patch.object(dense, "is_hopper", lambda device: True),
        assume_device(sm_count=3),
        on_threads(packed_forward_hopper),
        on_threads(packed_backward_hopper),
        mock.patch.object(varlen.FORWARD.kernel, "run", side_effect=AssertionError),
        mock.patch.object(varlen.DQ.kernel, "run", side_effect=AssertionError),
        mock.patch.object(Configs, "pick", autospec=True, side_effect=Configs.pick) as picked,
        mock.patch.object(packed_forward_hopper, "near_heads", return_value=4) as near,
        mock.patch.object(packed_backward_hopper, "near_key_heads", return_value=2) as near_keys,
    ):
        longest = {"max_seqlen_q": 400, "max_seqlen_k": 600}
        out = attention_varlen(*leaves, cu_q, cu_k, window=(100, 0), **longest)
        grads = torch.autograd.grad(out, leaves, dout)
    assert near.call_args.args[-1] == 1024 and near_keys.call_args.args[-1] == 512
    keys = [call.kwargs for call in picked.call_args_list if call.args[0] is varlen.HOPPER_FORWARD]
    assert keys == [{"s": 1024, "mean": 256, "d": 64, "causal": True, "square": False}]
    assert differs(out.detach(), truth) < 5e-4
    assert all(differs(grad, each) < 1e-3 for grad, each in zip(grads, expected, strict=True))


@pytest.mark.no_gpu
@pytest.mark.parametrize("same", [False, True])
def test_the_public_function_tells_whether_the_boundaries_are_one_tensor(same, first_widths):
    q, k, v, cu_q, cu_k = made([520], [520], 0, 1, 1, 128)
    cu_k = cu_q if same else cu_k
    truth, expected = truths_of(q, k, v, cu_q, cu_k, (None, 0), torch.ones_like(q))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with (
        mock.patch.object(dense, "is_hopper", lambda device: True),
        assume_device(sm_count=3),
        on_threads(packed_forward_hopper),
        on_threads(packed_backward_hopper),
    ):
        out = attention_varlen(*leaves, cu_q, cu_k, causal=True)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        with torch.no_grad():
            assert torch.equal(attention_varlen(*leaves, cu_q, cu_k, causal=True), out)
    # Without a square so few keys have tiles of 64.
    assert first_widths == ({64, 128} if same else {64})
    assert differs(out.detach(), truth) < 5e-4
    assert all(differs(grad, each) < 1e-3 for grad, each in zip(grads, expected, strict=True))


def test_the_tiles_follow_the_longest_and_the_average_sequence():
    def keys(s, mean, d, causal, square=False):
        return packed_forward_hopper.choose(s, mean, d, causal, square)["BLOCK_N"]

    def rows(mean, d, causal):
        return packed_backward_hopper.choose_packed(mean, d, causal)["BLOCK_M"]

    assert [keys(s, s, 128, causal=True) for s in (512, 1024, 2048)] == [64, 64, 128]
    assert [keys(4096, mean, 128, causal=True) for mean in (0, 256, 512)] == [64, 64, 128]
    assert [keys(s, s, 128, causal=True, square=True) for s in (256, 512, 1024)] == [64, 128, 128]
    assert keys(4096, 256, 128, causal=True, square=True) == 64
    assert {keys(512, mean, 128, causal=False) for mean in (0, 256)} == {128}
    assert [keys(4096, mean, 64, causal=False) for mean in (0, 128, 256)] == [64, 64, 128]
    for square in (False, True):
        found = [keys(4096, mean, 64, causal=True, square=square) for mean in (0, 256, 512)]
        assert found == [64, 64, 128]
    assert [rows(mean, 64, causal=False) for mean in (0, 512, 1024)] == [64, 64, 128]
    assert {rows(mean, 128, causal=False) for mean in (0, 4096)} == {64}


@pytest.mark.no_gpu
@pytest.mark.parametrize(("group", "hopper"), [(1, False), (2, True)])
def test_heads_that_share_a_tile_fill_it_with_half_the_rows(group, hopper):
    q, k, v, cu_q, cu_k = made([60, 33], [60, 40], 0, 2 * group, 2)
    with (
        mock.patch.object(dense, "is_hopper", lambda device: True),
        assume_device(sm_count=3),
        on_threads(packed_forward_hopper),
        mock.patch.object(Configs, "pick", autospec=True, side_effect=Configs.pick) as picked,
    ):
        out = attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=64, max_seqlen_k=64, causal=True)
    taken = varlen.HOPPER_FORWARD if hopper else varlen.FORWARD
    assert [call.args[0] for call in picked.call_args_list] == [taken]
    assert differs(out, exact(q, k, v, cu_q, cu_k, (None, 0))[0]) < 5e-4


@pytest.mark.parametrize(
    ("group", "sharing"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 8), (12, 4), (16, 8)]
)
def test_heads_that_share_a_tile_are_a_power_of_two_up_to_eight(group, sharing):
    q, k = torch.empty(5, 2 * group, 64), torch.empty(5, 2, 64)
    assert packed_forward_hopper.heads_of_a_tile(q, k) == sharing


@pytest.mark.parametrize(("group", "square"), [(1, True), (2, False), (3, True), (4, False)])
def test_heads_that_share_a_tile_have_no_square(group, square):
    q, k = torch.empty(5, 2 * group, 64), torch.empty(5, 2, 64)
    assert packed_forward_hopper.ends_in_squares(q, k, same=True, right=0) == square


def test_the_average_length_is_a_power_of_two_below_it():
    x = torch.empty(1000, 2, 64)
    found = [packed_forward_hopper.mean_length(x, torch.empty(n + 1)) for n in (0, 1, 4, 7, 2000)]
    assert found == [512, 512, 128, 128, 0]


@pytest.mark.no_gpu
def test_hopper_takes_sequences_that_fill_a_tile():
    q = torch.empty(512, 2, 64, dtype=torch.bfloat16, device="meta")
    with assume_device(hopper=True):
        assert packed_forward_hopper.suits_packed(q, q, q, 128)
        assert not packed_forward_hopper.suits_packed(q, q, q, 64)
        assert not packed_forward_hopper.suits_packed(q.float(), q.float(), q.float(), 128)
        # Coordinates of rows have a bound.
        for rows, suits in ((TOO_MANY_ROWS - 1, True), (TOO_MANY_ROWS, False)):
            long = torch.empty(rows, 1, 64, dtype=torch.bfloat16, device="meta")
            assert packed_forward_hopper.suits_packed(long, long, long, 128) == suits
            assert packed_forward_hopper.suits_packed(q, long, long, 128) == suits
        # Each sequence may take another 64 rows for the sums of dq.
        for sequences, suits in ((16, True), (17, False)):
            cu = torch.empty(sequences, dtype=torch.int32, device="meta")
            assert packed_backward_hopper.suits_backward(q, q, q, q, cu, 128) == suits
    wide = packed_backward_hopper.CONFIGS[1]
    assert [varlen.HOPPER_BACKWARD.suits(wide, m, 64, False) for m in (32, 64)] == [False, True]


@pytest.mark.hopper
@few
@given(
    # On both sides of 1024, where causal heads of 128 change their tiles.
    st.lists(st.integers(0, 1300), min_size=1, max_size=6),
    # Groups of which one, two, four or eight heads share tiles.
    st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 8])),
    st.sampled_from([64, 128]),
    st.sampled_from([(None, None), (None, 0), (300, 20), (100, 0)]),
    st.sampled_from([0, 150]),
    st.sampled_from(LAYOUTS),
    st.booleans(),
)
def test_random_lengths_on_a_gpu(lengths, heads, d, window, after, how, same):
    rows, keys = lengths, lengths if same else lengths[1:] + lengths[:1]
    count, group = heads
    tensors = made(rows, keys, after, count * group, count, d, torch.bfloat16)
    q, k, v, cu_q, cu_k = tensors
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    truth, expected = truths_of(*tensors, window, dout)
    # As it lies: the layout is that of the views of a larger tensor.
    leaves = [laid_out(x.to("cuda"), how).requires_grad_() for x in (q, k, v)]
    sizes = tuple(-1 if size is None else size for size in window)
    ends = cu_q.to("cuda")
    out = attention_varlen(*leaves, ends, ends if same else cu_k.to("cuda"), window=sizes)
    grads = torch.autograd.grad(out, leaves, dout.to("cuda"))
    for ours, exactly in zip((out, *grads), (truth, *expected), strict=True):
        assert rounded(ours, torch.zeros(ours.shape) if exactly is None else exactly, dout)


@pytest.mark.hopper
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_values_that_are_not_finite_stay_in_their_sequence_on_a_gpu(d, causal):
    rows, keys = [140, 90, 270], [200, 90, 330]
    *tensors, cu_q, cu_k = made(rows, keys, 30, 2, 1, d, torch.bfloat16)
    dout = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(3)).bfloat16()

    def results(*given):
        *leaves, seed, ends, other_ends = (x.to("cuda") for x in (*given, cu_q, cu_k))
        leaves = [x.requires_grad_() for x in leaves]
        out = attention_varlen(*leaves, ends, other_ends, causal=causal)
        return [x.detach().cpu().float() for x in (out, *torch.autograd.grad(out, leaves, seed))]

    expected = results(*tensors, dout)
    for x, cu in zip((*tensors, dout), (cu_q, cu_k, cu_k, cu_q), strict=True):
        x[cu[1] : cu[2]] = math.nan
        x[cu[3] :] = math.inf
    found = results(*tensors, dout)
    for ours, same, cu in zip(found, expected, (cu_q, cu_q, cu_k, cu_k), strict=True):
        for mine in (slice(0, cu[1]), slice(cu[2], cu[3])):
            assert same[mine].isfinite().all()
            assert torch.allclose(
                ours[mine], same[mine], rtol=0, atol=1e-2 * same[mine].abs().max()
            )


@pytest.mark.hopper
@pytest.mark.parametrize("d", [64, 128])
def test_the_last_addition_to_dq_is_there_before_a_program_ends(d):
    """Thousands of programs whose keys end within a tile."""
    rows = [129 + n % 7 for n in range(800)]
    *tensors, cu, _ = made(rows, rows, 0, 4, 4, d, torch.bfloat16)
    leaves = [x.to("cuda").requires_grad_() for x in tensors]
    ends = cu.to("cuda")
    out = attention_varlen(*leaves, ends, ends, max_seqlen_q=135, max_seqlen_k=135)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    truths = [x.detach().double().requires_grad_() for x in leaves]
    longest, index = 136, torch.arange(len(rows), device="cuda")
    places = ends[index][:, None] + torch.arange(longest, device="cuda")
    inside = places < ends[index + 1][:, None]
    padded = [x[places.clamp(max=x.shape[0] - 1)].transpose(1, 2) for x in truths]
    scores = padded[0] @ padded[1].mT * d**-0.5
    weights = scores.masked_fill(~inside[:, None, None, :], -math.inf).softmax(-1)
    result = (weights @ padded[2]).transpose(1, 2)[inside]
    expected = torch.autograd.grad(result, truths, dout.double())
    for ours, exactly in zip((out, *grads), (result, *expected), strict=True):
        assert (ours.double() - exactly).abs().amax() <= 5e-2 * exactly.abs().amax()


@pytest.mark.hopper
@pytest.mark.parametrize("d", [64, 128])
def test_a_hundred_runs_give_the_same_result(d):
    q, k, v, cu_q, cu_k = (x.to("cuda") for x in made([900, 130, 3], [900, 130, 3], 0, 8, 8, d))
    first = attention_varlen(q, k, v, cu_q, cu_k, causal=True)
    assert all(
        torch.equal(first, attention_varlen(q, k, v, cu_q, cu_k, causal=True)) for _ in range(100)
    )


def test_heads_side_by_side_have_the_keys_of_one_sequence_in_the_l2():
    """All sequences together would not fit, and fewer heads would take turns."""
    q, k = (torch.empty((1, h, 16384, 128), device="meta") for h in (32, 8))
    assert dense.near_heads(q, k, causal=True) == 16
    assert dense.near_heads(q, k, causal=True, longest=2048) == 32
    assert dense.near_heads(q, k, causal=True, longest=2**20) == 16
    assert dense_backward.near_key_heads(q, k) == 1
    assert dense_backward.near_key_heads(q, k, longest=2048) == 4
    assert dense_backward.near_key_heads(q, k, longest=2**20) == 1

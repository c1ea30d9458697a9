"""Check rows shared by several programs, and sums by the last program, in any order of programs.

The programs take turns (`interleaved.py`).
"""

import contextlib
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.build.recorder import choosing
from kernels import cross_entropy, vector
from kernels import layer_norm as layer_norm_family
from kernels import rms_norm as rms_norm_family
from kernels import softmax as family
from kernels._runtime.device import assume_device
from kernels._runtime.launch_guard import shapes_only
from kernels._triton import exchange as _exchange
from kernels.layer_norm import layer_norm
from kernels.norm_details import backward as _norm_backward
from kernels.norm_details import backward_tiles as _norm_backward_tiles
from kernels.norm_details.columns import span_of
from kernels.rms_norm import rms_norm
from kernels.softmax import softmax
from kernels.softmax_details import split_rows as _split_rows
from ops.layer_norm import layer_norm_reference
from ops.rms_norm import rms_norm_reference
from ops.softmax import softmax_reference
from tests.support.interleaved import ORDERS, Deadlock, Run, Schedule, interleaved, schedules

pytestmark = pytest.mark.no_gpu
BOUND = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DTYPES = list(BOUND)
few = settings(max_examples=15, derandomize=True)


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def near(ours, truth, bound):
    gap = (ours.double() - truth).abs().max().item()
    assert gap <= bound * max(truth.abs().max().item(), 1e-30)


PATCHED = {"MOST_CHUNKS": 2, "WARPS": 1, "MORE_WARPS": 2, "SHORT_BYTES": 4096}
PAIR_BYTES = family.PAIR_BYTES
PLAIN = {name: getattr(_split_rows, name) for name in PATCHED}


@pytest.fixture(scope="module", autouse=True)
def small():
    """Let a program hold few elements, so that several programs share a row of about a thousand."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(family, "PAIR_BYTES", 512)
        for name, value in PATCHED.items():
            patched.setattr(_split_rows, name, value)
        yield


def softmax_agrees(x, schedule, scale=1.0):
    """Check both passes of a softmax whose rows are shared; return the launches."""
    x = x.detach().requires_grad_()
    exact = x.detach().double().requires_grad_()
    dy = randn(*x.shape, dtype=x.dtype, seed=7)
    with interleaved(schedule) as runs:
        y = softmax(x, scale=scale)
        y.backward(dy)
    expected = softmax_reference(exact, scale, False, None)
    expected.backward(dy.double())
    near(y, expected, BOUND[x.dtype])
    near(x.grad, exact.grad, BOUND[x.dtype])
    assert [run.kernel for run in runs] == ["_forward_split_kernel", "_backward_split_kernel"]
    return runs


def holders(runs: list[Run], rows: int) -> list[int]:
    return [run.grid[0] // rows for run in runs]


@few
@given(st.data())
def test_softmax_in_any_order(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    # Rows that fill their programs, rows that do not, and rows accessed element by element.
    n = data.draw(st.sampled_from([1024, 1040, 1600, 2048]) | st.integers(600, 2048))
    rows = data.draw(st.integers(1, 3))
    schedule = data.draw(schedules())
    runs = softmax_agrees(randn(rows, n, dtype=dtype), schedule, data.draw(st.floats(0.1, 3)))
    assert min(holders(runs, rows)) >= 2 and all(run.turns > run.grid[0] for run in runs)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_on_a_device_that_holds_one_row(dtype, order):
    programs = 4 if dtype.itemsize == 2 else 8
    schedule = Schedule(order, resident=programs)
    runs = softmax_agrees(randn(3, 2048, dtype=dtype), schedule)
    # Forward, rows of at least 4096 bytes have half as many programs with more warps.
    assert holders(runs, 3)[1] == programs


@pytest.mark.parametrize("order", ORDERS)
def test_softmax_waits_on_a_device_that_holds_less(order):
    with interleaved(Schedule(order, resident=2)), pytest.raises(Deadlock, match="_split_kernel"):
        softmax(randn(3, 2000, dtype=torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_of_parts_that_are_minus_infinity_or_nan(dtype):
    x = randn(4, 2048, dtype=dtype)
    x[0, :700] = x[1, 700:] = -torch.inf
    x[2] = -torch.inf
    bits = x.view(torch.int32 if dtype == torch.float32 else torch.int16)
    # All bits are set, which in a slot means that its part has not arrived.
    bits[3, 5] = -1
    with interleaved(Schedule("random", seed=3)) as runs:
        y = softmax(x)
    assert runs[0].kernel == "_forward_split_kernel"
    expected = torch.softmax(x.double(), -1)
    assert y[2:].isnan().all() and not y[:2].isnan().any()
    assert ((y - expected)[:2].abs() <= expected[:2] * 2 * BOUND[dtype] + 1e-9).all()


@pytest.mark.parametrize("multiprocessors", [4, 3])
def test_softmax_does_not_wait_where_a_device_may_not_hold_a_row(multiprocessors):
    """Four launches of groups of eight programs need room for 32, four to a multiprocessor."""
    x = randn(2, 2048).requires_grad_()
    sharers = _exchange.SHARERS * 8 // _split_rows.PER_SM
    with assume_device(sm_count=sharers + multiprocessors - 4), interleaved() as runs:
        softmax(x).sum().backward()
    shared = ["_forward_split_kernel", "_backward_split_kernel"]
    assert ([run.kernel for run in runs] == shared) == (multiprocessors == 4)


@pytest.fixture
def plain(monkeypatch):
    """Restore the real sizes."""
    monkeypatch.setattr(family, "PAIR_BYTES", PAIR_BYTES)
    for name, value in PLAIN.items():
        monkeypatch.setattr(_split_rows, name, value)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("form", ["aligned", "peeled", "single"])
def test_rows_of_any_width_have_programs_that_hold_all_of_them(plain, itemsize, form):
    """Check each width above one program's, up to 300,000 columns.
    The forms are vector accesses, peeled rows, and single accesses, in which a 16-bit element
    takes a register. On an H200 the programs of each row may wait for each other."""
    thread = 64 if itemsize == 2 and form == "single" else 128
    access, wide = 16 // itemsize, form != "single"
    for n in range(PAIR_BYTES // itemsize + 1, 300_001, 16 if form == "aligned" else 7):
        held = _split_rows._held(n, itemsize, 4, wide, form == "peeled")
        block, columns = held["BLOCK_N"], held["BLOCK_N"] * held["NUM_CHUNKS"]
        most = n // access * access if form == "peeled" else n
        assert held["NUM_SPLITS"] * (columns - block) < most <= held["NUM_SPLITS"] * columns
        assert columns * itemsize <= 128 * thread and held["NUM_SPLITS"] <= 132
        assert held["PEELED"] == (form == "peeled")
        assert held["EVEN_N"] == (form != "peeled" and n == held["NUM_SPLITS"] * columns)


@pytest.mark.parametrize("n", [50257, 50264, 128256, 151936, 250002, 262144, 262145, 300_000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding", [0, 3])
def test_long_rows_are_read_once_whatever_their_width_and_stride(
    plain, monkeypatch, n, dtype, padding
):
    """No width, stride or dtype makes one program loop over such a row."""
    called = []
    for name in ("forward_split", "backward_split"):
        monkeypatch.setattr(family, name, lambda *_, name=name: called.append(name))
    x = torch.empty(8, n + padding, dtype=dtype, device="meta")[:, :n]
    with _exchange.taking_turns(), shapes_only():
        family.softmax_fwd(x)
        family.softmax_bwd(x, x)
    assert called == ["forward_split", "backward_split"]


NORM_SPLITS = {
    "layer_norm": layer_norm_family.BACKWARD_SPLIT,
    "rms_norm": rms_norm_family.BACKWARD_SPLIT,
}
NORMS = {
    "layer_norm": (layer_norm, layer_norm_reference),
    "rms_norm": (rms_norm, rms_norm_reference),
}


def norm_agrees(name, rows, n, dtype, schedule, residual=False):
    """Assert that both passes of a norm lie near the float64 reference; return the launches."""
    function, reference = NORMS[name]
    given = {"x": randn(rows, n, dtype=dtype, seed=1), "weight": randn(n, dtype=dtype, seed=2)}
    if name == "layer_norm":
        given["bias"] = randn(n, dtype=dtype, seed=3)
    if residual:
        given["residual"] = randn(rows, n, dtype=dtype, seed=4)
    seed = randn(rows, n, dtype=dtype, seed=5)
    results, runs = [], []
    for formula, form in ((function, torch.Tensor.clone), (reference, torch.Tensor.double)):
        leaves = {key: form(tensor).requires_grad_() for key, tensor in given.items()}
        with interleaved(schedule) as launches:
            outputs = formula(**leaves, eps=1e-5)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            gradients = torch.autograd.grad(
                outputs, list(leaves.values()), [form(seed)] * len(outputs)
            )
        results.append([*outputs, *gradients])
        runs += launches
    for ours, truth in zip(*results, strict=True):
        near(ours, truth, 10 * BOUND[dtype])
    return runs


def exchanged(runs: list[Run]) -> set[str]:
    """Return the passes whose programs exchanged sums."""
    kernels = [run.kernel for run in runs if run.looks]
    return {part for part in ("forward", "backward") for kernel in kernels if part in kernel}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "name, n", [("layer_norm", 16384), ("rms_norm", 16384), ("rms_norm", 65536)]
)
def test_norms_in_any_order(name, n, order):
    runs = norm_agrees(name, 3, n, torch.float32, Schedule(order, seed=n), order == "random")
    assert exchanged(runs) >= ({"backward"} if n == 16384 else {"forward", "backward"})


@pytest.mark.parametrize("n, dtype", [(65536, torch.float32), (131072, torch.float16)])
def test_layer_norm_of_rows_that_several_programs_hold_forward(n, dtype):
    runs = norm_agrees("layer_norm", 2, n, dtype, Schedule("successor first"))
    assert "forward" in exchanged(runs)


@pytest.mark.parametrize("name", NORMS)
def test_a_nan_in_a_long_row_of_a_norm_stays_in_its_row(name):
    function, _ = NORMS[name]
    x, vector = randn(3, 131072, dtype=torch.float16), torch.ones(131072, dtype=torch.float16)
    x[1, 70000:70002].view(torch.int16).fill_(-1)
    vectors = [vector] if name == "rms_norm" else [vector, vector]
    with interleaved(Schedule("successor first")) as runs:
        y = function(x, *vectors)
    assert runs[0].grid[0] > 3
    assert y[1].isnan().all() and not y[0].isnan().any() and not y[2].isnan().any()


@pytest.mark.parametrize("multiprocessors, walks", [(32, False), (31, True)])
def test_rows_of_a_norm_are_split_if_the_device_holds_their_programs(multiprocessors, walks):
    """A row of 66,064 has 8 programs, and up to four waiting launches may share a device."""
    x = randn(1, 66064, dtype=torch.float16)
    with assume_device(sm_count=multiprocessors), interleaved() as runs:
        rms_norm(x, torch.ones(66064, dtype=torch.float16))
    assert [run.grid[0] == 1 for run in runs] == [walks]


@few
@given(st.data())
def test_norms_of_uneven_rows_in_any_order(data):
    """Draw splits of several lengths, and numbers of splits that are no power of two."""
    name = data.draw(st.sampled_from(sorted(NORMS)))
    n = data.draw(st.sampled_from([1000, 1040, 1601, 2048, 3001]))
    span = data.draw(st.sampled_from([256, 384, 512]))
    rows, dtype = data.draw(st.integers(1, 3)), data.draw(st.sampled_from(DTYPES))

    def split(n, itemsize, aligned):
        splits = -(-n // span)
        block = _norm_backward_tiles._fitting(span_of(n, splits))
        return _norm_backward_tiles._split_config(block, 3, 1, splits, data.draw(st.booleans()), 4)

    never = mock.patch.object(_norm_backward, "is_whole", lambda n, *_: False)
    with choosing(NORM_SPLITS[name], split), never:
        runs = norm_agrees(name, rows, n, dtype, data.draw(schedules()), data.draw(st.booleans()))
    assert [run.grid[0] for run in runs if run.looks] == [rows * -(-n // span)]


@contextlib.contextmanager
def counted(family, schedule):
    """Within the body all launches of a family share one counter, and fresh memory is NaN."""
    counter, plain = torch.zeros(1, dtype=torch.int32), torch.Tensor.new_empty

    def dirty(x, *given, **named):
        fresh = plain(x, *given, **named)
        return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

    with pytest.MonkeyPatch.context() as patched, interleaved(schedule):
        patched.setattr(family, "arrival_counter", lambda device: counter)
        patched.setattr(torch.Tensor, "new_empty", dirty)
        yield counter


@few
@given(st.integers(0, 20_000), schedules())
@example(5000, Schedule("in turn", seed=1))
def test_dot_by_its_last_program(n, schedule):
    """All values are whole, so each order of the sum gives the same; the counter ends at zero."""
    x, y = randn(n, seed=1).round(), randn(n, seed=2).round()
    with counted(vector, schedule) as counter:
        for _ in range(2):
            assert vector.dot(x, y).item() == torch.dot(x.double(), y.double()).item()
            assert counter.item() == 0


@few
@given(st.integers(1, 9), st.integers(2, 50), st.sampled_from(["mean", "sum"]), schedules())
@example(7, 20, "mean", Schedule("in turn", seed=1))
def test_cross_entropy_by_its_last_program(rows, v, reduction, schedule):
    logits = randn(rows, v)
    targets = torch.randint(0, v, (rows,), generator=torch.Generator().manual_seed(1))
    targets[1::3] = -100
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    with counted(cross_entropy, schedule) as counter:
        loss = cross_entropy.cross_entropy(leaf, targets, reduction=reduction)
        loss.backward()
        without = cross_entropy.cross_entropy(logits, targets, reduction=reduction)
        assert counter.item() == 0
    expected = torch.nn.functional.cross_entropy(exact, targets, reduction=reduction)
    expected.backward()
    for ours, truth in ((loss, expected), (without, expected), (leaf.grad, exact.grad)):
        near(ours, truth, BOUND[torch.float32])

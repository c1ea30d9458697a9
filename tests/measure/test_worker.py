"""Check the worker on the CPU; a stand-in for CUDA graphs replays by calling again."""

import itertools
import types

import pytest
import torch

from harness import status as statuses
from harness.measure import worker
from harness.measure.messages import Checked, Released
from ops._spec import PASSES
from tests.support.cpu_worker import CELL, Overwriting, Timer, cell, noting_square


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_right_function_passes(make, pass_):
    made = make(lambda x, bias: torch.sin(x))
    prepared = cell(made, pass_)
    assert prepared.busy_s > 0 and prepared.first_s > 0
    assert (prepared.remark, prepared.peak_mem_bytes) == ("", 20)
    assert (prepared.held_bytes, prepared.l2_bytes) == (40, 100)
    assert made.release() == Released(40)
    assert cell(made, pass_).remark == ""


def test_both_passes_are_one_call_that_gives_all_and_differentiates_anew_each_time(make):
    given, calls = {}, []
    square = noting_square(calls, given)
    made = make(lambda x, bias: square(x), passes=("forward", "both"))
    cell(made, "both")
    # One more forward pass for each copy of the inputs gives the gradients to compare with.
    assert calls.count("forward") == calls.count("backward") + worker.COPIES
    assert set(map(tuple, given.values())) == {(1.0,)} and len(given) == worker.COPIES
    assert calls[-4:] == ["forward", "backward"] * 2
    output, gradient = made._calls[0]()
    assert not output.requires_grad
    assert torch.equal(gradient**2, 4 * output)


def test_both_passes_take_the_gradients_of_the_backward_pass_unless_the_op_is_a_loss(make):
    seen = {}
    for pass_ in ("backward", "both"):
        given = {}
        made = make(lambda x, bias, given=given: noting_square([], given)(x), passes=PASSES)
        cell(made, pass_)
        seen[pass_] = sorted(map(tuple, given.values()))
    assert seen["backward"] == seen["both"]
    assert all(len(values) > 1 for values in seen["both"])


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_random_result_is_held_to_its_law_in_both_passes(make, factor):
    class Drawn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = torch.rand(x.shape) < 0.5
            return x * ctx.kept

        @staticmethod
        def backward(ctx, gradient):
            return factor * gradient * ctx.kept

    def law(given, results):
        kept = results["out"] != 0
        right = torch.equal(results["dx"], given["dy"] * kept)
        return "" if right and torch.equal(results["out"], given["x"] * kept) else "no mask"

    made = make(lambda x, bias: Drawn.apply(x), impl="rival", passes=PASSES, properties=law)
    if factor == 1:
        cell(made, "both")
    else:
        with pytest.raises(statuses.Inaccurate, match="a timed call: no mask"):
            cell(made, "both")


def test_a_tuple_of_outputs_passes(make):
    cell(make(lambda x, bias: (x + 1, x.amax())))
    cell(make(lambda x, bias: (2 * x, x.argmax())), "backward")


def test_calls_rotate_through_inputs_of_different_values(make):
    seen = {}

    def function(x, bias):
        seen[x.data_ptr()] = x.clone()
        return x + 1

    cell(make(function))
    copies = list(seen.values())
    assert len(copies) == worker.COPIES
    assert not torch.equal(copies[0], copies[1])
    assert all(copy.abs().sum() > 0 for copy in copies)


def test_large_inputs_have_fewer_copies(make, monkeypatch):
    monkeypatch.setattr(worker, "INPUT_SHARE", 1e-9)
    seen = set()

    def function(x, bias):
        seen.add(x.data_ptr())
        return x + 1

    cell(make(function))
    assert len(seen) == 1


def test_a_large_call_gives_its_memory_back_after_each_block(make, monkeypatch):
    given_back = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(1))
    made = make(lambda x, bias: x + 1)
    cell(made)
    assert not given_back
    made.release()
    monkeypatch.setattr(worker, "CALL_SHARE", 1e-9)
    given_back.clear()
    assert cell(made).remark == "events: the call is large"
    assert len(given_back) == 2


def later(change, calls=8):
    """Return a function that is right in its first calls and then spoilt by `change`."""
    count = iter(range(10**6))

    def function(x, bias):
        result = x + 1
        return result if next(count) < calls else change(x, result)

    return function


def tail(x, result):
    result = result.clone()
    result[-1] = float("nan")
    return result


FAULTS = {
    "zeros": lambda x, result: torch.zeros_like(result),
    "nan": lambda x, result: result * float("nan"),
    "tail": tail,
    "its input": lambda x, result: x,
    "shuffled": lambda x, result: result.flip(0),
    "another shape": lambda x, result: result[:1],
}


@pytest.mark.parametrize("impl", ["ours", "rival"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_result_that_is_wrong_later_is_inaccurate(make, fault, impl):
    made = make(later(FAULTS[fault]), impl)
    made.prepare(**CELL, pass_="forward")
    with pytest.raises((statuses.Inaccurate, RuntimeError)):
        made.block(12)
        made.check()


def test_one_bit_is_too_much_for_a_deterministic_op_of_ours(make):
    def nudge(x, result):
        return torch.nextafter(result, torch.full_like(result, 9e9))

    made = make(later(nudge))
    made.prepare(**CELL, pass_="forward")
    made.block(12)
    with pytest.raises(statuses.Inaccurate, match="not bitwise equal"):
        made.check()
    for options in ({"impl": "rival"}, {"deterministic": False}):
        made = make(later(nudge), **options)
        made.prepare(**CELL, pass_="forward")
        made.block(12)
        made.check()


def test_a_replay_that_writes_nothing_is_found(make, monkeypatch):
    monkeypatch.setattr(Timer, "capture", lambda self, call: (lambda: None, call()))
    with pytest.raises(statuses.Inaccurate, match="a timed call"):
        cell(make(lambda x, bias: x + 1))


def test_an_input_that_is_overwritten_is_found(make):
    with pytest.raises(statuses.Inaccurate):
        cell(make(lambda x, bias: x.add_(1) + 0))


def test_outputs_in_the_memory_of_inputs_are_followed(make):
    cell(make(lambda x, bias: x))
    with pytest.raises(statuses.Inaccurate):
        cell(make(lambda x, bias: x.add_(1)))


def test_a_replay_that_leaves_a_tail_unwritten_is_found(make, monkeypatch):
    def capture(self, call):
        first = call()

        def replay():
            for output, again in zip(first, call(), strict=True):
                output.data[:-1].copy_(again[:-1])

        return replay, first

    monkeypatch.setattr(Timer, "capture", capture)
    with pytest.raises(statuses.Inaccurate, match="a timed call"):
        cell(make(lambda x, bias: x + 1))


@pytest.mark.parametrize(("a_call", "leaked"), [(512, 2 * 512 * 4), (0, 0)])
def test_memory_that_grows_with_each_block_is_a_leak(make, monkeypatch, a_call, leaked):
    allocated = [1000]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated[0])

    def function(x, bias):
        allocated[0] += a_call
        return x + 1

    made = make(function)
    made.prepare(**CELL, pass_="forward")
    for _ in range(worker.LEAKY_BLOCKS):
        made.block(4)
    assert made.check() == Checked(leaked * (worker.LEAKY_BLOCKS - 1))
    made.release()
    made.prepare(**CELL, pass_="forward")
    made.block(4)
    assert made.check() == Checked(0)


def test_a_cache_that_fills_once_and_garbage_are_no_leak(make, monkeypatch):
    allocated, garbage = iter([3, 9, 7, 9, 7, 9, 7]), []
    made = make(lambda x, bias: x + 1)
    made.prepare(**CELL, pass_="forward")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    monkeypatch.setattr(worker.gc, "collect", lambda: garbage.append(1))
    for _ in range(4):
        made.block(4)
    assert next(allocated, None) is None and len(garbage) == 3
    assert made.check() == Checked(0)


def test_energy_is_of_the_timed_calls(make):
    counted = []
    made = make(lambda x, bias: counted.append(1) or x + 1)
    made.prepare(**CELL, pass_="forward")
    counted.clear()
    answer = made.energy(200)
    assert len(counted) == 3 and answer.busy_s > 0
    assert (answer.energy_uj, answer.energy_pm_uj) == (400.0, 0.5)
    made.check()


def test_the_call_that_compiles_is_told_apart(make, monkeypatch):
    calls, clock = itertools.count(), types.SimpleNamespace(seconds=0.0)

    def function(x, bias):
        clock.seconds += 2.0 if next(calls) == 0 else 0.125
        return x + 1

    monkeypatch.setattr(worker, "time", types.SimpleNamespace(perf_counter=lambda: clock.seconds))
    prepared = make(function).prepare(**CELL, pass_="forward")
    # The first call on each copy, then one more, is eager: no GPU, no graph.
    assert prepared.first_s == 2.0 + (worker.COPIES - 1) * 0.125
    assert prepared.busy_s == worker.COPIES * 0.125


def test_the_forward_pass_before_a_backward_pass_is_a_first_call_too(make, monkeypatch):
    clock = types.SimpleNamespace(seconds=0.0)

    def function(x, bias):
        clock.seconds += 2.0
        return x * x

    monkeypatch.setattr(worker, "time", types.SimpleNamespace(perf_counter=lambda: clock.seconds))
    prepared = make(function).prepare(**CELL, pass_="backward")
    assert prepared.first_s == worker.COPIES * 2.0 and prepared.busy_s == 0
    prepared = make(function, passes=("forward", "both")).prepare(**CELL, pass_="both")
    assert prepared.first_s == worker.COPIES * 4.0 and prepared.busy_s == worker.COPIES * 2.0


def test_work_before_a_first_call_is_none_of_it(make, monkeypatch):
    """The inputs are still being drawn on the GPU when the function is called."""
    clock = types.SimpleNamespace(seconds=0.0, drawing=0.0)

    def make_inputs(*arguments, **options):
        clock.drawing = 3.0
        return drawn(*arguments, **options)

    def synchronize():
        clock.seconds, clock.drawing = clock.seconds + clock.drawing, 0.0

    drawn = worker.inputs.make
    monkeypatch.setattr(worker.inputs, "make", make_inputs)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(worker, "time", types.SimpleNamespace(perf_counter=lambda: clock.seconds))
    prepared = make(lambda x, bias: x + 1).prepare(**CELL, pass_="forward")
    assert (clock.seconds, prepared.first_s) == (worker.COPIES * 3.0, 0.0)


def test_a_worker_has_one_thread(make):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        make(lambda x, bias: x + 1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_gradients_may_share_memory_with_what_was_given(make):
    cell(make(lambda x, bias: x + x.sum()), "backward")
    cell(make(lambda x, bias: torch.stack((x, 2 * x))), "backward")


@pytest.mark.parametrize("impl", ["ours", "rival"])
def test_a_gradient_may_be_a_view_of_what_was_saved(make, impl):
    def function(x, bias):
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.clone):
            return Overwriting.apply(x)

    cell(make(function, impl), "backward")


@pytest.mark.parametrize("impl", ["ours", "rival"])
@pytest.mark.parametrize("pass_", ["backward", "both"])
@pytest.mark.parametrize("function", [lambda x, bias: x.view(-1), lambda x, bias: x.sum()])
def test_a_gradient_that_is_a_view_of_what_was_given_is_no_computation(make, function, impl, pass_):
    with pytest.raises(statuses.Unsupported, match="nothing is computed"):
        make(function, impl).prepare(**CELL, pass_=pass_)


def test_without_a_graph_events_time_the_calls(make, monkeypatch):
    def capture(self, call):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Timer, "capture", capture)
    made = make(lambda x, bias: x + 1)
    assert cell(made).remark == (
        "events: RuntimeError: operation not permitted when stream is capturing"
    )
    made = make(later(FAULTS["zeros"]))
    made.prepare(**CELL, pass_="forward")
    made.block(12)
    with pytest.raises(statuses.Inaccurate):
        made.check()


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize(
    ("impl", "error", "status"),
    [
        ("rival", ValueError("head_dim must be 64\nmore"), "unsupported"),
        ("ours", ValueError("head_dim must be 64\nmore"), "crashed"),
        ("rival", torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"), "oom"),
        ("rival", RuntimeError("Triton Error [CUDA]: an illegal memory access"), "crashed"),
    ],
)
def test_the_status_of_an_exception_in_the_bench(make, monkeypatch, pass_, impl, error, status):
    def function(x, bias):
        if "illegal" in str(error):
            # The context is lost, so every later call fails in the same way.
            monkeypatch.setattr(torch.cuda, "synchronize", lambda: function(x, bias))
        raise error

    with pytest.raises(Exception) as raised:
        make(function, impl).prepare(**CELL, pass_=pass_)
    assert statuses.of(raised.value) == status
    assert str(error).splitlines()[0] in statuses.reason(raised.value)

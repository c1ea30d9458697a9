"""The worker of whole networks, on the CPU: it holds no inputs between its blocks."""

import time
import weakref

import pytest
import torch

from harness import status as statuses
from harness.measure import parked_worker, worker
from harness.measure.messages import Checked
from harness.measure.parked_worker import ParkedWorker, sampled
from harness.results.columns import SUSTAINED
from tests.support.cpu_worker import CELL


@pytest.fixture
def park(make, monkeypatch):
    drawn = worker.inputs.make

    def on_cpu(*given, only=""):
        found = drawn(*given)
        return {only: found[only]} if only else found

    monkeypatch.setattr(worker.inputs, "make", on_cpu)

    def build(function, **more):
        make(function, **more)
        return ParkedWorker("op", more.get("impl", "ours"), 5)

    return build


def inputs_of(made):
    return [tensor for tensor in made._tensors.values() if tensor is not None]


def test_inputs_have_memory_in_a_block_alone_and_the_same_numbers_in_each(park):
    seen = []

    def function(x, bias):
        seen.append(x.clone())
        return x + 1

    made = park(function)
    prepared = made.prepare(**CELL, pass_="forward")
    assert prepared.remark.startswith("events: ") and prepared.peak_mem_bytes == 20
    for turn in range(2):
        assert [x.untyped_storage().nbytes() for x in inputs_of(made)] == [0]
        made.block(3, turn)
    assert made.check() == Checked(0)
    assert made.energy(4.0).energy_uj == 2 * parked_worker.ENERGY_MS
    assert [x.untyped_storage().nbytes() for x in inputs_of(made)] == [0]
    assert len(seen) > 10 and all(torch.equal(x, seen[0]) for x in seen)
    made.release()
    assert not inputs_of(made)


class Clock:
    """A clock that moves by the calls alone, for the worker."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


# Seconds of a call, the calls before the clock runs, and those of the row that it times.
LENGTHS = [(0.25, 8, 4), (3.0, 1, 1), (0.3, 7, 4), (1e-4, 100, 100)]


@pytest.mark.parametrize(("lasts_s", "settling", "timed"), LENGTHS)
def test_calls_follow_each_other_for_seconds_before_the_clock_runs(
    park, monkeypatch, lasts_s, settling, timed
):
    """A GPU that has rested slows down within a second of them."""
    clock, log = Clock(), []
    monkeypatch.setattr(parked_worker, "time", clock)

    def function(x, bias):
        clock.now += lasts_s
        log.append("call")
        return x + 1

    made = park(function)
    row = made._timer.in_a_row

    def watched(calls, count):
        log.append("row")
        return row(calls, count)

    monkeypatch.setattr(made._timer, "in_a_row", watched)
    made.prepare(**CELL, pass_="forward")
    log.clear()
    made.block(1)
    # One is ahead, and one by events is the last.
    assert log == ["call"] * (1 + settling) + ["row"] + ["call"] * (timed + 1)


def test_energy_is_that_of_calls_which_follow_others_for_seconds(park, monkeypatch):
    clock, windows = Clock(), []
    monkeypatch.setattr(parked_worker, "time", clock)

    def function(x, bias):
        clock.now += 0.5
        return x + 1

    made = park(function)

    def energy(calls, window_ms):
        windows.append((clock.now, window_ms))
        return 1.0, 0.1

    monkeypatch.setattr(made._timer, "energy", energy)
    made.prepare(**CELL, pass_="forward")
    began = clock.now
    made.energy(200)
    made.energy(5000)
    # One is ahead, then two seconds of them.
    assert windows == [(began + 2.5, 2000), (began + 5, 5000)]


def test_a_call_in_place_that_is_compared_begins_with_the_drawn_numbers(park):
    begins = []

    def function(x, bias):
        begins.append(x.clone())
        return x.mul_(2)

    made = park(function, in_place=True)
    made.prepare(**CELL, pass_="forward")
    begins.clear()
    made.block(3)
    first, second, third, *_ = begins
    assert all(torch.equal(x, first) for x in (second, *begins[-3:]))
    assert torch.equal(third, 2 * first)
    assert made.check() == Checked(0)


@pytest.mark.parametrize("which", ["a timed call", "the last call"])
def test_a_result_that_is_wrong_later_is_found(park, monkeypatch, which):
    monkeypatch.setattr(parked_worker, "MOST", 2)
    calls = []

    def function(x, bias):
        calls.append(1)
        late = len(calls) > (2 if which == "a timed call" else 20)
        return x + (2 if late else 1)

    made = park(function)
    made.prepare(**CELL, pass_="forward")
    made.block(3)
    with pytest.raises(statuses.Inaccurate, match=which):
        calls += range(20)
        made.check()


def test_a_check_without_memory_holds_none_afterwards(park, monkeypatch):
    """The check of the next network needs it."""
    full, kept, left = [], [], []

    def function(x, bias):
        more = torch.ones(1)
        if full:
            kept.append(weakref.ref(more))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x + more

    made = park(function)
    made.prepare(**CELL, pass_="forward")
    made.block(3)
    give_back = made._park
    monkeypatch.setattr(made, "_park", lambda: (left.append(kept[-1]()), give_back()))
    full.append(True)
    with pytest.raises(torch.OutOfMemoryError):
        made.check()
    assert left == [None]
    assert [x.untyped_storage().nbytes() for x in inputs_of(made)] == [0]


def test_a_block_counts_the_call_that_warms_up(park, monkeypatch):
    made = park(lambda x, bias: x + 1)
    made.prepare(**CELL, pass_="forward")
    call = made._calls[0]

    def slowly():
        time.sleep(0.05)
        return call()

    monkeypatch.setattr(parked_worker, "MOST", 1)
    made._calls[0] = slowly
    made._timed = [slowly]
    assert made.block(1).busy_s >= 4 * 0.05


def host_share(made, monkeypatch):
    """Make a block; return the seconds that the host is said to need for a call of it."""
    shares, cold = [], made._timer.cold

    def watched(calls, times, before=(), host_s=None):
        shares.append(host_s)
        return cold(calls, times, before)

    monkeypatch.setattr(made._timer, "cold", watched)
    made.block(1)
    (share,) = shares
    return share


def test_the_host_s_share_is_that_of_a_call_which_makes_no_graph(park, monkeypatch):
    """Else the GPU flushes for long before each timed call, to no use."""

    class Graphed:
        ahead, calls = 2, 0

        def __call__(self, x, bias):
            self.calls += 1
            if self.calls == 2:
                time.sleep(0.2)
            return x + 1

        def drop_memory(self):
            self.calls = 0

    made = park(Graphed())
    made.prepare(**CELL, pass_="forward")
    assert host_share(made, monkeypatch) < 0.2


def test_the_host_s_share_is_the_longest_of_the_last_three_calls(park, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(parked_worker, "time", clock)
    # One is ahead, and two seconds are over after four more.
    lasts = iter([0.0, 0.0, 0.1, 0.9, 0.3, 0.6, 0.2])

    def function(x, bias):
        clock.now += next(lasts, 0.0)
        return x + 1

    made = park(function)
    made.prepare(**CELL, pass_="forward")
    assert host_share(made, monkeypatch) == pytest.approx(0.6)


def test_memory_is_that_of_a_call_which_is_no_replay(park):
    seen = []

    class Graphed:
        ahead, graph = 2, None

        def __call__(self, x, bias):
            seen.append(self.graph)
            self.graph = True
            return x + 1

        def drop_memory(self):
            self.graph = None

    park(Graphed()).prepare(**CELL, pass_="forward")
    assert seen == [None, True, None]


def test_a_library_that_no_graph_can_hold_declines(park):
    class Uncaptured:
        ahead, calls = 2, 0

        def __call__(self, x, bias):
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("operation not permitted when stream is capturing")
            return x + 1

    with pytest.raises(statuses.Unsupported, match="not permitted when stream is capturing"):
        park(Uncaptured(), impl="rival").prepare(**CELL, pass_="forward")


def test_tensors_that_a_function_keeps_are_dropped(park):
    class Kept:
        dropped = forgotten = 0
        remarks = ("a graph", "another")

        def __call__(self, x, bias):
            return x + 1

        def drop_memory(self):
            self.dropped += 1

        def forget(self):
            self.forgotten += 1

    function = Kept()
    made = park(function)
    prepared = made.prepare(**CELL, pass_="forward")
    assert prepared.remark == f"{parked_worker.REMARK}; {SUSTAINED}; a graph; another"
    made.block(3)
    assert function.dropped == 3 and function.forgotten == 1
    made.release()
    assert function.forgotten == 2


def test_a_library_that_declines_says_so(park):
    def function(x, bias):
        raise ValueError("no such shape")

    with pytest.raises(statuses.Unsupported, match="no such shape"):
        park(function, impl="rival").prepare(**CELL, pass_="forward")


def test_a_sample_is_small_and_its_own_memory(monkeypatch):
    monkeypatch.setattr(parked_worker, "SAMPLE", 4)
    x = torch.arange(17.0).view(17, 1)
    (few,) = sampled([x])
    assert few.tolist() == [0, 4, 8, 12, 16]
    x.zero_()
    assert few[1] == 4
    (scalar,) = sampled([torch.tensor(3.0)])
    assert scalar.tolist() == [3]

"""Check the loops of the timer without a GPU: their order, and the clock that counts."""

import contextlib
import time
import types

import pytest
import torch

from harness.machine import energy, nvml
from harness.machine import timer as timing
from harness.machine.timer import HEAD_START, SLACK, Timer
from tests.support.patience import wait_until

POWER_W = 300.0


class Event:
    """Imitate an event of a GPU that does everything at once."""

    def __init__(self, enable_timing):
        self.at = 0.0

    def record(self):
        self.at = timing.time.perf_counter()

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


class FakeSampler:
    """Imitate a board whose energy counter stands still."""

    def energy_mj(self):
        return 0

    def sample(self):
        return {"sm_mhz": 1980, "temp_c": 40, "power_w": 300.0, "throttle": ""}


@pytest.fixture
def timer(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    made = object.__new__(Timer)
    made.stream = types.SimpleNamespace(synchronize=lambda: None)
    made._sampler, made._flush_s, made.log = FakeSampler(), 1e-3, []
    made._flush = types.SimpleNamespace(zero_=lambda: made.log.append("flush"))
    return made


def test_without_a_counter_no_call_is_made_for_energy(timer):
    timer._sampler = types.SimpleNamespace(energy_mj=lambda: None)
    assert timer.energy([lambda: timer.log.append("call")], 200) == (None, None)
    assert not timer.log


def test_a_call_that_fails_ends_the_loop(timer):
    calls = iter([None] * 4)
    with pytest.raises(StopIteration):
        timer.energy([lambda: next(calls)], 10)


def test_inputs_rotate_and_each_call_follows_a_flush(timer):
    calls = [lambda name=name: timer.log.append(name) for name in "ab"]
    _, reading = timer.cold(calls, 4)
    assert timer.log == ["a", *["flush"] * HEAD_START, *["flush", "a", "flush", "b"] * 2]
    assert reading == {"sm_mhz": 1980, "temp_c": 40, "power_w": 300.0, "throttle": ""}


def test_the_step_before_a_call_comes_before_its_flush(timer):
    calls = [lambda name=name: timer.log.append(name) for name in "ab"]
    before = [lambda name=name: timer.log.append(name) for name in "AB"]
    timer.cold(calls, 2, before)
    # The host time of a call includes the step before it.
    first = ["A", "a", *["flush"] * HEAD_START]
    assert timer.log == [*first, "A", "flush", "a", "B", "flush", "b"]


def test_a_slow_host_gets_as_many_flushes_as_hide_it(timer):
    def call():
        timer.log.append("call")
        time.sleep(2.2e-3)

    timer.cold([call], 2)
    assert timer.log[:2] == ["call", "call"]
    between = timer.log.index("call", 2) - 2 - HEAD_START
    assert between >= 3 and timer.log[-between - 1 :] == [*["flush"] * between, "call"]


def test_known_host_time_takes_no_call_to_find(timer):
    calls = [lambda: timer.log.append("call")]
    timer.cold(calls, 1, host_s=2.2e-3)
    assert timer.log == [*["flush"] * (HEAD_START + 1 + int(SLACK * 2.2)), "call"]


@pytest.fixture
def clock(timer, monkeypatch):
    """A clock that a test moves, and that each flush moves by a second."""
    clock = types.SimpleNamespace(seconds=0.0)

    def move(seconds):
        clock.seconds += seconds

    clock.move = move
    hands = types.SimpleNamespace(perf_counter=lambda: clock.seconds, sleep=move)
    monkeypatch.setattr(timing, "time", hands)
    timer._flush.zero_ = lambda: move(1.0)
    return clock


def test_a_time_is_the_median_of_the_calls_without_their_flushes(timer, clock):
    # The first call measures the cost of submission; one call is delayed by another program.
    lasts_us = iter([1, 10, 30, 20, 9000, 20])
    calls = [lambda: clock.move(next(lasts_us) / 1e6)]
    assert timer.cold(calls, 5)[0] == pytest.approx(20)


def test_a_call_is_what_a_batch_takes_until_the_gpu_has_done_it(timer, clock):
    queue = types.SimpleNamespace(seconds=7.0)

    def call(name):
        timer.log.append(name)
        clock.move(2e-6)
        queue.seconds += 8e-6

    def synchronize():
        timer.log.append("wait")
        clock.move(queue.seconds)
        queue.seconds = 0.0

    timer.stream.synchronize = synchronize
    assert timer.eager([lambda: call("a"), lambda: call("b")], 4) == pytest.approx(10)
    assert timer.log == ["wait", "a", "b", "a", "b", "wait"]


@pytest.mark.parametrize(
    ("call_us", "timed"),
    [(10, 100), (45, 100), (110, 45), (400, 12), (600, 10), (10_000, 10)],
)
def test_slow_calls_are_timed_for_five_milliseconds_and_a_tenth_of_them_at_least(
    timer, clock, call_us, timed
):
    called = []

    def call():
        called.append(clock.seconds)
        clock.move(call_us / 1e6)

    assert timer.eager([call], 100) == pytest.approx(call_us)
    assert len(called) == 10 + timed


def test_calls_before_the_timed_ones_do_not_count(timer, clock):
    lasts_us = iter([*[1000] * 10, *[200] * 10])
    assert timer.eager([lambda: clock.move(next(lasts_us) / 1e6)], 100) == pytest.approx(200)


def test_energy_is_power_times_the_time_of_a_call(timer, clock, monkeypatch):
    """Another thread moves the counter while the calls go on."""

    def edges(read, now, window_s):
        assert (read, window_s) == (timer._sampler.energy_mj, 0.06)
        wait_until(lambda: now() > 1.0)
        return [energy.Edge(at, 0.0, int(POWER_W * at * 1e3)) for at in (0.3, 0.4, 0.6, 0.7, 0.9)]

    monkeypatch.setattr(timing.energy, "edges", edges)
    calls = [lambda: clock.move(1e-4), lambda: clock.move(3e-4)]
    value, half_width = timer.energy(calls, 60)
    assert value == pytest.approx(POWER_W * 2e-4 * 1e6, rel=0.01) and half_width < 0.05 * value


def sample(sm_mhz, temp_c=40, power_w=300.0, throttle=""):
    return {"sm_mhz": sm_mhz, "temp_c": temp_c, "power_w": power_w, "throttle": throttle}


def test_a_digest_keeps_every_event_of_the_block():
    found = nvml.digest(
        [
            sample(1980),
            sample(1200, 71, 700.0, "power cap; thermal slowdown"),
            sample(1755, 50, 500.0, "power cap"),
        ]
    )
    assert found == sample(1755, 71, 500.0, "power cap; thermal slowdown")
    assert nvml.slowed(found["throttle"])


SLOWED = {
    "power cap": False,
    "hardware slowdown": True,
    "thermal slowdown": True,
    "hardware thermal slowdown": True,
    "power brake": True,
    "sync boost": False,
    "application clocks": False,
}


def test_heat_and_hardware_slow_a_block_and_settings_do_not():
    assert {event: nvml.slowed(event) for event in nvml.EVENTS.values()} == SLOWED
    assert nvml.slowed("power cap; power brake") and not nvml.slowed("")


def test_a_digest_of_what_is_not_known_is_empty():
    assert nvml.digest([{}, {}]) == {}
    unknown = sample(None, None, None)
    assert nvml.digest([unknown]) == unknown
    assert nvml.digest([unknown, sample(1980)]) == sample(1980)


@pytest.mark.parametrize("ends", [True, False])
def test_a_capture_that_cuda_does_not_end_is_ended_for_the_allocator(timer, monkeypatch, ends):
    capturing = set()

    class Graph:
        def __init__(self, graph, pool, stream):
            self.pool = pool

        def __enter__(self):
            capturing.add(self.pool)

        def __exit__(self, *error):
            if not ends:
                raise RuntimeError("the capture is invalid")
            capturing.remove(self.pool)

    def end(device, pool):
        if pool not in capturing:
            raise RuntimeError("not capturing")
        capturing.remove(pool)

    def release(device, pool):
        timer.log.append(pool)

    def failing():
        raise ValueError("reads a number of the GPU")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release)
    timer._broken = []
    with pytest.raises(ValueError, match="reads a number"):
        timer.capture(failing)
    assert not capturing
    # PyTorch frees the memory of a capture that ended well, and does so only once.
    assert timer.log == ([] if ends else [(0, 7)])
    assert len(timer._broken) == (not ends)

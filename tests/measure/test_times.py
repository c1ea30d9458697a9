"""Check the timed calls: each pass alone, replays for GPU time, eager calls for host time."""

import os

import pytest

from harness import status
from harness.measure import worker
from tests.support.cpu_worker import CELL, Timer, cell, noting_square


def test_a_backward_pass_is_timed_without_a_forward_pass(make):
    calls = []
    square = noting_square(calls, {})
    cell(make(lambda x, bias: square(x)), "backward")
    # One forward pass for each copy of the inputs comes before the capture.
    assert [index for index, name in enumerate(calls) if name == "forward"] == [0, 3, 6]
    assert calls.count("backward") > 3 * worker.COPIES


def test_replays_have_the_time_of_the_gpu_and_eager_calls_that_of_the_host(make, monkeypatch):
    given = {}

    def cold(self, calls, count, before):
        given["cold"], given["cores"] = calls, os.sched_getaffinity(0)
        return 3.0, {"sm_mhz": 1980}

    def eager(self, calls, count):
        given["eager"] = calls
        assert given["cores"] == os.sched_getaffinity(0)
        return 7.0

    monkeypatch.setattr(Timer, "cold", cold)
    monkeypatch.setattr(Timer, "eager", eager)
    made = make(lambda x, bias: x + 1)
    made.prepare(**CELL, pass_="forward")
    allowed = sorted(os.sched_getaffinity(0))
    answer = made.block(4, turn=3)
    assert (answer.device_us, answer.call_us, answer.sm_mhz) == (3.0, 7.0, 1980)
    assert given["cores"] == {allowed[3 % len(allowed)]}
    # A replay returns nothing; an eager call returns its result.
    assert [call() for call in given["cold"]] == [None] * worker.COPIES
    assert [call()[0].shape for call in given["eager"]] == [(64,)] * worker.COPIES


@pytest.mark.parametrize("spoilt", range(worker.COPIES))
def test_the_timed_calls_on_all_inputs_are_checked_not_only_the_last(make, spoilt):
    seen, calls = [], iter(range(10**6))

    def function(x, bias):
        if x.data_ptr() not in seen:
            seen.append(x.data_ptr())
        # Two calls and a capture for each copy of the inputs come before the clock.
        timed = next(calls) >= 3 * worker.COPIES
        return x + 1 + (timed and seen.index(x.data_ptr()) == spoilt)

    made = make(function)
    made.prepare(**CELL, pass_="forward")
    made.block(2 * worker.COPIES)
    with pytest.raises(status.Inaccurate, match="a timed call"):
        made.check()

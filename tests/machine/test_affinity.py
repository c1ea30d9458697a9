"""Check the pinning of threads to cores while the host time of a call is measured."""

import os
import threading

import pytest

from harness.machine import affinity

ALLOWED = sorted(os.sched_getaffinity(0))


class Waiting(threading.Thread):
    """Waits until it is told to end."""

    def __init__(self):
        super().__init__()
        self.leave = threading.Event()
        self.start()

    def run(self):
        self.leave.wait()

    def end(self):
        self.leave.set()
        self.join()

    @property
    def cores(self):
        return os.sched_getaffinity(self.native_id)


@pytest.fixture
def thread():
    waiting = Waiting()
    yield waiting
    waiting.end()


@pytest.mark.parametrize("turn", range(5))
def test_the_caller_has_one_core_and_its_other_threads_the_next(thread, turn):
    with affinity.held(turn):
        assert os.sched_getaffinity(0) == {ALLOWED[turn % len(ALLOWED)]}
        assert thread.cores == {ALLOWED[(turn + 1) % len(ALLOWED)]}
    assert os.sched_getaffinity(0) == thread.cores == set(ALLOWED)


def test_each_thread_gets_back_what_it_had(thread):
    os.sched_setaffinity(thread.native_id, ALLOWED[:1])
    with pytest.raises(KeyError), affinity.held(0):
        raise KeyError
    assert thread.cores == {ALLOWED[0]}
    assert os.sched_getaffinity(0) == set(ALLOWED)


def test_threads_may_begin_and_end_meanwhile(thread):
    with affinity.held(0):
        thread.end()
        late = Waiting()
    assert late.cores == set(ALLOWED)
    late.end()


def test_calls_are_made_even_if_no_thread_may_be_bound(monkeypatch):
    def forbid(thread, mask):
        raise PermissionError

    assert affinity.count() == len(ALLOWED)
    monkeypatch.setattr(os, "sched_setaffinity", forbid)
    with affinity.held(1):
        assert os.sched_getaffinity(0) == set(ALLOWED)
    assert affinity.count() == 0


def test_a_thread_that_ended_while_it_was_bound_is_no_error(monkeypatch):
    ended = Waiting()
    ended.end()
    monkeypatch.setattr(affinity, "_threads", lambda: [threading.get_native_id(), ended.native_id])
    with affinity.held(1):
        pass
    assert os.sched_getaffinity(0) == set(ALLOWED)

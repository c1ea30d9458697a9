"""Check that a block waits for a dead worker's memory, and that a leak costs a worker."""

import threading

import pytest

from harness.cli import UserError
from harness.workers import gpu_memory
from harness.workers.gpu_memory import KEPT_BYTES, TOLERANCE_BYTES, Memory

GIB = 2**30


class Gpu:
    """Imitate a reading of the memory in use, and count how often it was asked for."""

    def __init__(self, used):
        self.used, self.asked = used, 0

    def __call__(self):
        self.asked += 1
        return self.used


@pytest.fixture
def gpu():
    """Two workers with a context of 1 GiB each; for the cell, a holds 2 GiB and b holds 4."""
    return Gpu(2 * GIB)


@pytest.fixture
def ready(gpu, monkeypatch):
    monkeypatch.setattr(gpu_memory, "LIMIT_S", 0.3)
    found = Memory(gpu, set)
    found.idle()
    found.holds("a", 2 * GIB)
    found.holds("b", 4 * GIB)
    gpu.used = 8 * GIB
    found.ready()
    return found


def test_nothing_is_asked_while_all_workers_live(ready, gpu):
    asked = gpu.asked
    ready.settle()
    assert gpu.asked == asked


def test_memory_that_comes_back_is_waited_for(ready, gpu):
    ready.lost("b", None)
    timer = threading.Timer(0.1, lambda: setattr(gpu, "used", 4 * GIB))
    timer.start()
    ready.settle()
    assert gpu.used == 4 * GIB
    timer.join()


def test_memory_that_does_not_come_back_ends_the_job(ready):
    ready.lost("b", None)
    with pytest.raises(UserError, match=r"^b: ended, but 3584 MiB .* finished cells are kept$"):
        ready.settle()


@pytest.mark.parametrize(("beyond", "waits"), [(0, False), (1, True)])
def test_a_little_may_remain(ready, gpu, beyond, waits):
    ready.lost("b", None)
    gpu.used = 4 * GIB + 2 * TOLERANCE_BYTES + beyond
    if not waits:
        return ready.settle()
    with pytest.raises(UserError):
        ready.settle()


def test_the_memory_of_both_dead_workers_must_come_back(ready, gpu):
    ready.lost("a", None)
    ready.lost("b", None)
    gpu.used = 4 * GIB
    with pytest.raises(UserError, match=r"^a, b: ended"):
        ready.settle()
    gpu.used = 2 * GIB
    ready.settle()


def test_a_worker_that_died_while_preparing_leaves_the_memory_of_the_others(gpu, monkeypatch):
    monkeypatch.setattr(gpu_memory, "LIMIT_S", 0.1)
    found = Memory(gpu, set)
    found.idle()
    found.holds("a", 2 * GIB)
    found.lost("b", None)
    gpu.used = 7 * GIB
    with pytest.raises(UserError, match=r"^b: "):
        found.settle()
    gpu.used = 4 * GIB
    found.settle()


def test_a_living_worker_that_released_is_not_waited_for(ready, gpu):
    asked = gpu.asked
    ready.released("b")
    ready.settle()
    assert gpu.asked == asked
    # The memory that b gave back counts when a dies.
    ready.lost("a", None)
    with pytest.raises(UserError, match=r"^a: ended, but 5888 MiB"):
        ready.settle()


def test_survivors_may_grow_from_round_to_round(ready, gpu):
    gpu.used = 11 * GIB
    ready.ready()
    ready.lost("b", None)
    gpu.used = 7 * GIB
    ready.settle()


def test_a_driver_that_does_not_tell_is_no_obstacle(ready, gpu):
    ready.lost("b", None)
    gpu.used = None
    ready.settle()
    unknown = Memory(lambda: None, set)
    unknown.idle()
    unknown.ready()
    unknown.lost("a", None)
    unknown.settle()


def test_a_leak_is_what_others_do_not_keep():
    found = Memory(lambda: None, set)
    assert not found.leaks(200 << 20)
    assert not found.leaks((200 << 20) + KEPT_BYTES)
    assert found.leaks((200 << 20) + KEPT_BYTES + 1)
    assert not found.leaks(100 << 20)
    assert found.leaks((200 << 20) + KEPT_BYTES)


def test_a_process_that_was_listed_is_gone_when_it_is_no_longer_listed(gpu, monkeypatch):
    monkeypatch.setattr(gpu_memory, "LIMIT_S", 0.1)
    users = {7, 8}
    found = Memory(gpu, lambda: users)
    found.idle()
    found.lost("a", 7)
    with pytest.raises(UserError, match=r"^a: ended, but all bytes of process 7 of GPU memory"):
        found.settle()
    users.remove(7)
    # Memory that the survivors take meanwhile does not count.
    gpu.used = 100 * GIB
    found.settle()

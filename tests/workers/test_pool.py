"""Check how a parent waits for the first of several workers."""

import time

import pytest

from harness.measure.messages import Prepare, Prepared
from harness.workers.pool import WorkerPool
from tests.support.measuring import WORKER
from tests.support.patience import PATIENCE_S

CELL = Prepare("M1", "bfloat16", "forward")


@pytest.fixture
def asked():
    """Start workers of these names and send each a request; return the pool and the times."""
    pools = []

    def start(*names):
        pools.append(WorkerPool("scale", 0, WORKER))
        pools[-1].start(names)
        for name in names:
            pools[-1].send(name, CELL)
        return pools[-1], dict.fromkeys(names, time.monotonic())

    yield start
    for pool in pools:
        pool.__exit__()


def test_a_worker_that_answers_does_not_wait_for_one_that_hangs(asked):
    pool, began = asked("hangs_at_once", "fast")
    (answer,) = pool.first_answers(began, PATIENCE_S).items()
    assert answer[0] == "fast" and isinstance(answer[1], Prepared)


def test_a_worker_that_died_has_answered(asked):
    pool, began = asked("hangs_at_once", "segfaults_at_once")
    ((name, answer),) = pool.first_answers(began, PATIENCE_S).items()
    assert (name, answer.status, answer.reason) == (
        "segfaults_at_once",
        "crashed",
        "died by SIGSEGV",
    )


def test_the_one_asked_first_runs_out_of_time_first(asked):
    pool, began = asked("hangs_at_once", "hangs_at_once#1")
    began["hangs_at_once#1"] -= 2 * PATIENCE_S
    ((name, answer),) = pool.first_answers(began, PATIENCE_S).items()
    assert (name, answer.status) == ("hangs_at_once#1", "hung")

"""Check that a tuner of Triton's compiles one candidate in each call beforehand."""

import pytest
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

from harness.measure import candidates
from harness.measure.messages import Compiled
from harness.measure.tuning_worker import TuningWorker
from harness.status import Unsupported
from tests.support.cpu_worker import CELL


class Kernel:
    """Stands for a kernel, and notes with how many warps it runs."""

    def __init__(self):
        self.ran = []
        self.unfit = set()

    def fn(self):
        pass

    def run(self, n, num_warps, **_):
        if num_warps in self.unfit:
            raise OutOfResources(2, 1, "registers")
        self.ran.append(num_warps)


@pytest.fixture
def tuner(monkeypatch):
    """Return a function that makes a tuner of a Kernel with these numbers of warps."""
    monkeypatch.delenv("TRITON_CACHE_AUTOTUNING", raising=False)

    def make(*warps):
        kernel = Kernel()
        kernel.fn = Kernel.fn
        configs = [triton.Config({}, num_warps=each) for each in warps]
        chosen = {"key": ["n"], "do_bench": lambda call, quantiles: [call() or 1.0] * 3}
        return Autotuner(kernel, ["n"], configs, reset_to_zero=None, restore_value=None, **chosen)

    return make


@pytest.mark.parametrize(("candidate", "warps"), [(None, 8), (0, 1), (1, 4), (2, 8), (7, 8)])
def test_a_tuner_meets_one_candidate(tuner, candidate, warps):
    made = tuner(1, 4, 8)
    with candidates.only(candidate) as counts:
        made.run(n=3)
        made.run(n=3)
    # Tried once, and then called twice.
    assert made.fn.ran == [warps] * 3
    assert counts == [3]


def test_an_earlier_choice_does_not_count_and_none_of_these_stays_in_the_way(tuner):
    made = tuner(1, 4, 8)
    for candidate in (0, 1):
        with candidates.only(candidate):
            made.run(n=3)
    assert made.fn.ran == [1, 1, 4, 4]
    made.fn.ran.clear()
    made.run(n=3)
    assert made.fn.ran == [1, 4, 8, 1]


@pytest.mark.parametrize(("candidate", "warps"), [(None, 1), (0, 1), (1, 1)])
def test_the_next_candidate_takes_the_place_of_one_that_does_not_fit(tuner, candidate, warps):
    """Else the tuners after it would not be met."""
    made, after = tuner(1, 4, 8), tuner(2, 4, 8)
    made.fn.unfit = {4, 8}
    with candidates.only(candidate) as counts:
        made.run(n=3)
        after.run(n=3)
    assert made.fn.ran == [warps] * 2
    assert after.fn.ran == [{None: 8, 0: 2, 1: 4}[candidate]] * 2
    assert set(counts) == {3}


def test_a_tuner_without_a_candidate_that_fits_raises(tuner):
    made = tuner(1, 4)
    made.fn.unfit = {1, 4}
    with pytest.raises(OutOfResources), candidates.only(0):
        made.run(n=3)


def test_the_tuners_are_as_before_after_a_failure(tuner):
    before = Autotuner.run, Autotuner.prune_configs
    with pytest.raises(ZeroDivisionError), candidates.only(0):
        raise ZeroDivisionError
    assert before == (Autotuner.run, Autotuner.prune_configs)


@pytest.mark.parametrize(
    ("pass_", "ran", "count"), [("forward", [1], 2), ("backward", [4], 1), ("both", [4, 1], 2)]
)
def test_a_worker_compiles_a_cell_by_one_call_and_counts_the_candidates(
    make, tuner, pass_, ran, count
):
    made, calls = tuner(1, 4), []

    def doubled(x, bias):
        calls.append(pass_)
        made.run(n=3)
        return 2 * x

    worker = make(doubled, passes=("forward", "backward", "both"), kind=TuningWorker)
    assert worker.compile(**CELL, pass_=pass_, candidate=0) == Compiled(count)
    # A backward pass has its forward pass before it; "both" has one to know its outputs. Both have
    # the last candidate in it, which the calls of the forward pass compile first.
    assert len(calls) == (2 if pass_ == "both" else 1)
    assert list(dict.fromkeys(made.fn.ran)) == ran


def test_a_cell_without_a_tuner_has_one_candidate(make):
    worker = make(lambda x, bias: x + 1, kind=TuningWorker)
    assert worker.compile(**CELL, pass_="forward", candidate=None) == Compiled(1)


def test_a_library_that_raises_declines_the_cell(make, monkeypatch):
    """So its process goes on with other cells."""
    monkeypatch.setattr("harness.calls.context.alive", lambda: True)

    def declines(x, bias):
        raise ValueError("only even sizes")

    worker = make(declines, impl="rival", kind=TuningWorker)
    with pytest.raises(Unsupported, match="only even sizes"):
        worker.compile(**CELL, pass_="forward", candidate=None)

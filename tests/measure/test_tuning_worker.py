"""Check that the worker compiles one candidate of a tuner of Triton's in each call beforehand."""

import pytest

from harness.measure.messages import Compiled
from harness.measure.tuning_worker import TuningWorker
from harness.status import Unsupported
from tests.support.cpu_worker import CELL
from tests.support.tuners import tuner


@pytest.mark.parametrize(
    ("pass_", "ran", "count"), [("forward", [1], 2), ("backward", [4], 1), ("both", [4, 1], 2)]
)
def test_a_worker_compiles_a_cell_by_one_call_and_counts_the_candidates(make, pass_, ran, count):
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

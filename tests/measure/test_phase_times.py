"""Check the line of the log that says how long each phase of a cell took."""

from harness.measure.phase_times import PhaseTimes
from harness.workers.messages import Done, Failure


def test_the_slowest_of_those_that_are_waited_for_together_is_named(monkeypatch):
    clock = iter([100.0, 103.14])
    monkeypatch.setattr("harness.measure.phase_times.time.monotonic", lambda: next(clock))
    times = PhaseTimes()
    times.add("prepare", 0.9, {"ours": Done(spent_s=0.1), "rival": Done(spent_s=0.8)})
    times.add("block", 0.5, {"ours": Done(spent_s=0.5)})
    times.add("block", 1.1, {"rival": Done(spent_s=1.1)})
    # A killed worker has not reported its time.
    times.add(
        "prepare", 0.2, {"lost": Failure("hung", "no answer within 9 s"), "ours": Done(spent_s=0.2)}
    )
    assert str(times) == "3.1 s: prepare 1.1 (rival 0.8), block 1.6, rest 0.4"

"""Check the line of the log that says how long each phase of a cell took."""

from harness.measure.phase_times import Stages


def test_the_slowest_of_those_that_are_waited_for_together_is_named(monkeypatch):
    clock = iter([100.0, 103.14])
    monkeypatch.setattr("harness.measure.phase_times.time.monotonic", lambda: next(clock))
    stages = Stages()
    stages.add("prepare", 0.9, {"ours": {"spent_s": 0.1}, "rival": {"spent_s": 0.8}})
    stages.add("block", 0.5, {"ours": {"spent_s": 0.5}})
    stages.add("block", 1.1, {"rival": {"spent_s": 1.1}})
    # A killed worker has not reported its time.
    stages.add("prepare", 0.2, {"lost": {}, "ours": {"spent_s": 0.2}})
    assert str(stages) == "3.1 s: prepare 1.1 (rival 0.8), block 1.6, rest 0.4"

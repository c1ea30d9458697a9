"""Steps from a rest on: what is read of each, and when."""

import types

import pytest

from harness.measure.dissect import power
from harness.measure.dissect.steps import Steps
from tests.support.dissected import written


class Board:
    """A GPU whose step takes 0.25 s and 150 J; its events and its sensors agree."""

    def __init__(self):
        self.log, self.begun, self.done = [], 0, 0

    def step(self):
        self.begun += 1
        self.log.append(f"begin {self.begun}")

    def mark(self, gpu):
        return self.begun

    def reached(self, mark, gpu):
        self.done = mark
        self.log.append(f"wait {mark}")

    def seconds(self, begin, end, gpu):
        return 0.25 * (end - begin)

    def sample(self):
        return {"sm_mhz": 1980 - 10 * self.done}

    def energy_mj(self):
        return 150_000 * self.done


@pytest.fixture
def board(monkeypatch):
    made = Board()
    for name, value in (("_mark", made.mark), ("_reached", made.reached)):
        monkeypatch.setattr(power, name, value)
    monkeypatch.setattr(power, "_seconds", made.seconds)
    monkeypatch.setattr(power.nvml, "NvmlSampler", lambda: made)
    monkeypatch.setattr(power.time, "sleep", lambda seconds: made.log.append(f"rest {seconds:g}"))
    monkeypatch.setattr(power, "release", lambda gpu: None)
    return made


def stepping(board):
    steps = types.SimpleNamespace(about={"preset": "tiny"}, gpu=True)
    steps.fit, steps.step = lambda name: name, lambda used: board.step
    return steps


def test_each_step_has_its_time_and_the_energy_since_the_first_began(board):
    rows = list(power.step_power(stepping(board), ["ours"], 3))
    assert [row["call"] for row in rows] == [0, 1, 2]
    assert [row["us"] for row in rows] == [250_000] * 3
    assert [row["at_s"] for row in rows] == [0.25, 0.5, 0.75]
    # The two steps before the rest do not count.
    assert [row["energy_j"] for row in rows] == [150, 300, 450]
    assert [row["sm_mhz"] for row in rows] == [1950, 1940, 1930]


def test_the_next_step_runs_while_sensors_are_read(board):
    list(power.step_power(stepping(board), ["ours"], 3))
    before, rest, *after = board.log[2:]
    assert (before, rest) == ("wait 2", "rest 5")
    assert after == ["begin 3", "begin 4", "wait 3", "begin 5", "wait 4", "wait 5"]


def test_without_a_counter_there_is_no_energy(board):
    board.energy_mj = lambda: None
    rows = list(power.step_power(stepping(board), ["ours"], 2))
    assert [row["energy_j"] for row in rows] == [None, None]


def test_a_stack_that_fails_is_a_row_and_the_next_goes_on(board):
    steps = stepping(board)

    def fit(name):
        if name == "narrow":
            raise ValueError("head dimensions 64 and 128 only")
        return name

    steps.fit = fit
    rows = list(power.step_power(steps, ["narrow", "ours"], 2))
    assert [row["status"] for row in rows] == ["unsupported", "ok", "ok"]


def test_steps_on_a_cpu_have_times_alone(tmp_path):
    steps = Steps("tiny", 2, 12, "float32", gpu=False)
    rows = written(tmp_path, "step_power", power.step_power(steps, ["torch_eager"], 3))
    assert (rows["us"] > 0).all() and rows["at_s"].is_monotonic_increasing
    assert rows["energy_j"].isna().all() and rows["sm_mhz"].isna().all()

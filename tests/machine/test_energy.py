"""Check energy readings: a counter of known period, power and resolution gives the known energy."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.machine import energy

WINDOW_S = 0.2


class Counter:
    """Imitate a board's energy counter on a clock of its own, which only readings move.

    power_w: power in W as a function of time. delay: seconds of one reading, drawn anew for each.
    The counter moves once a period, to the energy so far in whole mJ.
    """

    def __init__(self, power_w, period_s, delay, phase=0.0):
        self.now, self._power_w, self._delay = 100.0, power_w, delay
        self._period_s, self._phase, self._moves, self._joules = period_s, phase, 0, 1234.5678

    def clock(self):
        return self.now

    def read(self):
        delay = self._delay()
        self.now += delay / 2
        moves = int((self.now - 100.0) / self._period_s + self._phase)
        for move in range(self._moves, moves):
            self._joules += self._power_w(move) * self._period_s
        self._moves = moves
        self.now += delay / 2
        return int(self._joules * 1e3)


@settings(deadline=None)
@given(
    power_w=st.floats(60, 1200),
    period_ms=st.floats(10, 150),
    call_us=st.floats(2, 200_000),
    delay_ms=st.floats(0.05, 6),
    phase=st.floats(0, 0.999),
    seed=st.integers(0, 2**32),
)
def test_the_energy_of_a_steady_load_lies_within_its_interval(
    power_w, period_ms, call_us, delay_ms, phase, seed
):
    draw = random.Random(seed)
    counter = Counter(
        lambda move: power_w,
        period_ms / 1e3,
        lambda: delay_ms / 1e3 * draw.uniform(0.5, 1.5),
        phase,
    )
    found = energy.edges(counter.read, counter.clock, WINDOW_S)
    value, half_width = energy.per_call(found, lambda at: (at - 100.0) / call_us * 1e6)
    assert abs(value - power_w * call_us) <= half_width * 1.0001 + 1e-9
    span = found[-1].at - found[0].at
    assert len(found) > energy.FEWEST_STEPS and span > WINDOW_S - 2 * delay_ms / 1e3 * 1.5 - 1e-9
    assert found[0].at - 100.0 > energy.SETTLE_S


def test_power_that_fluctuates_is_covered_at_the_stated_rate():
    covered = 0
    for seed in range(200):
        draw = random.Random(seed)
        counter = Counter(
            lambda move, draw=draw: draw.gauss(500, 25),
            0.1,
            lambda draw=draw: draw.uniform(2e-3, 4e-3),
            draw.random(),
        )
        found = energy.edges(counter.read, counter.clock, WINDOW_S)
        value, half_width = energy.per_call(found, lambda at: (at - 100.0) / 20e-6)
        covered += abs(value - 500 * 20) <= half_width
        assert half_width < value
    assert covered >= 0.95 * 200


def test_a_late_sensor_and_the_load_before_do_not_count():
    counter = Counter(lambda move: 100 if move < 1 else 400, 0.05, lambda: 1e-3)
    found = energy.edges(counter.read, counter.clock, WINDOW_S)
    value, half_width = energy.per_call(found, lambda at: (at - 100.0) / 1e-3)
    assert value == pytest.approx(400e3, rel=0.02) and half_width < 0.05 * value


def test_more_steps_narrow_the_interval():
    widths = []
    for window_s in (0.2, 2.0):
        draw = random.Random(7)
        counter = Counter(
            lambda move, draw=draw: draw.gauss(500, 25), 0.1, lambda: 3e-3, draw.random()
        )
        found = energy.edges(counter.read, counter.clock, window_s)
        widths.append(energy.per_call(found, lambda at: at / 20e-6)[1])
    assert widths[1] < widths[0] / 2


@pytest.mark.parametrize("period_s", [0.6, 1e9])
def test_a_counter_that_hardly_moves_tells_nothing(period_s):
    counter = Counter(lambda move: 300, period_s, lambda: 3e-3)
    found = energy.edges(counter.read, counter.clock, WINDOW_S)
    assert len(found) <= energy.FEWEST_STEPS
    assert energy.per_call(found, lambda at: at) == (None, None)
    assert counter.now - 100.0 < WINDOW_S + energy.LIMIT_S + 0.02


def test_an_absent_counter_has_no_moves():
    assert energy.edges(lambda: None, lambda: 0.0, WINDOW_S) == []


def test_a_counter_that_fails_later_ends_the_watch():
    readings, ticks = iter([1, 1, 2, None]), iter(range(100))
    found = energy.edges(lambda: next(readings), lambda: next(ticks) / 10, WINDOW_S)
    assert [edge.energy_mj for edge in found] == [2]


def test_calls_that_never_end_have_no_energy():
    found = [energy.Edge(0.1 * k, 0.001, 1000 * k) for k in range(6)]
    assert energy.per_call(found, lambda at: 7.0) == (None, None)

"""The floor of a call, and the times that are impossible."""

import dataclasses

import pytest

from harness.results.floor import CACHE_BYTES, FASTEST, Work, floor_us, impossible

LIMITS = {"read": 4000.0, "write": 2000.0, "float32": 50.0}
WORK = Work(4e9, 2e9, 5e10, "float32", "forward")


def test_the_floor_is_the_slower_of_traffic_and_arithmetic():
    assert floor_us(WORK, LIMITS) == (pytest.approx(2000.0), "memory")
    assert floor_us(WORK, LIMITS | {"float32": 5.0}) == (pytest.approx(10000.0), "compute")
    assert floor_us(WORK, {"float32": 50.0}) == (pytest.approx(1000.0), "compute")


@pytest.mark.parametrize("ceilings", [{}, {"read": 4000.0}, {"write": 2000.0}, {"float16": 50.0}])
def test_without_its_ceilings_a_call_has_no_floor(ceilings):
    assert floor_us(WORK, ceilings) == (0.0, "")
    assert impossible(1e-9, WORK, ceilings) == ""


def test_the_cache_spares_writes_and_of_both_passes_reads_too():
    assert floor_us(WORK, LIMITS, 10**9)[0] == pytest.approx(1000.0 + 500.0)
    both = dataclasses.replace(WORK, direction="both")
    assert floor_us(both, LIMITS, 10**9)[0] == pytest.approx(750.0 + 500.0)
    assert floor_us(both, LIMITS, 10**10) == (pytest.approx(1000.0), "compute")


def test_a_time_is_impossible_below_the_share_of_what_the_cache_leaves():
    least, _ = floor_us(WORK, LIMITS, CACHE_BYTES)
    assert least < floor_us(WORK, LIMITS)[0]
    assert impossible(FASTEST * least * 1.0001, WORK, LIMITS) == ""
    assert impossible(FASTEST * least * 0.9999, WORK, LIMITS) == (
        f"faster than the floor of {least:.2f} us"
    )


def test_writes_that_fit_into_the_cache_forbid_no_time():
    small = Work(0, CACHE_BYTES, 0, "float32", "forward")
    assert impossible(1e-3, small, LIMITS) == ""
    more = dataclasses.replace(small, bytes_written=2 * CACHE_BYTES)
    assert impossible(1e-3, more, LIMITS)

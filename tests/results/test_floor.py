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


def test_float32_may_be_three_products_of_tf32():
    fast = {"float32": 50.0, "bfloat16": 600.0}
    assert floor_us(WORK, fast) == (pytest.approx(500.0), "compute")
    assert floor_us(WORK, fast | {"bfloat16": 240.0}) == (pytest.approx(1000.0), "compute")
    assert floor_us(WORK, {"float32": 0.1}) == (pytest.approx(500_000.0), "compute")
    half = dataclasses.replace(WORK, dtype="float16")
    assert floor_us(half, fast | {"float16": 50.0}) == (pytest.approx(1000.0), "compute")


@pytest.mark.parametrize("ceilings", [{}, {"read": 4000.0}, {"write": 2000.0}, {"float16": 50.0}])
def test_without_its_ceilings_a_call_has_no_floor(ceilings):
    assert floor_us(WORK, ceilings) == (0.0, "")
    assert impossible(1e-9, WORK, ceilings) == ""


def test_the_cache_spares_writes_and_of_both_passes_reads_too():
    assert floor_us(WORK, LIMITS, 10**9)[0] == pytest.approx(1000.0 + 500.0)
    both = dataclasses.replace(WORK, pass_="both")
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


def test_the_floor_of_a_few_bytes_or_operations_is_exact():
    ones = {"read": 1.0, "write": 1.0, "float32": 1.0}
    few = Work(0.25, 0.5, 0.0, "float32", "forward")
    assert floor_us(few, ones) == (pytest.approx(0.75e-3, rel=1e-12), "memory")
    assert floor_us(few, ones, 1) == (pytest.approx(0.25e-3, rel=1e-12), "memory")
    assert floor_us(dataclasses.replace(few, pass_="both"), ones, 1) == (0.0, "")
    # As many picoseconds of arithmetic as nanoseconds of memory: the bound is memory.
    level = Work(1.0, 0.0, 1000.0, "float32", "forward")
    assert floor_us(level, ones) == (1e-3, "memory")
    more = dataclasses.replace(level, flops=1000.0005)
    assert floor_us(more, ones) == (pytest.approx(1.0000005e-3, rel=1e-12), "compute")
    less = dataclasses.replace(level, flops=999.5)
    assert floor_us(less, ones) == (1e-3, "memory")

"""Check when the blocks of a cell end: once its interval is narrow, whatever its ratio is."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.measure.stopping import REASONS, Rule, Timing

TIMING = Timing(
    min_blocks=10,
    max_blocks=40,
    interval=0.01,
    cell_cap_s=6.0,
    block_ms=8.0,
    energy_ms=200.0,
    energy_impls=("ours",),
    cell_timeout_s=180.0,
    cell_limit_s=120.0,
    processes=1,
    short_us=0.0,
)
IMPLS = ["ours", "ours_twin", "first", "second"]


def walk(noise, running=IMPLS, seconds_a_block=0.0, factor=1.0, seed=1):
    """Return how many blocks are taken and why they end."""
    rule, draw = Rule(TIMING, IMPLS), random.Random(seed)
    for block in range(1000):
        if why := rule.stop(running, block, block * seconds_a_block):
            return block, why
        for impl in running:
            time_us = 100.0 * (factor if impl == "ours" else 1.0)
            rule.timed(impl, block, time_us * (1 + draw.uniform(-1, 1) * noise.get(impl, 0.0)))
    raise AssertionError("no end")


def test_a_narrow_interval_ends_it_at_once():
    assert walk({}) == (10, "interval")


def test_scatter_asks_for_more_blocks_but_not_for_ever():
    blocks, why = walk({"first": 0.025})
    assert 10 < blocks < 40
    assert why == "interval"
    assert walk({"first": 0.5}) == (40, "blocks")


def test_time_ends_it_after_the_least_number_of_blocks():
    assert walk({"first": 0.5}, seconds_a_block=0.3) == (20, "time")
    assert walk({"first": 0.5}, seconds_a_block=100.0) == (10, "time")


def test_the_first_baseline_decides_and_the_twin_where_there_is_none():
    assert walk({"second": 0.5}) == (10, "interval")
    assert walk({"first": 0.5}, ["ours", "ours_twin", "second"]) == (10, "interval")
    assert walk({"ours_twin": 0.5}) == (10, "interval")
    assert walk({"ours_twin": 0.5}, ["ours", "ours_twin"]) == (40, "blocks")


@pytest.mark.parametrize("running", [["ours"], ["first", "second"], ["ours_twin"]])
def test_nothing_to_compare_takes_the_least_number_of_blocks(running):
    assert walk({"first": 0.5}, running) == (10, "alone")


def test_nothing_to_time_takes_no_block():
    assert walk({}, []) == (0, "lost")


@given(
    noise=st.floats(0.0, 0.1), seed=st.integers(0, 99), factor=st.sampled_from((0.125, 0.5, 2, 8))
)
def test_the_size_of_the_ratio_has_no_say(noise, seed, factor):
    # Powers of two, so that not one bit of the relative width changes.
    scatter = dict.fromkeys(IMPLS, noise)
    assert walk(scatter, seed=seed, factor=factor) == walk(scatter, seed=seed)


def test_every_reason_can_come_about():
    seen = {
        walk({})[1],
        walk({"first": 0.5})[1],
        walk({"first": 0.5}, seconds_a_block=1.0)[1],
        walk({}, ["ours"])[1],
        walk({}, [])[1],
    }
    assert seen == set(REASONS)

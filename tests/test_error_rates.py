"""The verdicts against traces whose answer is known, at the error rates that are stated.

A study is a family of 50 comparisons. Thousands of traces a test; every seed is fixed, so that what
is asserted of a rate is asserted of these studies.
"""

import math

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from harness import judge, statistics
from harness.statistics import Estimate

FAMILY = 50
CELLS = 12
BLOCKS = 10
MOST_BLOCKS = 40
WIDTH = 0.01
RATE = 1 - statistics.CONFIDENCE
AT_MARGIN = math.expm1(statistics.MARGIN)
DISTURBED = {
    "calm": {},
    "noisy": {"noise": 0.02},
    "offsets": {"offset": 0.005},
    "drift": {"drift": 0.03, "offset": 0.002},
    "bursts of ours": {"burst": "ours"},
    "bursts of the twin": {"burst": "twin"},
    "bursts of the rival": {"burst": "rival"},
}


def traces(shape, difference, seed, noise=0.003, offset=0.0, drift=0.0, burst=""):
    """Times of ours, of its twin and of a rival slower by `difference`: arrays (..., blocks).

    noise: relative spread of each block. offset: of each process, the same for all its blocks.
    drift: step of a walk common to all. burst: in whose blocks every tenth takes 30 % longer.
    """
    rng = np.random.default_rng(seed)
    common = np.exp(np.cumsum(rng.normal(0, drift, shape), axis=-1))
    found = []
    for impl in ("ours", "twin", "rival"):
        times = 100 * common * np.exp(rng.normal(0, noise, shape))
        times *= np.exp(rng.normal(0, offset, (*shape[:-1], 1)))
        if impl == burst:
            times = np.where(rng.random(shape) < 0.1, 1.3 * times, times)
        found.append(times)
    ours, twin, rival = found
    return ours, twin, rival * (1 + difference)


def estimate(numerator, denominator, blocks):
    """Log ratios of the first `blocks` of each trace."""
    found = [np.empty(blocks.shape) for _ in Estimate._fields]
    for count in np.unique(blocks):
        these = blocks == count
        part = statistics.log_ratio(numerator[these][:, :count], denominator[these][:, :count])
        for whole, values in zip(found, part, strict=True):
            whole[these] = values
    return Estimate(*found)


def offsets(gaps):
    """The variance between processes from the NEIGHBOURS gaps around each, and its freedom."""
    before = judge.NEIGHBOURS // 2
    windows = []
    for part in gaps:
        line = part.reshape(len(part), -1)
        ring = np.concatenate([line[:, -before:], line, line[:, : before - 1]], axis=1)
        windows.append(sliding_window_view(ring, judge.NEIGHBOURS, axis=1))
    found = statistics.spread(Estimate(*windows))
    return [part.reshape(gaps.value.shape) for part in found]


def until_narrow(ours, rival):
    """How many blocks the stopping rule takes: until the interval is within 1 % of the ratio."""
    blocks = np.full(ours.shape[:-1], MOST_BLOCKS)
    for count in range(MOST_BLOCKS - 1, BLOCKS - 1, -1):
        ratio = statistics.paired_ratio(rival[..., :count], ours[..., :count])
        blocks[(ratio.hi - ratio.lo) / 2 < WIDTH * ratio.value] = count
    return blocks


def decide(ours, twin, rival, stopping=False):
    """Verdicts of studies: (studies, FAMILY, blocks) are cells, a further axis makes claims."""
    blocks = until_narrow(ours, rival) if stopping else np.full(ours.shape[:-1], ours.shape[-1])
    gaps, logs = estimate(twin, ours, blocks), estimate(rival, ours, blocks)
    variance, freedom = offsets(gaps)
    if ours.ndim == 4:
        gaps, logs = statistics.mean(gaps), statistics.mean(logs)
        variance, freedom = variance.mean(axis=-1) / ours.shape[2], freedom.mean(axis=-1)
    logs, noise = statistics.plus(logs, variance, freedom), statistics.reach(gaps)
    p_holm = statistics.holm(statistics.p_value(logs, noise))
    return statistics.verdicts(logs.value, noise, p_holm)


def cells(studies, blocks=BLOCKS):
    return studies, FAMILY, blocks


def families(found, *verdicts):
    """The share of families in which any member has one of the verdicts."""
    return np.isin(found, verdicts).any(axis=-1).mean()


def at_most(rate, studies):
    """A rate and two standard errors of its estimate from this many studies."""
    return rate + 2 * math.sqrt(rate * (1 - rate) / studies)


@pytest.mark.parametrize("stopping", [False, True], ids=["fixed", "stopping"])
@pytest.mark.parametrize("name", DISTURBED)
def test_equal_cells_are_not_called_different(name, stopping):
    shape = cells(200, MOST_BLOCKS if stopping else BLOCKS)
    found = decide(*traces(shape, 0.0, seed=1, **DISTURBED[name]), stopping=stopping)
    assert families(found, "better", "worse") <= RATE


@pytest.mark.parametrize("name", ["calm", "noisy", "offsets", "drift"])
def test_equal_claims_are_not_called_different(name):
    found = decide(*traces((60, FAMILY, CELLS, BLOCKS), 0.0, seed=2, **DISTURBED[name]))
    assert families(found, "better", "worse") <= RATE


@pytest.mark.parametrize("stopping", [False, True], ids=["fixed", "stopping"])
@pytest.mark.parametrize("name", ["calm", "noisy", "offsets", "drift"])
def test_a_difference_at_the_margin_is_called_neither_way(name, stopping):
    shape = cells(300, MOST_BLOCKS if stopping else BLOCKS)
    found = decide(*traces(shape, AT_MARGIN, seed=3, **DISTURBED[name]), stopping=stopping)
    assert families(found, "better", "worse") <= at_most(RATE, 300)
    assert families(found, "no difference") <= at_most(RATE, 300)


@pytest.mark.parametrize("name", ["calm", "noisy", "offsets", "drift"])
def test_a_claim_at_the_margin_is_called_neither_way(name):
    found = decide(*traces((150, FAMILY, CELLS, BLOCKS), AT_MARGIN, seed=4, **DISTURBED[name]))
    assert families(found, "better", "worse") <= at_most(RATE, 150)
    assert families(found, "no difference") <= at_most(RATE, 150)


@pytest.mark.parametrize("name", DISTURBED)
@pytest.mark.parametrize("difference", [0.03, -0.03, 0.1])
def test_a_difference_is_not_called_equal_or_the_wrong_way(name, difference):
    found = decide(*traces(cells(200), difference, seed=5, **DISTURBED[name]))
    wrong = "worse" if difference > 0 else "better"
    assert families(found, "no difference", wrong) <= RATE


@pytest.mark.parametrize(
    ("difference", "name", "power"),
    [
        (0.03, "calm", 0.99),
        (0.03, "drift", 0.95),
        (0.1, "calm", 1.0),
        (0.1, "drift", 1.0),
        (0.1, "offsets", 0.99),
    ],
)
def test_the_power_to_find_a_difference_in_a_cell(difference, name, power):
    found = decide(*traces(cells(100), difference, seed=6, **DISTURBED[name]))
    assert (found == "better").mean() >= power


@pytest.mark.parametrize("burst", ["ours", "twin", "rival"])
def test_bursts_cost_power_which_more_blocks_give_back(burst):
    few = decide(*traces(cells(50, 10), 0.1, seed=7, burst=burst))
    many = decide(*traces(cells(50, MOST_BLOCKS), 0.1, seed=7, burst=burst))
    assert 0.6 < (few == "better").mean() < (many == "better").mean()
    assert (many == "better").mean() > 0.99


@pytest.mark.parametrize("name", ["calm", "offsets", "drift"])
def test_claims_find_three_percent_where_offsets_hide_it_in_a_cell(name):
    shape = (20, FAMILY, CELLS, BLOCKS)
    found = decide(*traces(shape, 0.03, seed=8, **DISTURBED[name]))
    assert (found == "better").mean() > 0.99
    inverse = decide(*traces(shape, 1 / 1.03 - 1, seed=8, **DISTURBED[name]))
    assert (inverse == "worse").mean() > 0.99


@pytest.mark.parametrize("name", ["calm", "offsets"])
def test_equal_claims_are_called_equal(name):
    found = decide(*traces((20, FAMILY, CELLS, BLOCKS), 0.0, seed=9, **DISTURBED[name]))
    assert (found == "no difference").mean() > 0.9


def test_blocks_alone_would_call_equal_processes_different():
    """Why the offset between processes enters: the rate without it is several times as high."""
    ours, twin, rival = traces(cells(200), 0.0, seed=10, offset=0.02)
    logs, gaps = statistics.log_ratio(rival, ours), statistics.log_ratio(twin, ours)
    noise = statistics.reach(gaps)
    alone = statistics.verdicts(logs.value, noise, statistics.holm(statistics.p_value(logs, noise)))
    assert families(alone, "better", "worse") > 0.9
    assert families(decide(ours, twin, rival), "better", "worse") <= RATE

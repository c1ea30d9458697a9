"""Check the stated error rates of the verdicts on studies whose true difference is known.

First on the noise of the recorded runs, whose A/A gaps `harness.summarize.rates` resamples: the
paper prints those rates. Then on made-up traces with noise that a record cannot show: drift,
bursts, the stopping rule. A family is 50 comparisons. Every seed is fixed, so a rate is asserted
for these studies.
"""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from numpy.lib.stride_tricks import sliding_window_view

from harness import stats
from harness.project import registry
from harness.results import times
from harness.stats import Estimate
from harness.summarize import comparisons, inference, rates
from harness.summarize import timings as rows_of_cells
from tests.support.replayed import RECORDED, replayed_once

FAMILY, AS_RUN = rates.FAMILY, rates.AS_RUN
(SEVERAL,) = set(rates.PROCESSES) - {AS_RUN}
CELLS = 12
BLOCKS = 10
MOST_BLOCKS = 40
WIDTH = 0.01
RATE = 1 - stats.CONFIDENCE
AT_MARGIN = math.expm1(stats.MARGIN)
ROOT = Path(__file__).parents[2]
DISTURBED = {
    "calm": {},
    "noisy": {"noise": 0.02},
    "offsets": {"offset": 0.005},
    "drift": {"drift": 0.03, "offset": 0.002},
    "bursts of ours": {"burst": "ours"},
    "bursts of the twin": {"burst": "twin"},
    "bursts of the rival": {"burst": "rival"},
}


@pytest.fixture(scope="module", params=RECORDED)
def material(request):
    """The noise of a recorded run, and its claims."""
    counted = {}
    for rows, sidecar in times.measurements(request.param.parent).values():
        for key, rivals in rows_of_cells.group(rows).items():
            limits = times.limits(sidecar, key[1:])
            # No claim is made of a network, so it says nothing of noise either.
            if not registry.of_network(key[0]):
                counted[key] = rows_of_cells.counted(rivals, limits)
    compared = comparisons.comparisons(counted)
    gaps, processes = comparisons.noise(counted), comparisons.processes(counted)
    return rates.material(gaps, processes, comparisons.members(compared))


@pytest.fixture(scope="module", params=RECORDED)
def recorded(request, tmp_path_factory):
    """The rates on that noise as a summary has them, by kind, calls, processes and truth."""
    run = replayed_once(tmp_path_factory, request.param.parent)
    found = pd.read_csv(run / "rates.csv", dtype={"processes": str})
    number = found["processes"].map(lambda each: int(each) if each.isdigit() else each)
    keys = zip(found["kind"], found["calls"], number, found["truth"], strict=True)
    return dict(zip(keys, found.to_dict("records"), strict=True))


@pytest.mark.parametrize("kind", ["cell", "claim"])
def test_on_recorded_noise_equal_code_is_not_called_different(recorded, kind):
    row = recorded[kind, "all", AS_RUN, "equal"]
    assert row["families"] >= rates.STUDIES
    assert row["better"] + row["worse"] <= RATE


@pytest.mark.parametrize("kind", ["cell", "claim"])
def test_on_recorded_noise_a_difference_at_the_margin_is_called_neither_way(recorded, kind):
    row = recorded[kind, "all", AS_RUN, "margin"]
    assert row["better"] <= RATE and row["worse"] <= RATE and row["same"] <= RATE


@pytest.mark.parametrize("kind", ["cell", "claim"])
@pytest.mark.parametrize("truth", ["3 percent", "5 percent", "10 percent"])
def test_on_recorded_noise_a_difference_is_not_called_equal_or_the_wrong_way(recorded, kind, truth):
    row = recorded[kind, "all", AS_RUN, truth]
    assert row["worse"] == row["same"] == 0


def test_on_recorded_noise_the_power_is_what_one_process_allows(recorded):
    """Offsets hide three percent of a call of 20 us in one process of each; not in several."""
    assert recorded["cell", "all", AS_RUN, "3 percent"]["found"] >= 0.55
    assert recorded["claim", "all", AS_RUN, "3 percent"]["found"] >= 0.9
    assert recorded["cell", "20 us", AS_RUN, "10 percent"]["found"] >= 0.95
    assert recorded["cell", "20 us", SEVERAL, "3 percent"]["found"] >= 0.6
    assert recorded["cell", "20 us", AS_RUN, "3 percent"]["found"] < 0.6
    assert recorded["claim", "all", AS_RUN, "equal"]["level"] > 0.1


def test_a_study_as_the_configuration_asks_for_it_has_the_power_and_keeps_the_rates(material):
    """Most of a record may be older than the several processes of short calls."""
    timing = yaml.safe_load((ROOT / "config/config.yaml").read_text())["timing"]
    assert timing["processes"] == SEVERAL
    noise, claims = material
    short = noise.lengths_us < timing["short_us"]
    several = np.where(short, np.maximum(timing["processes"], noise.processes), noise.processes)
    study = rates.Study(noise._replace(processes=several))
    found = {truth: study.claims(rates.TRUTHS[truth], claims.values()) for truth in rates.TRUTHS}
    assert (found["3 percent"] == "better").mean() >= 0.95
    for truth, verdicts in (
        ("equal", ("better", "worse")),
        ("margin", ("better", "no difference")),
    ):
        assert families(found[truth], *verdicts) <= RATE


def test_several_processes_keep_the_error_rates(recorded):
    assert recorded["cell", "all", SEVERAL, "equal"]["better"] <= RATE
    assert recorded["cell", "all", SEVERAL, "margin"]["better"] <= RATE
    assert recorded["cell", "all", SEVERAL, "margin"]["same"] <= RATE


def test_a_study_without_a_claim_has_the_rates_of_its_cells():
    """Such is one of ours alone."""
    count = rates.FEWEST_GAPS
    gaps = Estimate(np.linspace(-0.01, 0.01, count), np.full(count, 1e-6), np.full(count, 6.0))
    noise = rates.Noise(gaps, np.linspace(10.0, 90.0, count), np.ones(count, dtype=int))
    claim = {"a claim": [0, 1]}
    kinds = [{row["kind"] for row in rates.rows(noise, some)} for some in ({}, claim)]
    assert kinds == [{"cell"}, {"cell", "claim"}]


def test_a_resampled_study_has_the_noise_that_it_was_drawn_from():
    """Short calls scatter by 2 %, long ones by 0.1 %; one of 20 gaps is six times as wide."""
    rng = np.random.default_rng(11)
    count = 400
    lengths = np.sort(np.exp(rng.uniform(2, 7, count)))
    width = np.where(lengths < 50, 0.02, 0.001) * np.where(rng.random(count) < 0.05, 6, 1)
    gaps = Estimate(rng.normal(0, width), np.full(count, 1e-10), np.full(count, 6.0))
    one = np.ones(count, dtype=int)
    study = rates.Study(rates.Noise(gaps, lengths, one))
    drawn = study._twin.value
    for short in (lengths < 40, lengths > 60):
        assert drawn[:, short].std() == pytest.approx(gaps.value[short].std(), rel=0.1)
    assert abs(drawn.mean()) < 1e-3
    averaged = rates.Study(rates.Noise(gaps, lengths, one), processes=4)._twin.value
    assert averaged.std() == pytest.approx(drawn.std() / 2, rel=0.1)
    some = rates.Study(rates.Noise(gaps, lengths, np.where(lengths < 50, 4, 1)))._twin.value
    assert some[:, lengths < 50].std() == pytest.approx(drawn[:, lengths < 50].std() / 2, rel=0.1)
    assert some[:, lengths > 50].std() == pytest.approx(drawn[:, lengths > 50].std(), rel=0.1)
    few = rates.Noise(Estimate(*(p[:99] for p in gaps)), lengths[:99], one[:99])
    assert list(rates.rows(few, {})) == []


def traces(shape, difference, seed, noise=0.003, offset=0.0, drift=0.0, burst=""):
    """Return times (..., blocks) of ours, of its twin and of a rival slower by `difference`.

    - noise: relative spread of each block.
    - offset: relative offset of each process, the same for all its blocks.
    - drift: step of a random walk common to all.
    - burst: the implementation with every tenth block 30 % longer.
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
    """Return the log ratios of the first `blocks` of each trace."""
    found = [np.empty(blocks.shape) for _ in Estimate._fields]
    for count in np.unique(blocks):
        these = blocks == count
        part = stats.log_ratio(numerator[these][:, :count], denominator[these][:, :count])
        for whole, values in zip(found, part, strict=True):
            whole[these] = values
    return Estimate(*found)


def offsets(gaps, alike=inference.ALIKE):
    """Return the offsets of each gap from the NEIGHBOURS gaps around it.

    Tails are those of `alike` gaps: several families of cells make a study.
    """
    before = inference.NEIGHBOURS // 2
    windows = []
    for part in gaps:
        line = part.reshape(len(part), -1)
        ring = np.concatenate([line[:, -before:], line, line[:, : before - 1]], axis=1)
        windows.append(sliding_window_view(ring, inference.NEIGHBOURS, axis=1))
    variance = stats.between(Estimate(*windows))
    whole = np.sqrt(variance + gaps.variance.reshape(variance.shape))
    scores = gaps.value.reshape(variance.shape) / np.where(whole > 0, whole, 1)
    study = scores.reshape(-1, max(alike, scores.shape[-1]))
    tails = np.broadcast_to(stats.tails(study)[:, None], study.shape)
    freedom = np.full(variance.shape, float(inference.NEIGHBOURS))
    return inference.Offset(
        *(part.reshape(gaps.value.shape) for part in (variance, freedom, tails))
    )


def until_narrow(ours, rival):
    """Return how many blocks the stopping rule takes until the interval is within 1 %."""
    blocks = np.full(ours.shape[:-1], MOST_BLOCKS)
    for count in range(MOST_BLOCKS - 1, BLOCKS - 1, -1):
        ratio = stats.paired_ratio(rival[..., :count], ours[..., :count])
        blocks[(ratio.hi - ratio.lo) / 2 < WIDTH * ratio.value] = count
    return blocks


def decide(ours, twin, rival, stopping=False, alike=inference.ALIKE):
    """Return the verdicts of studies (studies, FAMILY, blocks); a further axis makes claims."""
    blocks = until_narrow(ours, rival) if stopping else np.full(ours.shape[:-1], ours.shape[-1])
    gaps, logs = estimate(twin, ours, blocks), estimate(rival, ours, blocks)
    parts = [gaps, logs, offsets(gaps, alike)]
    if ours.ndim == 3:
        parts = [type(part)(*(values[..., None] for values in part)) for part in parts]
    gaps, logs, offset = parts
    noise = stats.reach(stats.mean(gaps))
    logs = inference.over_cells(logs, offset, proving=True)
    p_holm = stats.holm(stats.p_value(logs, noise))
    return stats.verdicts(logs.value, noise, p_holm)


def cells(studies, blocks=BLOCKS):
    return studies, FAMILY, blocks


def families(found, *verdicts):
    """Return the share of families in which any member has one of the verdicts."""
    return np.isin(found, verdicts).any(axis=-1).mean()


def at_most(rate, studies):
    """Return a rate plus two standard errors of its estimate from this many studies."""
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


def test_a_small_study_fears_heavy_tails_and_finds_less():
    """Fifty gaps do not tell the tails of offsets, so heavy ones are assumed."""
    made = traces(cells(100), 0.03, seed=6, **DISTURBED["drift"])
    small, large = decide(*made, alike=FAMILY), decide(*made)
    assert 0.6 < (small == "better").mean() < (large == "better").mean()
    assert families(decide(*traces(cells(200), 0.0, seed=1), alike=FAMILY), "better") <= RATE


@pytest.mark.parametrize("burst", ["ours", "twin", "rival"])
def test_bursts_cost_power_which_more_blocks_give_back(burst):
    few = decide(*traces(cells(52, 10), 0.1, seed=7, burst=burst))
    many = decide(*traces(cells(52, MOST_BLOCKS), 0.1, seed=7, burst=burst))
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
    """Show why offsets between processes count: without them the rate is several times as high."""
    ours, twin, rival = traces(cells(200), 0.0, seed=10, offset=0.02)
    logs, gaps = stats.log_ratio(rival, ours), stats.log_ratio(twin, ours)
    noise = stats.reach(gaps)
    alone = stats.verdicts(logs.value, noise, stats.holm(stats.p_value(logs, noise)))
    assert families(alone, "better", "worse") > 0.9
    assert families(decide(ours, twin, rival), "better", "worse") <= RATE

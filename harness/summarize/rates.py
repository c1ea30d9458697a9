"""How often the verdicts of a run err, and how much they find, on the noise of that very run.

Its A/A gaps are resampled. A made-up study has the cells and claims of the run. The gap of a cell
to its twin, and to each rival, is that of a recorded pair of processes. The pair is among the
CALLS_ALIKE whose calls are nearest in length. The sign is random, and the uncertainty is that of
the pair's blocks. To the rivals a true difference is added. The study is judged as a run is. It
learns the variance and the tails of its offsets anew from its own gaps, and sees nothing of the
gaps that it was drawn from. Seeds are fixed.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from harness import stats
from harness.stats import Estimate
from harness.summarize import inference
from harness.summarize.inference import Offset

STUDIES, FAMILY = 480, 50
CALLS_ALIKE = 21
# Fewer gaps than these are no picture of the noise.
FEWEST_GAPS = 100
# The name of a true difference, and its logarithm.
TRUTHS = {
    "equal": 0.0,
    "margin": stats.MARGIN,
    "3 percent": math.log(1.03),
    "5 percent": math.log(1.05),
    "10 percent": math.log(1.1),
}
# Calls of about 20 us: from and to so many microseconds.
SHORT_US = (16.0, 25.0)
# In how many processes an implementation runs in a cell: as in the run itself, and what would help.
AS_RUN = "as run"
PROCESSES = (AS_RUN, 6)


class Noise(NamedTuple):
    """The A/A gaps of a run, each as of two single processes. With each come the length in us of
    the calls between which it was seen, and the number of processes of each implementation in that
    cell."""

    gaps: Estimate
    lengths_us: np.ndarray
    processes: np.ndarray


def material(
    gaps: Mapping[Hashable, tuple[float, Estimate]],
    processes: Mapping[Hashable, int],
    claims: Mapping[tuple, Sequence],
) -> tuple[Noise, dict[tuple, list[int]]]:
    """Return what `rows` takes; gaps and processes are by cell, comparisons by claim."""
    places = {key: place for place, key in enumerate(gaps)}
    asked = {
        claim: [places[one.key] for one in compared if one.key in places]
        for claim, compared in claims.items()
    }
    noise = Noise(
        inference.stacked([gap for _, gap in gaps.values()]),
        np.array([length for length, _ in gaps.values()]),
        np.array([processes[key] for key in gaps]),
    )
    return noise, {claim: found for claim, found in asked.items() if found}


def rows(noise: Noise, claims: Mapping[object, Sequence[int]]) -> Iterator[dict]:
    """The rows of rates.csv; none where there are fewer than FEWEST_GAPS gaps,
    and none on claims if there is no claim.

    claims: by any key, the places of the gaps in whose cells a claim compares.
    """
    if len(noise.lengths_us) < FEWEST_GAPS:
        return
    for processes in PROCESSES:
        study = Study(noise, processes)
        for name, difference in TRUTHS.items():
            about = {"processes": processes, "truth": name, "studies": STUDIES}
            found, short = study.cells(difference)
            yield {"kind": "cell", "calls": "all"} | about | _shares(found)
            yield {"kind": "cell", "calls": "20 us"} | about | {"found": _share(short == "better")}
            if processes == AS_RUN and claims:
                yield (
                    {"kind": "claim", "calls": "all"}
                    | about
                    | _shares(study.claims(difference, claims.values()))
                )


class Study:
    """STUDIES made-up studies side by side; arrays are (studies, cells)."""

    def __init__(self, noise: Noise, processes: int | str = AS_RUN, seed: int = 1):
        self._rng = np.random.default_rng(seed)
        self._noise = noise
        of_cell = noise.processes
        self._processes = of_cell if processes == AS_RUN else np.full_like(of_cell, processes)
        places = np.log(noise.lengths_us)
        distances = np.abs(places[:, None] - places[None, :])
        self._alike = np.argsort(distances, axis=-1, kind="stable")[:, :CALLS_ALIKE]
        self._twin = self._drawn(np.arange(len(places)))
        # As in a run, gaps of means are learned from as gaps of single processes.
        wider = np.sqrt(self._processes)
        gaps = self._twin._replace(
            value=self._twin.value * wider, variance=self._twin.variance * wider**2
        )
        near = inference.neighbours(places, places)
        variance = inference.variances(gaps, near)
        tails = inference.Tails(gaps, places).at(noise.lengths_us)
        single = Offset(variance, np.full(variance.shape, float(near.shape[-1])), tails)
        self._offset = inference.averaged(single, self._processes, self._processes)

    def cells(self, difference: float) -> tuple[np.ndarray, np.ndarray]:
        """Verdicts on cells in families, (studies, families, FAMILY); and those on short calls."""
        count = len(self._noise.lengths_us)
        logs = self._rival(np.arange(count), difference)
        one = Offset(*(part[..., None] for part in self._offset))
        whole = inference.over_cells(
            Estimate(*(part[..., None] for part in logs)), one, proving=True
        )
        noise = stats.reach(self._twin)
        size = min(FAMILY, count)
        shape = STUDIES, count // size, size
        order = self._rng.permuted(np.tile(np.arange(count), (STUDIES, 1)), axis=-1)
        order = order[:, : shape[1] * size]
        p = np.take_along_axis(stats.p_value(whole, noise), order, axis=-1).reshape(shape)
        value, noise, lengths = (
            np.take_along_axis(np.broadcast_to(part, noise.shape), order, axis=-1).reshape(shape)
            for part in (whole.value, noise, self._noise.lengths_us)
        )
        found = stats.verdicts(value, noise, stats.holm(p))
        return found, found[(lengths >= SHORT_US[0]) & (lengths <= SHORT_US[1])]

    def claims(self, difference: float, claims: Iterable[Sequence[int]]) -> np.ndarray:
        """Verdicts on the claims, each over its cells, (studies, 1, claims)."""
        logs, noise = [], []
        for places in map(np.asarray, claims):
            offset = Offset(*(part[:, places] for part in self._offset))
            logs.append(inference.over_cells(self._rival(places, difference), offset, proving=True))
            twin = Estimate(*(part[:, places] for part in self._twin))
            noise.append(stats.reach(stats.mean(twin)))
        whole = Estimate(*(np.stack(parts, axis=-1) for parts in zip(*logs, strict=True)))
        floors = np.stack(noise, axis=-1)
        p_holm = stats.holm(stats.p_value(whole, floors))
        return stats.verdicts(whole.value, floors, p_holm)[:, None]

    def _rival(self, places: np.ndarray, difference: float) -> Estimate:
        drawn = self._drawn(places)
        return drawn._replace(value=drawn.value + difference)

    def _drawn(self, places: np.ndarray) -> Estimate:
        """Recorded gaps as of calls at these places; the mean over the pairs of processes there."""
        pairs = self._processes[places]
        shape = STUDIES, len(places), int(pairs.max(initial=1))
        which = self._rng.integers(self._alike.shape[-1], size=shape)
        index = self._alike[places[None, :, None], which]
        signs = self._rng.choice([-1.0, 1.0], shape)
        value, variance, freedom = (np.asarray(part)[index] for part in self._noise.gaps)
        drawn = Estimate(signs * value, variance, freedom)
        if shape[-1] == 1:
            return stats.mean(drawn)
        means = [
            stats.mean(Estimate(*(part[..., :count] for part in drawn)))
            for count in range(1, shape[-1] + 1)
        ]
        chosen = (np.stack(parts, axis=-1) for parts in zip(*means, strict=True))
        column = np.broadcast_to((pairs - 1)[None, :, None], (*shape[:2], 1))
        return Estimate(*(np.take_along_axis(part, column, axis=-1)[..., 0] for part in chosen))


def _shares(found: np.ndarray) -> dict[str, float]:
    """Return the share of families in which any member has a verdict, and the share of members in
    which ours is found better. found: verdicts, [..., members].
    """
    names = {"better": "better", "worse": "worse", "same": "no difference"}
    shares = {key: _share((found == name).any(axis=-1)) for key, name in names.items()}
    families = {"families": math.prod(found.shape[:-1])}
    return (
        families
        | shares
        | {"found": _share(found == "better"), "level": _share(found == names["same"])}
    )


def _share(told: np.ndarray) -> float:
    return float(np.mean(told)) if told.size else math.nan

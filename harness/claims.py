"""What the study claims: ours against each baseline, by cell and by op, with families corrected.

A row of verdicts.csv compares ours with a baseline in one cell; its family is all cells and
baselines of the op. A row of claims.csv says the same of the geometric mean over the cells of one
(op, pass); its family is all claims of the study. `harness.statistics` explains the numbers.

The offset between two processes that run the same code depends on how long a call takes (some
tenths of a microsecond), so a cell takes it from the A/A gaps of the cells nearest in time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from harness import statistics
from harness.cells import KEY, Cell, shared
from harness.load import OURS, TWIN
from harness.statistics import Estimate, Interval

NEIGHBOURS = 20
# A ratio beyond this is more often a baseline that does other work than a better kernel.
FLAGGED = 10
UNKNOWN = Estimate(math.nan, 0.0, 1.0)


class Comparison(NamedTuple):
    """Ours and one baseline in one cell; times of both come from the same blocks.

    key: values of KEY. log: log of the baseline's time over ours, uncertain by its blocks alone.
    twin: the same of the A/A twin, None without one. offset: variance between processes, and its
    degrees of freedom.
    """

    key: tuple[str, ...]
    family: str
    baseline: str
    blocks: int
    ratio: Interval
    log: Estimate
    twin: Estimate | None
    offset: tuple[float, float]


def comparisons(study: Mapping[tuple[str, ...], Mapping[str, Cell]]) -> list[Comparison]:
    """All comparisons of a study: cells by KEY, in each the implementations whose times count."""
    twins = {key: _gap(rivals, TWIN) for key, rivals in study.items()}
    offsets = _offsets({key: study[key][OURS] for key in study if OURS in study[key]}, twins)
    found = []
    for key, rivals in study.items():
        for impl, cell in rivals.items():
            log = None if impl in (OURS, TWIN) else _gap(rivals, impl)
            if log is not None:
                both = shared(cell, rivals[OURS])
                ratio = statistics.paired_ratio(*both)
                origin = (key, cell.first["family"], impl, len(both[0]))
                found.append(Comparison(*origin, ratio, log, twins[key], offsets[key]))
    return found


def verdict_rows(study: Iterable[Comparison]) -> list[dict]:
    """The rows of verdicts.csv."""
    rows = []
    for op, family in _grouped(study, lambda one: one.key[0]).items():
        noise = statistics.reach(_stacked([_twin(one) for one in family]))
        logs = [statistics.plus(one.log, *one.offset) for one in family]
        decided = _decided(logs, noise)
        for one, floor, (p, p_holm, verdict) in zip(family, noise, decided, strict=True):
            row = {"op": op, "family": one.family, **dict(zip(KEY[1:], one.key[1:], strict=True))}
            row |= {"baseline": one.baseline} | _values(one.ratio) | {"noise": floor}
            row |= {"offset": math.sqrt(one.offset[0]), "p": p, "p_holm": p_holm}
            rows.append(row | {"verdict": verdict, "note": _note(one.ratio.value)})
    return rows


def claim_rows(study: Sequence[Comparison], cells: Iterable[tuple[str, ...]]) -> list[dict]:
    """The rows of claims.csv; `cells`: the keys of all cells of ours, timed or not."""
    offered = _grouped(cells, lambda key: (key[0], key[3]))
    claims = _grouped(study, lambda one: (one.key[0], one.family, one.key[3], one.baseline))
    logs = [_claim(group) for group in claims.values()]
    twins = [statistics.mean(_stacked([_twin(one) for one in group])) for group in claims.values()]
    noise = statistics.reach(_stacked(twins)) if twins else []
    rows = []
    decided = _decided(logs, noise)
    for key, log, floor, (p, p_holm, verdict) in zip(claims, logs, noise, decided, strict=True):
        op, family, direction, baseline = key
        ratio = statistics.ratio_interval(log)
        row = {"op": op, "family": family, "pass": direction, "baseline": baseline}
        row |= {"cells": len(claims[key]), "of": len(offered[op, direction])}
        row |= _values(ratio) | {"noise": floor, "p": p, "p_holm": p_holm}
        rows.append(row | {"verdict": verdict, "note": _note(ratio.value)})
    return rows


def _gap(rivals: Mapping[str, Cell], impl: str) -> Estimate | None:
    if impl not in rivals or OURS not in rivals:
        return None
    both = shared(rivals[impl], rivals[OURS])
    return statistics.log_ratio(*both) if both[0] else None


def _offsets(
    ours: Mapping[tuple, Cell], twins: Mapping[tuple, Estimate | None]
) -> dict[tuple, tuple[float, float]]:
    """The variance between processes in each cell, with its degrees of freedom.

    It is that of the A/A gaps of the NEIGHBOURS cells whose calls of ours are nearest in length.
    """
    lengths = {
        key: math.log(statistics.median_interval(list(cell.times().values())).value)
        for key, cell in ours.items()
    }
    known = [key for key in lengths if twins[key] is not None]
    if not known:
        return dict.fromkeys(lengths, (0.0, 1.0))
    gaps = _stacked([twins[key] for key in known])
    placed = np.array([lengths[key] for key in known])
    found = {}
    for key, length in lengths.items():
        near = np.argsort(np.abs(placed - length), kind="stable")[:NEIGHBOURS]
        variance, freedom = statistics.spread(Estimate(*(part[near] for part in gaps)))
        found[key] = float(variance), float(freedom)
    return found


def _claim(group: Sequence[Comparison]) -> Estimate:
    """The mean over cells; their offsets are known from the same gaps, so these count once."""
    variances, freedoms = np.transpose([one.offset for one in group])
    blocks = statistics.mean(_stacked([one.log for one in group]))
    return statistics.plus(blocks, variances.mean() / len(group), freedoms.mean())


def _twin(one: Comparison) -> Estimate:
    """The A/A gap of a comparison's cell; UNKNOWN where it is not known well enough."""
    return UNKNOWN if one.twin is None or one.blocks < statistics.FEWEST_BLOCKS else one.twin


def _decided(logs: Sequence[Estimate], noise: Sequence[float]) -> list[tuple[float, float, str]]:
    """p, p after Holm, and the verdict, for each member of one family."""
    if not logs:
        return []
    stacked = _stacked(logs)
    p = statistics.p_value(stacked, noise)
    p_holm = statistics.holm(p)
    verdicts = statistics.verdicts(stacked.value, noise, p_holm)
    return list(zip(p.tolist(), p_holm.tolist(), verdicts.tolist(), strict=True))


def _stacked(parts: Sequence[Estimate]) -> Estimate:
    return Estimate(*(np.array(column, dtype=float) for column in zip(*parts, strict=True)))


def _grouped(items: Iterable, key) -> dict:
    found: dict = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _values(ratio: Interval) -> dict[str, float]:
    return {"ratio": float(ratio.value), "ci_lo": float(ratio.lo), "ci_hi": float(ratio.hi)}


def _note(ratio: float) -> str:
    if 1 / FLAGGED <= ratio <= FLAGGED:
        return ""
    return f"more than {FLAGGED} times: see whether both do the same work"

"""Claims of the study: ours against each baseline, by cell and by op, with families corrected.

A row of verdicts.csv compares ours with a baseline in one cell; its family is all cells and
baselines of the op, of drawn shapes apart from the tuned grid. A row of claims.csv does so for the
geometric mean over the cells of one (op, pass) of the grid. It is against each baseline or against
the best, and its family is all claims of that kind. The part `training` (`timings.parts`) has
families of its own in both. `harness.stats` explains the numbers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import f

from harness import stats
from harness.project import source_tree
from harness.project.implementations import OURS, TWIN
from harness.results.reports import ROOT
from harness.stats import Estimate, Interval
from harness.summarize import inference
from harness.summarize.inference import UNKNOWN, Difference, Offset, Offsets
from harness.summarize.timings import GRID, HEADLINE, KEY, Cell, parts, ratio, shared

# The share of steady cells that chance would call unsteady.
UNSTEADY = 1e-4
# A ratio beyond this is as often a baseline that does other work as it is a better kernel.
FLAGGED = 10
CLAIM = ("op", "family", "pass", "baseline", "timed_by")


class Comparison(NamedTuple):
    """Ours and one baseline in one cell; times of both come from the same blocks.

    key: values of KEY. ratio: the baseline's time over ours, with its interval. clock: "graph", or
    "events" where either was timed so. set: "grid" or "drawn". part: as in `timings.parts`.
    """

    key: tuple[str, ...]
    family: str
    baseline: str
    ratio: Interval
    difference: Difference
    clock: str = "graph"
    set: str = GRID
    part: str = HEADLINE


# Cells by KEY, in each the implementations whose times count.
Study = Mapping[tuple[str, ...], Mapping[str, Cell]]


def claimed(cells: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The cells of which claims are made, by KEY: all but those of whole networks.

    The GPU time of a network is not what its caller waits for. It decides no claim, and its gaps,
    with the host's work in them, say nothing of others.
    """
    networks = source_tree.network_ops(ROOT)
    return [key for key in cells if key[0] not in networks]


def noise(study: Study) -> dict[tuple[str, ...], tuple[float, Estimate]]:
    """The A/A gaps of a study by cell, each with the length in us of a call of ours.

    Unsteady cells have none, nor have those of networks: their gaps say nothing of others.
    """
    return _learned(study)[0]


def known(study: Study) -> Offsets:
    """The offsets of a study: by the length of a call, and those of unsteady cells."""
    return inference.known(*_learned(study))


def unsteady(study: Study, gaps: Mapping[tuple[str, ...], tuple]) -> dict[tuple[str, ...], Offset]:
    """The cells in which processes of ours differ far more than in cells of calls as long.

    By key the offset between two processes in the cell. A kernel may have two speeds, and a process
    one of them for its life. The variance of several processes shows that: it is compared with the
    learned one by the F test, at a level of UNSTEADY.
    """
    learned, found = inference.known(gaps), {}
    for key, (length, _) in gaps.items():
        spreads = [study[key][impl].spread() for impl in (OURS, TWIN)]
        if None in spreads:
            continue
        freedom = sum(each.freedom for each in spreads)
        between = sum(each.between * each.freedom for each in spreads) / freedom
        within = sum(each.within * each.freedom for each in spreads) / freedom
        alone = learned.alone(length)
        expected = alone.variance + within
        if expected > 0 and f.sf(between / expected, freedom, alone.freedom) < UNSTEADY:
            found[key] = Offset(2 * (between - within), float(freedom), float(freedom))
    return found


def _learned(study: Study) -> tuple[dict, dict[tuple[str, ...], Offset]]:
    """Return the gaps of steady cells, and the offsets of the others."""
    gaps = _gaps(study)
    own = unsteady(study, gaps)
    return {key: gap for key, gap in gaps.items() if key not in own}, own


def _gaps(study: Study) -> dict[tuple[str, ...], tuple[float, Estimate]]:
    """The A/A gaps of the claimed cells, each as between two single processes.

    A gap between means of several processes is narrower than one between two processes; it is
    widened to that, so that `inference.Offsets` knows gaps of one kind.
    """
    found = {}
    for key in claimed(study):
        rivals = study[key]
        if (twin := gap(rivals, TWIN)) is not None:
            length = stats.median_interval(list(rivals[OURS].times().values())).value
            wider = math.sqrt(2 / sum(1 / rivals[impl].processes for impl in (OURS, TWIN)))
            value, variance = wider * twin.value, wider**2 * twin.variance
            found[key] = length, twin._replace(value=value, variance=variance)
    return found


def processes(study: Study) -> dict[tuple[str, ...], int]:
    """How many processes ran ours in each cell."""
    return {key: rivals[OURS].processes for key, rivals in study.items() if OURS in rivals}


def comparisons(study: Study, learned: Offsets | None = None) -> list[Comparison]:
    """All comparisons of claimed cells; learned: what `known` says, where it is at hand."""
    offsets, found = learned or known(study), []
    part = parts(study)
    for key in claimed(study):
        rivals = study[key]
        if OURS not in rivals:
            continue
        ours, twin = rivals[OURS], gap(rivals, TWIN)
        length = stats.median_interval(list(ours.times().values())).value
        for impl, cell in rivals.items():
            log = None if impl in (OURS, TWIN) else gap(rivals, impl)
            if log is None:
                continue
            theirs, _ = shared(cell, ours)
            few = len(theirs) < stats.FEWEST_BLOCKS
            gaps = (UNKNOWN if few or twin is None else twin,)
            offset = offsets.of(key).between(length, ours.processes, cell.processes)
            difference = Difference(log, offset, gaps)
            clock = "events" if "events" in (ours.clock, cell.clock) else "graph"
            one = ratio(cell, ours, offsets.of(key))
            about = cell.first["family"], impl, one, difference, clock, cell.set, part[key]
            found.append(Comparison(key, *about))
    return found


def verdict_rows(study: Iterable[Comparison]) -> list[dict]:
    """The rows of verdicts.csv; families are those of an op, set and part."""
    rows = []
    for family in inference.grouped(study, lambda one: (one.key[0], one.set, one.part)).values():
        judged = inference.judged([[one.difference] for one in family])
        for one, found in zip(family, judged, strict=True):
            row = dict(zip(KEY, one.key, strict=True))
            row |= {"family": one.family, "set": one.set, "part": one.part}
            row |= {"baseline": one.baseline, "timed_by": one.clock}
            row |= {"offset": math.sqrt(one.difference.offset.variance)}
            found |= {"ratio": one.ratio.value, "ci_lo": one.ratio.lo, "ci_hi": one.ratio.hi}
            rows.append(row | found | {"note": _note(one.ratio.value)})
    return rows


def claim_rows(study: Sequence[Comparison], cells: Iterable[tuple[str, ...]]) -> list[dict]:
    """The rows of claims.csv against each baseline; `cells`: the keys of all cells of ours, timed
    or not. Cells that events timed make claims of their own, drawn shapes none.
    """
    offered = inference.grouped(cells, lambda key: (key[0], key[3]))
    rows = []
    for part, some in inference.grouped(study, lambda one: one.part).items():
        claims = members(some)
        judged = inference.judged([[one.difference for one in found] for found in claims.values()])
        for (key, compared), found in zip(claims.items(), judged, strict=True):
            row = {"against": "each", "part": part, "rivals": 1} | _named(key)
            row |= {"cells": len(compared), "of": len(offered[row["op"], row["pass"]])}
            rows.append(row | found | {"note": _note(found["ratio"])})
    return rows


def best_rows(study: Sequence[Comparison], cells: Iterable[tuple[str, ...]]) -> list[dict]:
    """The rows of claims.csv against the best rival of each (op, pass), whichever that is.

    No rival is chosen: the best one is a parameter, the least of the true differences to all. Ours
    is better if it is better than every rival. This is an intersection-union test, whose p is the
    largest of theirs (Berger 1982, "Multiparameter hypothesis testing and acceptance sampling").
    Ours is worse if it is worse than one rival, by the smallest p times their number. It is no
    different if it is no worse than any by MARGIN and no better than one by that. Each rival counts
    over the cells in which it has a time that a graph took. Shown is the rival of the least ratio;
    the interval covers the least of the true ratios. Their family is all such claims of a part of
    the study.
    """
    offered = inference.grouped(cells, lambda key: (key[0], key[3]))
    groups = inference.grouped(study, lambda one: one.part)
    return [row for part, some in groups.items() for row in _best_rows(some, offered, part)]


def _best_rows(study: Sequence[Comparison], offered: Mapping, part: str) -> list[dict]:
    """A family of `best_rows`; offered: the cells of each (op, pass)."""
    claims, rows = members(study), []
    each = inference.grouped((key for key in claims if key[-1] == "graph"), lambda key: key[:3])
    for (op, _, pass_), keys in each.items():
        found = inference.against_best([[one.difference for one in claims[key]] for key in keys])
        closest = keys[found.pop("closest")]
        row = {"against": "best", "part": part, "rivals": len(keys)} | _named(closest)
        row |= {"cells": len(claims[closest]), "of": len(offered[op, pass_])}
        rows.append(row | found | {"note": _note(found["ratio"])})
    adjusted = stats.holm(np.array([row["p"] for row in rows]))
    for row, p_holm in zip(rows, adjusted.tolist(), strict=True):
        row |= {"p_holm": p_holm}
        if not p_holm <= 1 - stats.CONFIDENCE:
            row["verdict"] = "undecided"
    return rows


def members(study: Sequence[Comparison]) -> dict[tuple, list[Comparison]]:
    """The comparisons of each claim against a baseline, by the values of CLAIM."""
    grid = [one for one in study if one.set == GRID]
    return inference.grouped(
        grid, lambda one: (one.key[0], one.family, one.key[3], one.baseline, one.clock)
    )


def _named(claim: tuple) -> dict[str, str]:
    return dict(zip(CLAIM, claim, strict=True))


def gap(rivals: Mapping[str, Cell], impl: str) -> Estimate | None:
    """The log of a rival's time over ours, block by block; None where they share no block."""
    if impl not in rivals or OURS not in rivals:
        return None
    theirs, own = shared(rivals[impl], rivals[OURS])
    return stats.log_ratio(theirs, own) if theirs else None


def _note(value: float) -> str:
    if 1 / FLAGGED <= value <= FLAGGED:
        return ""
    return f"more than {FLAGGED} times: see whether both do the same work"

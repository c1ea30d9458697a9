"""What the study claims: ours against each baseline, by cell and by op, with families corrected.

A row of verdicts.csv compares ours with a baseline in one cell; its family is all cells and
baselines of the op. A row of claims.csv says the same of the geometric mean over the cells of one
(op, pass); its family is all claims of the study. `harness.statistics` explains the numbers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from harness import judge, statistics
from harness.cells import KEY, Cell, shared
from harness.judge import UNKNOWN, Difference
from harness.load import OURS, TWIN
from harness.statistics import Estimate, Interval

# A ratio beyond this is as often a baseline that does other work as it is a better kernel.
FLAGGED = 10


class Comparison(NamedTuple):
    """Ours and one baseline in one cell; times of both come from the same blocks.

    key: values of KEY. ratio: the baseline's time over ours, with its interval over blocks.
    """

    key: tuple[str, ...]
    family: str
    baseline: str
    ratio: Interval
    difference: Difference


def comparisons(study: Mapping[tuple[str, ...], Mapping[str, Cell]]) -> list[Comparison]:
    """All comparisons of a study: cells by KEY, in each the implementations whose times count."""
    twins = {key: gap(rivals, TWIN) for key, rivals in study.items()}
    offsets = judge.offsets({key: study[key][OURS] for key in study if OURS in study[key]}, twins)
    found = []
    for key, rivals in study.items():
        for impl, cell in rivals.items():
            log = None if impl in (OURS, TWIN) else gap(rivals, impl)
            if log is None:
                continue
            both = shared(cell, rivals[OURS])
            twin = UNKNOWN if twins[key] is None else twins[key]
            few = len(both[0]) < statistics.FEWEST_BLOCKS
            difference = Difference(log, offsets[key], (UNKNOWN if few else twin,))
            ratio = statistics.paired_ratio(*both)
            found.append(Comparison(key, cell.first["family"], impl, ratio, difference))
    return found


def verdict_rows(study: Iterable[Comparison]) -> list[dict]:
    """The rows of verdicts.csv; the interval of a cell is that over its blocks."""
    rows = []
    for family in judge.grouped(study, lambda one: one.key[0]).values():
        judged = judge.judged([[one.difference] for one in family])
        for one, found in zip(family, judged, strict=True):
            row = dict(zip(KEY, one.key, strict=True)) | {"family": one.family}
            row |= {"baseline": one.baseline, "offset": math.sqrt(one.difference.offset[0])}
            found |= {"ratio": one.ratio.value, "ci_lo": one.ratio.lo, "ci_hi": one.ratio.hi}
            rows.append(row | found | {"note": _note(one.ratio.value)})
    return rows


def claim_rows(study: Sequence[Comparison], cells: Iterable[tuple[str, ...]]) -> list[dict]:
    """The rows of claims.csv; `cells`: the keys of all cells of ours, timed or not."""
    offered = judge.grouped(cells, lambda key: (key[0], key[3]))
    claims = judge.grouped(study, lambda one: (one.key[0], one.family, one.key[3], one.baseline))
    judged = judge.judged([[one.difference for one in members] for members in claims.values()])
    rows = []
    for (key, members), found in zip(claims.items(), judged, strict=True):
        row = dict(zip(("op", "family", "pass", "baseline"), key, strict=True))
        row |= {"cells": len(members), "of": len(offered[row["op"], row["pass"]])}
        rows.append(row | found | {"note": _note(found["ratio"])})
    return rows


def gap(rivals: Mapping[str, Cell], impl: str) -> Estimate | None:
    """The log of a rival's time over ours, block by block; None where they share no block."""
    if impl not in rivals or OURS not in rivals:
        return None
    both = shared(rivals[impl], rivals[OURS])
    return statistics.log_ratio(*both) if both[0] else None


def _note(ratio: float) -> str:
    if 1 / FLAGGED <= ratio <= FLAGGED:
        return ""
    return f"more than {FLAGGED} times: see whether both do the same work"

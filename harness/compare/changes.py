"""Changes between two runs of the study, and which claims of the first the second repeats.

Runs share no block, so nothing is paired: the change of a cell is the difference of two medians,
each as uncertain as its own blocks. Two runs of the same code differ beyond that. A control shows
how far: a baseline whose version is the same in both. Its gaps in the cells nearest in time are one
more variance. Its own gap in a cell joins the noise floors of the two A/A twins.

This needs one GPU model. Between two, times say nothing of the code; then the ratios to each
baseline are compared instead, which are paired within each run.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness import stats
from harness.cli import UserError
from harness.project.implementations import OURS, TWIN
from harness.results import parts
from harness.results import times as results
from harness.stats import Estimate
from harness.summarize import comparisons, inference, timings
from harness.summarize.inference import UNKNOWN, Difference, Offset, OwnOffset
from harness.summarize.timings import KEY, Cell

Key = tuple[str, ...]
FIRST_CONTROL = "torch_eager"
TIMES = {"better": "faster", "worse": "slower", "no difference": "same"}
RATIOS = {"better": "higher", "worse": "lower", "no difference": "same"}
# Statuses of ours in a cell that a run did not ask for, or to which it did not come.
NOT_ASKED = ("absent", "unreached")


@dataclass
class Run:
    """One run: its sidecars by op; by key, the cells whose times count, and their summary rows."""

    sidecars: Mapping[str, dict]
    counted: Mapping[Key, Mapping[str, Cell]]
    summary: Mapping[Key, Mapping[str, dict]]
    compared: list[comparisons.Comparison]
    known: inference.Offsets = inference.NOTHING_KNOWN

    @classmethod
    def of(cls, study: Mapping[str, tuple[list[dict], dict]]) -> "Run":
        """study: raw rows and sidecar by op. Drawn shapes are left out: each run draws its own."""
        counted, summary, every, ceilings = {}, {}, {}, {}
        for rows, sidecar in study.values():
            for key, rivals in timings.group(rows).items():
                if next(iter(rivals.values())).set != timings.GRID:
                    continue
                ceilings[key] = results.limits(sidecar, key[1:])
                counted[key] = timings.counted(rivals, ceilings[key])
                every[key] = rivals
        known = comparisons.known(counted)
        for key, rivals in every.items():
            found = timings.summary(rivals, ceilings[key], known.of(key))
            summary[key] = {row["impl"]: row for row in found}
        sidecars = {op: sidecar for op, (_, sidecar) in study.items()}
        compared = comparisons.comparisons(counted, known)
        return cls(sidecars, counted, summary, compared, known)

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """The run in a folder; UserError where there is none."""
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; give that of a run or a recorded one")
        return cls.of(results.measurements(folder))

    def gpus(self, ops: Iterable[str]) -> set[str]:
        """The names of the GPUs that timed these ops; "" of one that its sidecar does not name."""
        return {(self.sidecars[op]["environment"].get("gpu") or {}).get("name", "") for op in ops}

    @property
    def parts(self) -> list[Mapping]:
        """The sidecar of each part of each measurement."""
        return [part for car in self.sidecars.values() for part in parts.of(car)]

    def origin(self) -> str:
        """Its GPU and run, and how many cells it has."""
        gpus = ", ".join(sorted(filter(None, self.gpus(self.sidecars)))) or "no GPU named"
        runs = ", ".join(sorted({part["run_id"] for part in self.parts}))
        return f"{gpus}; {runs}; {len(self.summary)} cells"

    def ours(self, key: Key) -> dict:
        """The summary row of ours in a cell; its status is "absent" where there is none."""
        return self.summary.get(key, {}).get(OURS, {"status": "absent", "reason": ""})

    def twin(self, key: Key) -> Estimate:
        rivals = self.counted[key]
        few = len(rivals[OURS].times()) < stats.FEWEST_BLOCKS
        twin = comparisons.gap(rivals, TWIN)
        return UNKNOWN if twin is None or few else twin


def same_gpu(old: Run, new: Run) -> bool:
    ops = set(old.sidecars) & set(new.sidecars)
    gpus = old.gpus(ops) | new.gpus(ops)
    return len(gpus) == 1 and "" not in gpus


def shared(old: Run, new: Run) -> list[Key]:
    """The cells in which both runs have a time of ours that counts."""
    return [key for key, rivals in old.counted.items() if OURS in rivals and _timed(new, key)]


def control(old: Run, new: Run) -> str:
    """The baseline that is the same code in both runs, in most cells; "" without one."""
    found: dict[str, int] = {}
    for key in comparisons.claimed(shared(old, new)):
        for impl in set(old.counted[key]) & set(new.counted[key]) - {OURS, TWIN}:
            versions = {run.counted[key][impl].first["impl_version"] for run in (old, new)}
            found[impl] = found.get(impl, 0) + (len(versions) == 1 and "" not in versions)
    known = [impl for impl in found if found[impl]]
    return max(known, key=lambda impl: (impl == FIRST_CONTROL, found[impl], impl), default="")


def times(old: Run, new: Run) -> dict[Key, Difference]:
    """The log of the old time of ours over the new, by cell.

    Networks have one that decides nothing, and teach the others nothing.
    """
    keys, same = shared(old, new), control(old, new)
    claimed = comparisons.claimed(keys)
    gaps = {key: unpaired(old, new, key, same) for key in keys}
    length = {key: float(np.median(list(old.counted[key][OURS].times().values()))) for key in keys}
    known = inference.known({key: (length[key], gaps[key]) for key in claimed})
    decisive = set(claimed) if same else set()
    return {
        key: Difference(
            unpaired(old, new, key, OURS),
            own_offset(old, new, key, OURS) or known.at(length[key]),
            (old.twin(key), new.twin(key), gaps[key], *[UNKNOWN] * (key not in decisive)),
        )
        for key in keys
    }


def own_offset(old: Run, new: Run, key: Key, impl: str) -> Offset | None:
    """The offset between the times of an implementation in a cell that is unsteady in a run.

    The wider one if it is so in both; None if it is in neither.
    """
    found = [run.known.own[key] for run in (old, new) if key in run.known.own]
    if not found:
        return None
    processes = (run.counted[key][impl].processes for run in (old, new))
    return OwnOffset(max(found)).between(math.nan, *processes)


def ratios(old: Run, new: Run) -> dict[tuple[Key, str], Difference]:
    """The log of the new ratio (a baseline's time over ours) over the old, by cell and baseline."""
    before = {(one.key, one.baseline): one.difference for one in old.compared}
    found = {}
    for one in new.compared:
        if (was := before.get((one.key, one.baseline))) is not None:
            now = one.difference
            log, offset = _minus(now.log, was.log), now.offset.joined(was.offset)
            found[one.key, one.baseline] = Difference(log, offset, (*was.gaps, *now.gaps))
    return found


def cell_rows(old: Run, new: Run) -> list[dict]:
    """A row for each cell of either run, or for each cell and baseline if the GPUs differ.

    The verdict is that of the change, or one of these:

    - lost, gained: ours had a time that counts and has none, or the reverse.
    - missing, new: only the first run has the cell, or only the second. A run that was closed
      does not have the cells that it did not reach.
    - untimed: ours has no time that counts in either run.
    """
    words = TIMES if same_gpu(old, new) else RATIOS
    if words is TIMES:
        found = {(key, ""): one for key, one in times(old, new).items()}
    else:
        found = ratios(old, new)
    judged = dict(zip(found, inference.judged([[one] for one in found.values()]), strict=True))
    rows = []
    for (key, baseline), row in judged.items():
        row["verdict"] = words.get(row["verdict"], row["verdict"])
        rows.append(_named(key, baseline) | _both(old, new, key, baseline) | row)
    told = {key for key, _ in judged}
    for key in dict.fromkeys([*old.summary, *new.summary]):
        if key not in told:
            rows.append(_named(key, "") | _both(old, new, key, "") | _hole(old, new, key))
    return rows


def mean_rows(old: Run, new: Run) -> tuple[list[dict], float]:
    """How the times of ours changed by (op, pass), and whether they got worse over all cells.

    The second is a p-value. Its hypothesis is that the new run is slower by MARGIN or more in the
    geometric mean over all cells but those of training (`timings.parts`) and of networks. A small
    one shows that the run is the same or better.
    """
    found = times(old, new)
    groups = inference.grouped(found, lambda key: (key[0], key[3]))
    rows = []
    judged = inference.judged([[found[key] for key in keys] for keys in groups.values()])
    for ((op, pass_), keys), row in zip(groups.items(), judged, strict=True):
        row["verdict"] = TIMES.get(row["verdict"], row["verdict"])
        rows.append({"op": op, "pass": pass_, "cells": len(keys)} | row)
    claimed, part = comparisons.claimed(found), timings.parts(old.counted)
    told = [found[key] for key in claimed if part[key] == timings.HEADLINE]
    ops = {key[0] for key in claimed}
    if not told or any(np.isnan(row["p"]) for row in rows if row["op"] in ops):
        return rows, 1.0
    return rows, float(stats.above(inference.proving(told), -stats.MARGIN))


def claim_rows(old: Run, new: Run) -> list[dict]:
    """For each claim of the old run, what the new one says of the same cells and rivals; those
    against the best rival first.

    outcome: "reproduced", "not reproduced", "undecided" or "not testable".
    """
    said = _claims(old.compared, old.summary)
    asked = {(one.key, one.baseline) for one in old.compared}
    again = [one for one in new.compared if (one.key, one.baseline) in asked]
    answers = {_claim(row): row for row in _claims(again, old.summary)}
    rows = []
    for claim in said:
        answer = answers.get(_claim(claim), {"cells": 0})
        if answer["cells"] and answer["rivals"] < claim["rivals"] and answer["verdict"] != "worse":
            # To be ahead of fewer is less; to be behind one of them is enough.
            answer = {"cells": 0}
        row = {name: claim[name] for name in ("against", "op", "pass", "baseline")}
        row |= {"cells": answer["cells"], "of": claim["cells"]}
        for name in ("ratio", "ci_lo", "ci_hi", "verdict"):
            row |= {f"old_{name}": claim[name], f"new_{name}": answer.get(name, "")}
        rows.append(row | {"outcome": outcome(claim["verdict"], row["new_verdict"])})
    return rows


def outcome(old: str, new: str) -> str:
    """The outcome of a claim, from its verdict in both runs; "" where the new one has none."""
    if not new:
        return "not testable"
    if "undecided" in (old, new):
        return "undecided"
    return "reproduced" if old == new else "not reproduced"


def _claims(compared: Sequence[comparisons.Comparison], summary: Mapping) -> list[dict]:
    return comparisons.best_rows(compared, summary) + comparisons.claim_rows(compared, summary)


def _claim(row: Mapping) -> tuple:
    """The key that tells claims apart; that against the best is the same whoever is the closest."""
    about = row["against"], row["op"], row["pass"], row["timed_by"]
    return (*about, row["baseline"]) if row["against"] == "each" else about


def _timed(run: Run, key: Key) -> bool:
    return OURS in run.counted.get(key, {})


def unpaired(old: Run, new: Run, key: Key, impl: str) -> Estimate | None:
    """The log of the old time of an implementation in a cell over the new; None if one lacks it."""
    found = [run.counted[key].get(impl) for run in (old, new)]
    if None in found:
        return None
    before, after = (stats.log_median(list(cell.times().values())) for cell in found)
    return _minus(before, after)


def _minus(one: Estimate, other: Estimate) -> Estimate:
    widened = stats.plus(one, other.variance, other.freedom)
    return Estimate(one.value - other.value, widened.variance, widened.freedom)


def _hole(old: Run, new: Run, key: Key) -> dict:
    before, after = old.ours(key)["status"], new.ours(key)["status"]
    if (before in NOT_ASKED) != (after in NOT_ASKED):
        return {"verdict": "missing" if after in NOT_ASKED else "new"}
    had, has = _timed(old, key), _timed(new, key)
    if had and has:
        return {"verdict": "undecided"}
    return {"verdict": "lost" if had else "gained" if has else "untimed"}


def _named(key: Key, baseline: str) -> dict:
    return dict(zip(KEY, key, strict=True)) | {"baseline": baseline}


def _both(old: Run, new: Run, key: Key, baseline: str) -> dict:
    """The figures of both runs for ours in a cell: its time in us, or its ratio to a baseline."""
    column = f"speedup_vs_{baseline}" if baseline else "device_us"
    row: dict = {"unit": "ratio" if baseline else "us"}
    for name, run in (("old", old), ("new", new)):
        ours = run.ours(key)
        row |= {name: ours.get(column), f"{name}_pct_sol": ours.get("pct_sol")}
        row |= {f"{name}_status": ours["status"], f"{name}_reason": ours["reason"]}
    return row

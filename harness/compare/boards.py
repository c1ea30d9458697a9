"""Says how far times lie apart on two GPUs of one model, and how long two runs were measuring.

`python -m harness.compare.boards results/one results/two [--csv FILE]` reads two runs of the same
code, such as two studies on a GPU each, or one on a GPU and one on several. All implementations
whose version is the same in both count: none of them has changed, so what differs is the board, the
process and the moment. Ops that both runs measured on the same board show what the last two do
without the first. Networks are left out, as from all claims.

The times of two runs share no block. A difference is uncertain by the blocks of both, and by the
offsets of two processes that run the same code, which the A/A twins of both runs tell. The noise
floor is that of the wider twin.
"""

import argparse
import csv
import datetime
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from harness.cli import UserError, run
from harness.compare import changes
from harness.compare.changes import Key, Run
from harness.files import whole_file
from harness.project.implementations import TWIN
from harness.results import parts
from harness.summarize import __main__ as summarize
from harness.summarize import comparisons, inference, timings
from harness.summarize.inference import Difference

COLUMNS = (
    "boards,op,board_one,board_two,cells,ratio,ci_lo,ci_hi,noise,p,p_holm,verdict,apart_median,"
    "apart_most,beyond"
)
ONE, TWO = "one", "two"
WORDS = {"better": "two faster", "worse": "two slower", "no difference": "same"}
ALL = "all"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="harness.compare.boards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("one", type=Path, help="a recorded folder, or that of a run")
    parser.add_argument("two", type=Path, help="the same")
    parser.add_argument("--csv", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    one, two = Run.read(options.one), Run.read(options.two)
    if not changes.same_gpu(one, two):
        models = ", ".join(sorted(one.gpus(one.sidecars) | two.gpus(two.sidecars)))
        raise UserError(f"{options.two}: not of one GPU model with {options.one}: {models}")
    found = rows(one, two)
    if not found:
        raise UserError(
            f"{options.two}: no kernel in {options.one} by the same version of a library"
        )
    if options.csv:
        with whole_file(options.csv) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS.split(","), lineterminator="\n")
            writer.writeheader()
            writer.writerows(summarize.texts(row) for row in found)
    folders = ((options.one, one), (options.two, two))
    print("\n".join([*(stage(folder, each) for folder, each in folders), *walls(one, two)]))
    print("\n".join(line(row) for row in found))


def rows(one: Run, two: Run) -> list[dict[str, object]]:
    """Return a row for each op and one for all of each kind: on two boards, and on one.

    `ratio` is the geometric mean over cells and implementations of the first run's time over the
    second's. `apart_median` and `apart_most` are of the single cells, as fractions, and `beyond`
    counts those that differ by more than 1 % and their noise.
    """
    found = differences(one, two)
    kinds = {key: ONE if _board(one, key) == _board(two, key) else TWO for key, _ in found}
    rows = []
    for kind in (TWO, ONE):
        mine = {at: found[at] for at in found if kinds[at[0]] == kind}
        groups: dict[str, list] = inference.grouped(mine, lambda at: at[0][0])
        if len(groups) > 1:
            groups[ALL] = list(mine)
        judged = inference.judged([[mine[at] for at in group] for group in groups.values()])
        single = inference.judged([[each] for each in mine.values()])
        apart = {at: abs(float(one.log.value)) for at, one in mine.items()}
        differ = [row["verdict"] in ("better", "worse") for row in single]
        beyond = dict(zip(mine, differ, strict=True))
        for (op, group), row in zip(groups.items(), judged, strict=True):
            about = {"boards": kind, "op": op, "cells": len(group)}
            for name, each in ((ONE, one), (TWO, two)):
                boards = {_board(each, key) for key, _ in group}
                about[f"board_{name}"] = " ".join(sorted(boards))
            distances = [apart[at] for at in group]
            about |= {"apart_median": float(np.median(distances)), "apart_most": max(distances)}
            about |= {"beyond": sum(beyond[at] for at in group)}
            rows.append(about | row | {"verdict": WORDS.get(row["verdict"], row["verdict"])})
    return rows


def differences(one: Run, two: Run) -> dict[tuple[Key, str], Difference]:
    """The log of the first time over the second, by cell and implementation."""
    noise = {
        (number, *key): gap
        for number, each in enumerate((one, two))
        for key, gap in comparisons.noise(each.counted).items()
    }
    known, found = inference.known(noise), {}
    for key in comparisons.claimed(changes.shared(one, two)):
        before, after = one.counted[key], two.counted[key]
        for impl in before:
            if impl == TWIN or impl not in after:
                continue
            versions = {cell[impl].first["impl_version"] for cell in (before, after)}
            if len(versions) > 1 or "" in versions:
                continue
            length = float(np.median(list(before[impl].times().values())))
            processes = before[impl].processes, after[impl].processes
            own = changes.own_offset(one, two, key, impl)
            offset = own or known.between(length, *processes)
            log = changes.unpaired(one, two, key, impl)
            found[key, impl] = Difference(log, offset, (one.twin(key), two.twin(key)))
    return found


def stage(folder: Path, run: Run) -> str:
    """Return a line on the measuring stage of a run."""
    cars = run.parts
    boards = {parts.uuid(car) for car in cars}
    spent = sum(car.get("overhead", {}).get("total_s", math.nan) for car in cars)
    about = f"{folder}: {len(run.sidecars)} ops on {len(boards)} GPUs, jobs of {spent:.0f} s in all"
    if (wall := wall_s(cars)) is None:
        return f"{about}; when they began and ended is not told"
    again = sum(car.get("resumed", 0) > 0 for car in cars)
    note = f"; {again} ops were interrupted, so this is no wall time of the stage" * bool(again)
    return f"{about}, {wall:.0f} s from the first to the last{note}"


def walls(one: Run, two: Run) -> list[str]:
    """Return a line on how the wall times of two runs compare, if both tell them."""
    first, second = (wall_s(each.parts) for each in (one, two))
    if first is None or not second:
        return []
    if set(one.sidecars) != set(two.sidecars):
        return ["The runs measured different ops, so their wall times do not compare."]
    return [f"Measuring took {first / second:.2f} times as long in the first as in the second."]


def wall_s(cars: Iterable[Mapping]) -> float | None:
    """Return the seconds from the first lock of a GPU to the last row; None if one is not told."""
    spans = [car.get("span") for car in cars]
    if not all(spans):
        return None
    began, ended = ([_moment(span[key]) for span in spans] for key in ("began", "ended"))
    return (max(ended) - min(began)).total_seconds()


def line(row: Mapping) -> str:
    """Return a row as it is printed."""
    where = "on two boards" if row["boards"] == TWO else "on one board "
    mean = f"{row['ratio']:.4f} ({row['ci_lo']:.4f} to {row['ci_hi']:.4f})"
    noise = "unknown" if math.isnan(row["noise"]) else f"{row['noise']:.2%}"
    mean += f", noise {noise}, {row['verdict']}"
    cells = f"{row['cells']} cells apart by {row['apart_median']:.2%}, at most"
    cells += f" {row['apart_most']:.2%}, {row['beyond']} beyond the noise"
    return f"{row['op']:<22} {where} {mean}; {cells}"


def _board(run: Run, key: Key) -> str:
    return timings.board(run.counted[key]) or parts.uuid(run.sidecars[key[0]])


def _moment(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


if __name__ == "__main__":
    run(main)

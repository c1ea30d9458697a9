"""Which runs hold what only a GPU can make again: such a run gives way to a new measurement alone.

Standard library only: `make clean` runs it before anything is installed. `python -m
harness.results.measured` removes the other runs below `results/`; `--also NAME` one of these.
"""

import argparse
import csv
import json
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from harness.cli import UserError, run
from harness.project.implementations import TWIN
from harness.results.columns import DRAWN
from harness.status import TIMED

RESULTS = Path(__file__).resolve().parents[2] / "results"
RECORDED = "recorded"
MODE = "replayed"
# Snakemake's option that removes what all rules have made, as short as it is understood.
DELETE = "--delete-a"


def held(folder: Path) -> list[str]:
    """The ops below `folder`/raw whose times were measured, sorted.

    Only a sidecar that says so makes times replayed ones: a file without one, or with one that
    cannot be read, may be all that is left of a measurement.
    """
    paths = [path for end in ("csv", "json") for path in (folder / "raw").glob(f"*.{end}")]
    places = {path.with_suffix(".csv") for path in paths if not path.name.startswith(".")}
    return sorted(place.stem for place in places if is_held(place))


def is_held(csv: Path) -> bool:
    """Whether `csv` or its sidecar is there and no replay wrote them."""
    sidecar = csv.with_suffix(".json")
    return (csv.exists() or sidecar.exists()) and not _replayed(sidecar)


def refuse(folder: Path, why: str) -> None:
    """Raises UserError where `folder` holds measured times. why: what would write over them."""
    if ops := held(folder):
        names = ", ".join(ops[:3]) + (", …" if len(ops) > 3 else "")
        place = os.path.relpath(folder / "raw")
        raise UserError(
            f"{place}: holds measured times ({names}), and {why} would write over them; "
            "set another run, as in: snakemake --cores all --config run=replay"
        )


def refuse_deletion(folder: Path, words: Sequence[str]) -> None:
    """Raises UserError where the words of a command ask to delete a run that only a GPU makes."""
    if any(word.startswith(DELETE) for word in words) and _precious(folder):
        raise UserError(
            f"{os.path.relpath(folder)}: was measured, and --delete-all-output would remove it; "
            f"make clean RUN={folder.name} does, if that is meant"
        )


def refuse_narrower(csvs: Collection[tuple[Path, Collection[str]]], **wanted) -> None:
    """Raises UserError where a measurement would replace times that it does not take again.

    csvs: of each op its raw CSV file and the implementations to be timed. wanted: as of `lacking`.
    """
    found = {path: list(lacking(path, impls, **wanted)) for path, impls in csvs}
    if wide := {path: names for path, names in found.items() if names}:
        path, names = next(iter(wide.items()))
        names = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        others = f" (and {len(wide) - 1} other ops)" if len(wide) > 1 else ""
        raise UserError(
            f"{os.path.relpath(path)}{others}: holds measured times that this measurement leaves "
            f"out ({names}); set another run, or narrower=True to have it replace them"
        )


def lacking(
    path: Path,
    impls: Collection[str],
    *,
    dtypes: Collection[str],
    passes: Collection[str],
    max_cases: int | None,
    part: tuple[int, int] | None = None,
) -> Iterator[str]:
    """Words for what a measured raw CSV has times of and a measurement of these leaves out.

    part: that of the shapes which the measurement times, as `cli.part` has it; None for all. A cell
    without a time is no loss. Nothing is known of a file that cannot be read.
    """
    if not is_held(path):
        return
    try:
        with path.open(newline="", encoding="utf-8") as file:
            every = [row for row in csv.DictReader(file) if row.get("set") != DRAWN]
        rows = [row for row in every if row["status"] in TIMED]
        for column, kept in (("dtype", dtypes), ("pass", passes), ("impl", (*impls, TWIN))):
            yield from sorted({row[column] for row in rows} - set(kept))
        cases = {row["case"] for row in rows}
        # The file has all shapes in the order of the sweep, by which they go to the parts.
        shapes = list(dict.fromkeys((row["case"], row["dtype"]) for row in every))
        timed = {(row["case"], row["dtype"]) for row in rows}
    except (OSError, ValueError, LookupError, csv.Error):
        return
    if max_cases is not None and len(cases) > max_cases:
        yield f"{len(cases) - max_cases} cases"
    if part is not None and timed - set(shapes[part[0] - 1 :: part[1]]):
        yield "shapes of other parts"


def _replayed(sidecar: Path) -> bool:
    try:
        return json.loads(sidecar.read_text(encoding="utf-8"))["mode"] == MODE
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _precious(folder: Path) -> bool:
    """Whether a folder, or one below it, holds times, the finished cells of an interrupted
    measurement, or tuning.
    """
    if any(held(place.parent) for place in folder.rglob("raw")):
        return True
    return any(any(folder.rglob(end)) for end in ("raw/.*.journal", "tuned/*.json"))


def clean(results: Path, also: list[str]) -> list[str]:
    """Removes the runs below `results` that can be made again, and those named in `also`.

    Returns the names of those that stay; raises UserError for a name that is no run.
    """
    runs = {path.name: path for path in sorted(results.glob("*")) if path.is_dir()}
    runs.pop(RECORDED, None)
    if unknown := sorted(set(also) - set(runs)):
        raise UserError(f"{results}/{unknown[0]}: no such run; there are: {', '.join(runs)}")
    kept = [name for name, path in runs.items() if name not in also and _precious(path)]
    for name in set(runs) - set(kept):
        shutil.rmtree(runs[name])
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--also", nargs="*", default=[], help="measured runs to remove as well")
    for name in clean(RESULTS, parser.parse_args().also):
        print(f"kept results/{name}: measured; make clean RUN={name} removes it", file=sys.stderr)


if __name__ == "__main__":
    run(main)

"""Puts the tables that a run tuned where git keeps them.

`python -m harness.tune.merge --run results/study --into kernels/tuned` puts the tables that
a run made (tuning: tune) into the one of their GPU; a family is replaced whole.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from harness import cli, files
from harness.build.tables import read, tunable
from harness.cli import UserError
from harness.machine.environment import ROOT, describe, model
from kernels._runtime import configs as _tuned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--allow-dirty", action="store_true", help="keep uncommitted code's too")
    options = parser.parse_args()
    for path, family in merge(options.run, options.into, options.allow_dirty):
        print(f"{path}: {family}", file=sys.stderr)


def merge(run: Path, into: Path, allow_dirty: bool) -> list[tuple[Path, str]]:
    """Puts every family of a run's tables into those of `into`, or none; returns what went where.

    Raises UserError where the run has no table, or a broken one, or, unless allowed, one made by
    code that no commit holds.
    """
    sources = sorted((run / "tuned").glob("*.json"))
    if not sources:
        raise UserError(f"{run}/tuned: holds no table; make them with tuning: tune on a GPU")
    merged, went = {}, []
    for source in sources:
        fresh = read(source)
        path = into / f"{model(fresh['device'])}.json"
        if path not in merged:
            empty = {"device": fresh["device"], "families": {}}
            merged[path] = read(path) if path.is_file() else empty
        for family, record in fresh["families"].items():
            if record["dirty"] and not allow_dirty:
                raise UserError(f"{source}: tuned uncommitted code; commit it and tune again")
            merged[path]["families"][family] = record
            went.append((path, family))
    for path, table in merged.items():
        files.write_json(path, table | {"families": dict(sorted(table["families"].items()))})
    return went


def record(stem: str, entries: Mapping[str, list]) -> dict[str, object]:
    """The part of a table that belongs to one kernel file, with what it was tuned on: now, here."""
    import triton

    environment = describe(ROOT, "")
    kernels = tunable(stem)
    return {
        "run_id": environment["run_id"],
        "commit": environment["commit"],
        "dirty": environment["dirty"],
        "driver": (environment["gpu"] or {}).get("driver"),
        "triton": triton.__version__,
        "kernels": {
            name: {"source_sha256": _tuned.source_sha256(kernels[name].kernel), "keys": keys}
            for name, keys in entries.items()
        },
    }


if __name__ == "__main__":
    cli.run(main)

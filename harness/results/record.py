"""Copies the ops that a run measured, with their verification, to where git keeps them.

`python -m harness.results.record --run results/study --into results/recorded/hopper`; an op is
replaced whole: CSV, sidecar and reports of all its implementations come from one run. If the run
lacks cells that the record has, both must be parts of one measurement (`harness.results.parts`),
and are joined. A commit that the run was told by its first digits is written out, if the history
here knows it. The
sanitizer's report on a kernel file goes along, and so does what was seen within a training step or
of the forms of a kernel. A run may hold that alone.
`manifest.json` holds the digest of each file; `--seal` writes it for what lies in a recorded
folder.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import cli, files
from harness.cli import UserError
from harness.machine import environment
from harness.project.implementations import TWIN
from harness.results import csv_rows, manifest, parts, raw, schema
from harness.results.columns import DISSECTED, DRAWN

ROOT = Path(__file__).resolve().parents[2]
RESTORE = "restore it from git"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--allow-dirty", action="store_true", help="record uncommitted code too")
    parser.add_argument("--seal", type=Path, help="only write the manifest of this recorded run")
    options = parser.parse_args()
    if options.seal:
        print(f"sealed {', '.join(manifest.seal(options.seal))}", file=sys.stderr)
        return
    if not (options.run and options.into):
        parser.error("give --run and --into, or --seal")
    for name in record(options.run, options.into, options.allow_dirty):
        print(f"recorded {name}", file=sys.stderr)


def record(run: Path, into: Path, allow_dirty: bool) -> list[str]:
    """Copies every op of `run` that has a time, or none; returns the names of all it recorded.

    An op that the configuration leaves no case, or that failed in all, would take the place of a
    record with times; it is named and left out. Raises UserError where a file is missing or broken,
    was replayed, or, unless allowed, comes from a tree with changes that no commit holds.
    """
    remedy = "measure it again: python -m harness.measure"
    sources = {path.stem: path for path in sorted((run / "raw").glob("*.csv"))}
    dissected = _dissected(run, allow_dirty)
    if not (sources or dissected):
        raise UserError(f"{run}/raw: holds no measurement; {remedy}")
    reports, sidecars, joined = {}, {}, {}
    for op, path in list(sources.items()):
        rows, sidecar = raw.read(path, remedy)
        if sidecar["mode"] != "measured":
            raise UserError(f"{path}: was {sidecar['mode']}, not measured; {remedy}")
        if sidecar.get("dirty", True) and not allow_dirty:
            raise UserError(f"{path}: measured on uncommitted code; commit it and {remedy}")
        if not any(row["status"] in raw.TIMED for row in rows):
            print(f"{op}: not recorded, it has no time", file=sys.stderr)
            del sources[op]
            continue
        impls = dict.fromkeys(row["impl"] for row in rows if row["impl"] != TWIN)
        reports[op] = [run / "verify" / op / f"{impl}.json" for impl in impls]
        again = f"verify it again: python -m harness.verify --op {op}"
        verdicts = {path.stem: schema.read(path, "verification", again) for path in reports[op]}
        if whole := _with_whole_commit(sidecar):
            sidecar = sidecars[op] = whole
        if sidecar.get("unreached") and _lost(into / "raw" / path.name, rows):
            rows, sidecar, verdicts = _joined(into, op, (rows, sidecar), verdicts)
            joined[op] = rows, sidecar, verdicts
        if sidecar.get("unreached"):
            print(f"{op}: {sidecar['unreached']} of its cells were not reached", file=sys.stderr)
    if not (sources or dissected):
        raise UserError(f"{run}/raw: holds no time; {remedy}")
    for op, path in sources.items():
        _replace_folder(into / "verify" / op, reports[op])
        place, beside = into / "raw" / path.name, path.with_suffix(".json")
        if op in joined:
            rows, sidecar, verdicts = joined[op]
            for impl, report in verdicts.items():
                files.write_json(into / "verify" / op / f"{impl}.json", report)
            raw.write(place, rows, sidecar)
            continue
        if op in sidecars:
            files.write_json(into / "raw" / beside.name, sidecars[op])
        else:
            _replace_file(into / "raw" / beside.name, beside)
        _replace_file(place, path)
    sanitized = sorted((run / "sanitize").glob("*.json"))
    for source in sanitized:
        _replace_file(into / "sanitize" / source.name, source)
    for source in dissected:
        _replace_file(into / "dissect" / source.name, source)
    families, others = [p.stem for p in sanitized], [f"dissect/{p.name}" for p in dissected]
    manifest.write(into, sources, families, others)
    return [*sources, *others]


def _lost(recorded: Path, rows: list[dict]) -> bool:
    """Whether a recorded op has times of a cell that a part or a closed measurement lacks.

    Shapes that were drawn for the recorded run are lacking only if they are this run's as well.
    """
    if not recorded.is_file():
        return False
    old = [row for row in raw.read(recorded, RESTORE)[0] if row["status"] in raw.TIMED]
    unreached = {parts.cell(row) for row in rows if row["status"] == "unreached"}
    there = {parts.cell(row) for row in rows}
    grid = {parts.cell(row) for row in old if row["set"] != DRAWN}
    return bool(grid - there or {parts.cell(row) for row in old} & unreached)


def _joined(
    into: Path, op: str, new: tuple[list[dict], dict], verdicts: dict[str, dict]
) -> tuple[list, dict, dict]:
    """Rows, sidecar and reports of the recorded part of an op and of a new one."""
    old = raw.read(into / "raw" / f"{op}.csv", RESTORE)
    pairs = {}
    for impl, verdict in verdicts.items():
        path = into / "verify" / op / f"{impl}.json"
        before = schema.read(path, "verification", RESTORE) if path.is_file() else None
        pairs[impl] = before, verdict
    return parts.joined(old, new, pairs)


def _dissected(run: Path, allow_dirty: bool) -> list[Path]:
    """The files of what was seen within a step or of a kernel's forms.

    Each row tells its GPU and its commit. Raises UserError where a file has no row that is right,
    or one without a GPU, or, unless allowed, one of a tree with changes that no commit holds.
    """
    found = sorted((run / "dissect").glob("*.csv"))
    for path in found:
        remedy = f"make it again: python -m harness.measure.dissect {path.stem}"
        if path.stem not in DISSECTED:
            known = ", ".join(sorted(DISSECTED))
            raise UserError(f"{path}: no file of a run; remove it. There are: {known}")
        rows = csv_rows.read(path, DISSECTED[path.stem], remedy)
        if not all(row["commit"] for row in rows):
            raise UserError(f"{path}: a row without its commit; {remedy}")
        if not any(row["status"] == "ok" for row in rows):
            raise UserError(f"{path}: holds no row that is right; {remedy}")
        if not all(row["gpu"] for row in rows):
            raise UserError(f"{path}: was not made on a GPU; {remedy} on a machine that has one")
        if not allow_dirty and any(row["commit"].endswith(environment.DIRTY) for row in rows):
            raise UserError(f"{path}: made of uncommitted code; commit it and {remedy}")
    return found


def _with_whole_commit(sidecar: dict) -> dict | None:
    """Return a sidecar with all digits of its commit; None if nothing is to be written out."""
    if not re.fullmatch("[0-9a-f]{7,39}", sidecar["commit"]):
        return None
    call = [
        "git",
        "-C",
        str(ROOT),
        "rev-parse",
        "--verify",
        "-q",
        f"{sidecar['commit']}^{{commit}}",
    ]
    try:
        commit = subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    surroundings = sidecar["environment"] | {"commit": commit}
    digest = raw.environment_sha256(surroundings)
    return sidecar | {
        "commit": commit,
        "environment": surroundings,
        "environment_sha256": digest,
    }


def _replace_file(place: Path, source: Path) -> None:
    with files.whole_file(place) as temporary:
        shutil.copyfile(source, temporary)


def _replace_folder(folder: Path, files: list[Path]) -> None:
    """Puts a folder with copies of these files in the place of the old one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        fresh, old = Path(name) / "fresh", Path(name) / "old"
        fresh.mkdir()
        for file in files:
            shutil.copyfile(file, fresh / file.name)
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)


if __name__ == "__main__":
    cli.run(main)

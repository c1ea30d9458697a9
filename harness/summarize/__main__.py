"""Turns raw rows and reports into the CSV files that the paper reads.

`python -m harness.summarize --run results/<run> --recorded results/recorded/<machine>` reads
raw/, verify/, build/ and environment.json of the run; of ops that were replayed it also reads the
verification reports of the recorded run.
"""

import argparse
import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from harness.cli import UserError, run
from harness.files import write_text
from harness.machine import datasheets
from harness.project import libraries, source_tree, tuned_tables
from harness.project.implementations import OURS
from harness.results import columns, manifest, parts, reports, schema
from harness.results.times import limits, measurements
from harness.summarize import (
    capabilities,
    comparisons,
    ledger,
    networks,
    rates,
    tables,
    timings,
)

ROOT = Path(__file__).resolve().parents[2]
TUNED = ROOT / "kernels" / "tuned"
BASELINES = ROOT / "baselines"
# Every user of the kernels has these: PyTorch, and Triton's tutorials.
PLAIN = {"torch", "triton"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="harness.summarize", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--recorded", type=Path, required=True, help="folder of the recorded run")
    parser.add_argument("--ops", nargs="+", help="leave out what the folder holds beside these")
    parser.add_argument("--untimed", nargs="*", default=[], help="ops that are verified only")
    arguments = parser.parse_args()
    print(summarize(arguments.run, arguments.recorded, arguments.ops, arguments.untimed))


def summarize(
    folder: Path, recorded: Path, ops: Sequence[str] | None = None, untimed: Sequence[str] = ()
) -> str:
    """Writes the CSV files into `folder`; says what measuring took.

    untimed: ops whose reports and builds are shown without times. Raises UserError where the folder
    holds no measurement.
    """
    study = measurements(folder, ops)
    rows = {op: rows for op, (rows, _) in study.items()}
    sidecars = {op: sidecar for op, (_, sidecar) in study.items()}
    if not any(rows.values()):
        raise UserError(f"{folder}/raw: no op has a cell; widen dtypes, passes or ops")
    summary = _write_cells(folder, study)
    _write_networks(folder, recorded, summary, study)
    families = {op: found[0]["family"] for op, found in rows.items() if found}
    silent = {op for op in (*rows, *untimed) if op not in families}
    families |= {op: stem for op, stem in source_tree.every_op(ROOT).items() if op in silent}
    if replayed := [op for op, car in sidecars.items() if car["mode"] == "replayed"]:
        manifest.check(recorded, replayed, {families[op] for op in replayed if op in families})
    here = [folder / "verify" / op for op in untimed if op not in sidecars]
    found = reports.verified([*reports.folders(folder, recorded, sidecars), *here])
    _write(folder, columns.VERIFICATION, tables.verification(found, families))
    _write(folder, columns.CAPABILITIES, capabilities.rows(found, families))
    _write(folder, columns.GAPS, capabilities.gaps(found, families))
    _write(folder, columns.LEDGER, ledger.rows(found, families, rows))
    sanitized = tables.sanitizer(folder, recorded, families.values())
    _write(folder, columns.SANITIZER, sanitized)
    builds = [
        schema.read(path, "build", reports.REMEDY)
        for path in sorted((folder / "build").glob("*.json"))
        if path.stem in families.values()
    ]
    resources = list(tables.resources(builds))
    _write(folder, columns.RESOURCES, resources, instruction=tables.instructions(builds))
    _write(folder, columns.IR, tables.ir(builds))
    shown = tables.runs(sidecars, tables.changed(found, sidecars))
    _write(folder, columns.RUNS, shown)
    paths = tuned_tables.in_force(TUNED)
    in_force = {path.name: schema.read(path, "tuned", reports.REMEDY) for path in paths}
    tuning = tables.tuning(in_force, builds, {row["gpu"] for row in shown})
    _write(folder, columns.TUNING, tuning)
    machine = schema.read(folder / "environment.json", "environment", reports.REMEDY)
    environments = [
        (
            car["run_id"],
            car["environment"] | {key: car[key] for key in ("environment_sha256",) if key in car},
        )
        for whole in sidecars.values()
        for car in parts.of(whole)
    ]
    if machine["run_id"] not in dict(environments):
        own = {key: value for key, value in machine.items() if key != "gpus"}
        environments.append((machine["run_id"], own))
    _write(folder, columns.ENVIRONMENT, tables.environment(environments))
    _write(folder, columns.SHOWN_CEILINGS, tables.ceilings(sidecars))
    _write(folder, columns.DATASHEETS, datasheets.rows())
    write_text(folder / "columns.json", columns.declared())
    overhead = tables.overhead(rows, sidecars)
    _write(folder, columns.OVERHEAD, overhead)
    replayed = all(car["mode"] == "replayed" for car in sidecars.values())
    return ("of the recorded run, " if replayed else "") + _took(overhead[-1])


def _write_networks(
    folder: Path,
    recorded: Path,
    summary: Sequence[Mapping],
    study: Mapping[str, tuple[list[dict], dict]],
) -> None:
    """Write what is said of whole networks, and what was seen within a step of one."""
    whole = [op for op in source_tree.network_ops(ROOT) if op in study]
    ceilings = {
        (op, car["run_id"]): car["ceilings"] for op in whole for car in parts.of(study[op][1])
    }
    raw = [row for op in whole for row in study[op][0]]
    told = networks.call_times(raw), networks.remarks(raw)
    _write(folder, columns.NETWORK, networks.rows(summary, ceilings, *told))
    for table in columns.DISSECTED.values():
        _write(folder, table, networks.dissected(folder, recorded, table))


def _write_cells(folder: Path, study: Mapping[str, tuple[list[dict], dict]]) -> list[dict]:
    """Write the files on cells; return the rows of the summary."""
    grouped = {op: timings.group(rows) for op, (rows, _) in study.items()}
    every = {key: rivals for found in grouped.values() for key, rivals in found.items()}
    ceilings = {key: limits(study[key[0]][1], key[1:]) for key in every}
    counted = {key: timings.counted(rivals, ceilings[key]) for key, rivals in every.items()}
    noise, known = comparisons.noise(counted), comparisons.known(counted)
    summary = [
        row | {"run_id": parts.of_cell(study[key[0]][1], key[1:])["run_id"]}
        for key, rivals in every.items()
        for row in timings.summary(rivals, ceilings[key], known.of(key))
    ]
    sizes = sorted({key for row in summary for key in row if key.startswith("size_")})
    sizes = [key.removeprefix("size_") for key in sizes]
    impls = dict.fromkeys(row["impl"] for row in summary)
    _write(folder, columns.SUMMARY, summary, letter=sizes, impl=impls)
    compared = comparisons.comparisons(counted, known)
    verdicts = _described(comparisons.verdict_rows(compared), summary)
    _write(folder, columns.VERDICTS, verdicts)
    grid = [key for key, rivals in every.items() if next(iter(rivals.values())).set == timings.GRID]
    said = comparisons.best_rows(compared, grid) + comparisons.claim_rows(compared, grid)
    _write(folder, columns.CLAIMS, said)
    headline = comparisons.members([one for one in compared if one.part == timings.HEADLINE])
    found = rates.rows(*rates.material(noise, comparisons.processes(counted), headline))
    _write(folder, columns.RATES, found)
    return summary


def _described(verdicts: Iterable[Mapping], summary: Iterable[Mapping]) -> Iterator[dict]:
    """Verdicts with the bound of their cell and the MiB that it moves, from the summary. Each also
    has the library of the baseline, and the number of libraries of the op besides PyTorch and
    Triton.
    """
    verdicts = list(verdicts)
    ours = {tuple(row[name] for name in timings.KEY): row for row in summary if row["impl"] == OURS}
    library = {name: _library(name) for name in {row["baseline"] for row in verdicts}}
    found: dict[str, set[str]] = {}
    for row in verdicts:
        found.setdefault(row["op"], set()).add(library[row["baseline"]])
    for verdict in verdicts:
        row = ours[tuple(verdict[name] for name in timings.KEY)]
        moved = row["gbps"] * row["device_us"] * 1e3 / 2**20
        about = {"bound": row.get("bound", ""), "mib": moved, "flags": row["flags"]}
        about["library"] = library[verdict["baseline"]]
        yield dict(verdict) | about | {"outside": len(found[verdict["op"]] - PLAIN)}


def _library(impl: str) -> str:
    """The distribution of a baseline; its own name where this tree has no such file."""
    path = BASELINES / f"{impl}.py"
    return libraries.distribution(path) if path.is_file() else impl


def _took(row: Mapping) -> str:
    if "share" not in row:
        return "measuring: no sidecar tells what it took"
    return f"measuring took {row['total_s']:.0f} s, overhead {100 * row['share']:.0f} %"


def _write(
    folder: Path, table: columns.Table, rows: Iterable[Mapping], **names: Iterable[str]
) -> None:
    """Writes the CSV file of a table; names: as `columns.Table.expanded` takes them."""
    file, header = io.StringIO(), table.expanded(**names)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_text(row.get(name)) for name in header] for row in rows)
    write_text(folder / f"{table.name}.csv", file.getvalue())


def texts(row: Mapping) -> dict[str, object]:
    """A row as it is written: six digits of a float, and nothing where there is no number."""
    return {key: _text(value) for key, value in row.items()}


def _text(value: object) -> object:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


if __name__ == "__main__":
    run(main)

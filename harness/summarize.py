"""Turns raw rows and reports into the CSV files that the paper reads.

`python -m harness.summarize --run results/<run> --recorded results/recorded/<machine>` reads
raw/, verify/, build/ and environment.json of the run; of ops that were replayed it also reads the
verification reports of the recorded run.
"""

import argparse
import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from harness import cells, raw
from harness.command import UserError, read_json, run, whole_file

SUMMARY = "op,family,case,dtype,pass,impl,impl_version"
SUMMARY_VALUES = (
    "flags,blocks,device_us,ci_lo,ci_hi,call_us,peak_mem_bytes,gbps,tflops,floor_us,bound,pct_sol"
)
VERDICTS = "op,family,case,dtype,pass,baseline,ratio,ci_lo,ci_hi,noise,verdict"
VERIFICATION = "op,family,impl,impl_version,mode,cells,passed,worst_ratio,worst_case,status,reason"
IR = "file,kernel,stage,bytes,lines"
RUNS = "run_id,mode,date,commit,dirty,machine,gpu,ops"
ENVIRONMENT = "run_id,key,value"
CEILINGS = "run_id,quantity,unit,value,source"


def main() -> None:
    parser = argparse.ArgumentParser(prog="harness.summarize", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--recorded", type=Path, required=True, help="folder of the recorded run")
    parser.add_argument("--ops", nargs="+", help="leave out what the folder holds beside these")
    arguments = parser.parse_args()
    summarize(arguments.run, arguments.recorded, arguments.ops)


def summarize(folder: Path, recorded: Path, ops: Sequence[str] | None = None) -> None:
    """Writes the eight CSV files into `folder`; UserError where it holds no measurement."""
    paths = sorted((folder / "raw").glob("*.csv"))
    paths = [path for path in paths if ops is None or path.stem in ops]
    if not paths:
        raise UserError(f"{folder}/raw: no CSV file; run the measure or replay stage first")
    measured = {path.stem: raw.read(path, f"measure or replay {path.stem} again") for path in paths}
    rows = {op: rows for op, (rows, _) in measured.items()}
    sidecars = {op: sidecar for op, (_, sidecar) in measured.items()}
    _write_cells(folder, rows, sidecars)
    families = {op: found[0]["family"] for op, found in rows.items() if found}
    _write(
        folder / "verification.csv",
        VERIFICATION,
        _verification(folder, recorded, sidecars, families),
    )
    builds = [
        _json(path)
        for path in sorted((folder / "build").glob("*.json"))
        if path.stem in families.values()
    ]
    resources = list(_resources(builds))
    _write(folder / "resources.csv", _columns(resources), resources)
    _write(folder / "ir.csv", IR, _ir(builds))
    _write(folder / "runs.csv", RUNS, _runs(sidecars))
    here = _json(folder / "environment.json")
    environments = {car["run_id"]: car["environment"] for car in sidecars.values()}
    environments.setdefault(here["run_id"], here)
    _write(folder / "environment.csv", ENVIRONMENT, _environment(environments))
    _write(folder / "shown_ceilings.csv", CEILINGS, _ceilings(sidecars))


def _write_cells(folder: Path, raw_rows: Mapping[str, list], sidecars: Mapping[str, dict]) -> None:
    summary, verdicts = [], []
    for op, rows in raw_rows.items():
        ceilings = _limits(sidecars[op]["ceilings"])
        for rivals in cells.group(rows).values():
            summary += cells.summary(rivals, ceilings)
            verdicts += cells.verdicts(rivals)
    sizes = sorted({key for row in summary for key in row if key.startswith("size_")})
    impls = dict.fromkeys(row["impl"] for row in summary)
    speedups = [f"speedup_vs_{impl}{end}" for impl in impls for end in ("", "_lo", "_hi")]
    columns = ",".join([SUMMARY, *sizes, SUMMARY_VALUES, *speedups, "status", "reason"])
    _write(folder / "summary.csv", columns, summary)
    _write(folder / "verdicts.csv", VERDICTS, verdicts)


def _limits(ceilings: Sequence[Mapping]) -> dict[str, float]:
    """Each ceiling by its quantity; a measured one goes before the data sheet's."""
    ordered = sorted(ceilings, key=lambda row: row["source"] == "measured")
    return {row["quantity"]: float(row["value"]) for row in ordered}


def _verification(
    folder: Path, recorded: Path, sidecars: Mapping[str, dict], families: Mapping[str, str]
) -> Iterator[dict]:
    paths = [path for op in sidecars for path in (folder / "verify" / op).glob("*.json")]
    for op, sidecar in sidecars.items():
        if sidecar["mode"] == "replayed":
            paths += (recorded / "verify" / op).glob("*.json")
    reports = [_json(path) for path in paths]
    for report in sorted(
        reports, key=lambda r: (r["op"], r["impl"] != "ours", r["impl"], r["mode"])
    ):
        offered = [cell for cell in report["cells"] if cell["status"] != "unsupported"]
        worst, where = _worst(offered)
        yield {
            **{
                key: report[key]
                for key in ("op", "impl", "impl_version", "mode", "status", "reason")
            },
            "family": families.get(report["op"], ""),
            "cells": len(offered),
            "passed": sum(cell["status"] == "ok" for cell in offered),
            "worst_ratio": worst,
            "worst_case": where,
        }


def _worst(offered: Sequence[Mapping]) -> tuple[float | str, str]:
    """The largest ratio of error over bound, and its cell."""
    found = [
        (tensor["ratio"], f"{cell['case']} {cell['dtype']} {cell['pass']}")
        for cell in offered
        for tensor in cell["tensors"]
        if tensor["ratio"] is not None
    ]
    return max(found, key=lambda pair: pair[0], default=("", ""))


def _resources(builds: Iterable[Mapping]) -> Iterator[dict]:
    for build in builds:
        for kernel in build["kernels"]:
            yield {"file": build["file"]} | _flat(kernel)


def _ir(builds: Iterable[Mapping]) -> Iterator[dict]:
    for build in builds:
        for stage in build["ir"]:
            yield {"file": build["file"], **stage}


def _runs(sidecars: Mapping[str, dict]) -> list[dict]:
    found: dict[tuple[str, str], dict] = {}
    for op, car in sidecars.items():
        gpu = car["environment"].get("gpu") or {}
        row = {key: car[key] for key in ("run_id", "mode", "date", "commit", "dirty")}
        row |= {"machine": car["run_id"].split("-", 2)[-1], "gpu": gpu.get("name", ""), "ops": ""}
        row = found.setdefault((car["run_id"], car["mode"]), row)
        row["ops"] = f"{row['ops']} {op}".strip()
    return list(found.values())


def _environment(environments: Mapping[str, Mapping]) -> Iterator[dict]:
    for run_id, environment in environments.items():
        for key, value in _flat(environment).items():
            yield {"run_id": run_id, "key": key, "value": value}


def _ceilings(sidecars: Mapping[str, dict]) -> Iterator[dict]:
    seen = set()
    for car in sidecars.values():
        for row in car["ceilings"]:
            key = (car["run_id"], row["quantity"], row["source"])
            if key not in seen:
                seen.add(key)
                yield {"run_id": car["run_id"], **row}


def _flat(value: Mapping, prefix: str = "") -> dict:
    """Nested objects become dotted keys; those of `instructions` keep their own names."""
    flat = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, "" if key == "instructions" else f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _columns(rows: Iterable[Mapping]) -> str:
    return ",".join(dict.fromkeys(key for row in rows for key in row)) or "file,kernel"


def _json(path: Path) -> dict:
    return read_json(path, "run the stage that writes it again")


def _write(path: Path, columns: str, rows: Iterable[Mapping]) -> None:
    with whole_file(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, columns.split(","), extrasaction="ignore", lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows({key: _text(value) for key, value in row.items()} for row in rows)


def _text(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


if __name__ == "__main__":
    run(main)

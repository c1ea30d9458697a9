"""Turns raw rows and reports into the CSV files that the paper reads.

`python -m harness.summarize --run results/<run> --recorded results/recorded/<machine>` reads
raw/, verify/, build/ and environment.json of the run; of ops that were replayed it also reads the
verification reports of the recorded run.
"""

import argparse
import csv
import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from harness.cli import UserError, run
from harness.files import read_json, write_text
from harness.machine import datasheets
from harness.project import libraries, source_tree
from harness.project.registry import OURS
from harness.results import manifest, reports
from harness.results.times import limits, measurements
from harness.summarize import (
    capabilities,
    comparisons,
    inference,
    kernl,
    ledger,
    rates,
    tables,
    timings,
)

ROOT = Path(__file__).resolve().parents[2]
TUNED = ROOT / "kernels" / "tuned"
BASELINES = ROOT / "baselines"
# Every user of the kernels has these: PyTorch, and Triton's tutorials.
PLAIN = {"torch", "triton"}
SUMMARY = "op,family,case,dtype,pass,impl,impl_version"
SUMMARY_VALUES = (
    "flags,set,timed_by,processes,blocks,throttled,device_us,ci_lo,ci_hi,call_us,peak_mem_bytes,energy_uj,energy_pm_uj,"
    "power_w,sm_mhz,temp_c,gbps,tflops,floor_us,bound,pct_sol"
)
VERDICTS = (
    "op,family,case,dtype,pass,set,part,flags,bound,mib,baseline,library,outside,timed_by,ratio,ci_lo,ci_hi,noise,offset,p,"
    "p_holm,verdict,note"
)
CLAIMS = (
    "against,part,op,family,pass,baseline,rivals,timed_by,cells,of,ratio,ci_lo,ci_hi,noise,p,p_holm,"
    "verdict,note"
)
VERIFICATION = (
    "op,family,impl,impl_version,mode,cells,passed,hostile,hostile_passed,unreached,worst_ratio,"
    "worst_case,status,reason"
)
CAPABILITIES = (
    "op,family,impl,impl_version,pass,dtype,mode,of,cells,passed,declined,hostile_of,hostile,"
    "hostile_passed,hostile_declined,status,reason,case"
)
GAPS = "op,family,impl,impl_version,pass,dtype,mode,hostile,status,reason,cells,case"
LEDGER = (
    "op,family,impl,impl_version,pass,dtype,mode,case,input_bytes,output_bytes,saved_bytes,"
    "workspace_bytes,overwritten_bytes,launches,memory_ops,copies,casts,float32_precision,"
    "accumulates,settings,wide,deterministic,timed_by,kernels,status,reason"
)
SANITIZER = "file,code,tool,version,cases,status,findings,elsewhere,seconds,reason"
KERNL = "feature,kernl,source,ours,part,cells,passed,status"
IR = "file,kernel,stage,bytes,lines"
RUNS = (
    "run_id,mode,date,commit,dirty,machine,gpu,board,environment_sha256,harness_sha256,ops,"
    "changed_ops"
)
ENVIRONMENT = "run_id,key,value"
CEILINGS = "run_id,quantity,unit,value,sm_mhz,source"
DATASHEETS = "gpu,quantity,unit,value,source"
TUNING = "run_id,file,kernel,key,config,us,rule,changed,runner_up,gap,tie,candidates,state"
OVERHEAD = (
    "op,total_s,timed_s,first_s,share,blocks,cells,self_tuned,tuned_elsewhere,tuned_beside,"
    "host_cores"
)


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
    _write_cells(folder, study)
    families = {op: found[0]["family"] for op, found in rows.items() if found}
    silent = {op for op in (*rows, *untimed) if op not in families}
    families |= {op: stem for op, stem in source_tree.ops(ROOT).items() if op in silent}
    if replayed := [op for op, car in sidecars.items() if car["mode"] == "replayed"]:
        manifest.check(recorded, replayed, {families[op] for op in replayed if op in families})
    here = [folder / "verify" / op for op in untimed if op not in sidecars]
    found = reports.verified([*reports.folders(folder, recorded, sidecars), *here])
    _write(folder / "verification.csv", VERIFICATION, tables.verification(found, families))
    _write(folder / "capabilities.csv", CAPABILITIES, capabilities.rows(found, families))
    _write(folder / "gaps.csv", GAPS, capabilities.gaps(found, families))
    _write(folder / "ledger.csv", LEDGER, ledger.rows(found, families, rows))
    _write(folder / "kernl.csv", KERNL, kernl.rows(found, rows))
    sanitized = tables.sanitizer(folder, recorded, families.values())
    _write(folder / "sanitizer.csv", SANITIZER, sanitized)
    builds = [
        _json(path)
        for path in sorted((folder / "build").glob("*.json"))
        if path.stem in families.values()
    ]
    resources = list(tables.resources(builds))
    _write(folder / "resources.csv", _columns(resources), resources)
    _write(folder / "ir.csv", IR, tables.ir(builds))
    shown = tables.runs(sidecars, tables.changed(found, sidecars))
    _write(folder / "runs.csv", RUNS, shown)
    # As the kernels read it: unset means the committed tables, empty none.
    tuned = os.environ.get("TILEWRIGHT_TUNED", str(TUNED))
    in_force = {path.name: _json(path) for path in sorted(Path(tuned).glob("*.json")) if tuned}
    tuning = tables.tuning(in_force, builds, {row["gpu"] for row in shown})
    _write(folder / "tuning.csv", TUNING, tuning)
    machine = _json(folder / "environment.json")
    environments = {
        car["run_id"]: car["environment"]
        | {key: car[key] for key in ("environment_sha256",) if key in car}
        for car in sidecars.values()
    }
    environments.setdefault(machine["run_id"], machine)
    _write(folder / "environment.csv", ENVIRONMENT, tables.environment(environments))
    _write(folder / "shown_ceilings.csv", CEILINGS, tables.ceilings(sidecars))
    _write(folder / "datasheets.csv", DATASHEETS, datasheets.rows())
    overhead = tables.overhead(rows, sidecars)
    _write(folder / "overhead.csv", OVERHEAD, overhead)
    replayed = all(car["mode"] == "replayed" for car in sidecars.values())
    return ("of the recorded run, " if replayed else "") + _took(overhead[-1])


def _write_cells(folder: Path, study: Mapping[str, tuple[list[dict], dict]]) -> None:
    grouped = {op: timings.group(rows) for op, (rows, _) in study.items()}
    ceilings = {op: limits(sidecar) for op, (_, sidecar) in study.items()}
    every = {key: rivals for found in grouped.values() for key, rivals in found.items()}
    counted = {key: timings.counted(rivals, ceilings[key[0]]) for key, rivals in every.items()}
    noise = comparisons.noise(counted)
    known = inference.known(noise)
    summary = [
        row
        for key, rivals in every.items()
        for row in timings.summary(rivals, ceilings[key[0]], known)
    ]
    sizes = sorted({key for row in summary for key in row if key.startswith("size_")})
    impls = dict.fromkeys(row["impl"] for row in summary)
    speedups = [f"speedup_vs_{impl}{end}" for impl in impls for end in ("", "_lo", "_hi")]
    columns = ",".join([SUMMARY, *sizes, SUMMARY_VALUES, *speedups, "status", "reason"])
    _write(folder / "summary.csv", columns, summary)
    compared = comparisons.comparisons(counted, known)
    _write(
        folder / "verdicts.csv", VERDICTS, _described(comparisons.verdict_rows(compared), summary)
    )
    grid = [key for key, rivals in every.items() if next(iter(rivals.values())).set == timings.GRID]
    said = comparisons.best_rows(compared, grid) + comparisons.claim_rows(compared, grid)
    _write(folder / "claims.csv", CLAIMS, said)
    headline = comparisons.members([one for one in compared if one.part == timings.HEADLINE])
    found = rates.rows(*rates.material(noise, comparisons.processes(counted), headline))
    _write(folder / "rates.csv", rates.FIELDS, found)


def _described(verdicts: Iterable[Mapping], summary: Iterable[Mapping]) -> Iterator[dict]:
    """Verdicts with what bounds their cell and the MiB that it moves, as the summary says; and with
    the library of the baseline, and how many libraries beside PyTorch and Triton the op has.
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


def _columns(rows: Iterable[Mapping]) -> str:
    return ",".join(dict.fromkeys(key for row in rows for key in row)) or "file,kernel"


def _json(path: Path) -> dict:
    return read_json(path, reports.REMEDY)


def _write(path: Path, columns: str, rows: Iterable[Mapping]) -> None:
    file, names = io.StringIO(), columns.split(",")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([texts(row).get(name) for name in names] for row in rows)
    write_text(path, file.getvalue())


def texts(row: Mapping) -> dict[str, object]:
    """A row as it is written: six digits of a float, and nothing where there is no number."""
    return {key: _text(value) for key, value in row.items()}


def _text(value: object) -> object:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


if __name__ == "__main__":
    run(main)

"""Times one op on a leased GPU and writes `raw/<op>.csv` with its sidecar.

`python -m harness.measure --op softmax … --out raw/softmax.csv`; `--help` names the rest.
"""

import argparse
import contextlib
import json
import signal
import sys
import time
from pathlib import Path

from harness import ceilings, cell, command, engine, lease, load, raw
from harness.command import UserError
from harness.gate import Gate
from kernels._contract import DTYPES

BENCH = "harness.bench"
ENVIRONMENT_REMEDY = "make it with python -m harness.environment on the machine that times"


def main() -> None:
    options = _options()
    began = time.monotonic()
    op, family = load.op(options.op)
    cells = list(cell.sweep(op, options.dtypes, options.passes, options.max_cases))
    if not cells:
        wanted = f"dtypes {', '.join(options.dtypes)}, passes {', '.join(options.passes)}"
        raise UserError(f"op {op.name}: no case of its sweep in {wanted}; widen these or drop it")
    impls = _with_twin(options.impls)
    environment = command.read_json(options.environment, ENVIRONMENT_REMEDY)
    limits = ceilings.read(options.ceilings)
    plan = engine.Plan(
        op=op,
        family=family,
        impls=impls,
        cells=cells,
        seed=options.seed,
        blocks=options.blocks,
        block_ms=options.block_ms,
        timeout_s=options.cell_timeout_s,
        ceilings={row["quantity"]: row["value"] for row in limits if row["source"] == "measured"},
        bench=options.bench,
    )
    gate = Gate(options.verify, op.name, impls)
    with lease.hold(exclusive=True) as gpu:
        _same_gpu(gpu, environment, options.environment)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        measure(plan, gate, environment, limits, options.out, began)


def measure(
    plan: engine.Plan,
    gate: Gate,
    environment: dict,
    limits: list[dict],
    out: Path,
    began: float,
) -> None:
    """Runs a plan and writes both files whole, or neither; prints the share of overhead.

    began: when the job began, by the monotonic clock.
    """
    runner = engine.Engine(plan, gate)
    rows = 0
    with command.whole_file(out) as temporary:
        with (
            temporary.open("w", encoding="utf-8") as file,
            contextlib.closing(runner.cells()) as cells,
        ):
            file.write(raw.header_line())
            for taken in cells:
                file.writelines(map(raw.line, taken))
                file.flush()
                rows += len(taken)
        total = time.monotonic() - began
        share = 1 - runner.busy_s / total
        sidecar = _origin(plan, environment, limits) | {
            "rows": rows,
            "csv_sha256": raw.sha256(temporary.read_bytes()),
            "overhead": {
                "total_s": round(total, 3),
                "timed_s": round(runner.busy_s, 3),
                "share": round(share, 4),
            },
        }
        command.write_json(out.with_suffix(".json"), sidecar)
    done = f"{plan.op.name}: {rows} rows in {total:.1f} s, overhead {share:.0%}"
    print(done, file=sys.stderr)


def _origin(plan: engine.Plan, environment: dict, limits: list[dict]) -> dict[str, object]:
    """The part of the sidecar that was known before the first cell."""
    return {
        "op": plan.op.name,
        **{key: environment.get(key) for key in ("run_id", "date", "commit", "dirty")},
        "mode": "measured",
        "environment": environment,
        "environment_sha256": raw.sha256(json.dumps(environment, sort_keys=True).encode()),
        "ceilings": limits,
        "schedule": {
            "seed": plan.seed,
            "blocks": plan.blocks,
            "block_ms": plan.block_ms,
            "cell_timeout_s": plan.timeout_s,
        },
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", required=True)
    parser.add_argument("--verify", type=Path, required=True, help="folder of the reports")
    parser.add_argument("--environment", type=Path, required=True)
    parser.add_argument("--ceilings", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--dtypes", type=_names, nargs="+", default=[list(DTYPES)])
    parser.add_argument("--passes", type=_names, nargs="+", default=[["forward", "backward"]])
    parser.add_argument("--impls", type=_names, nargs="+", required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--block-ms", type=float, required=True, help="GPU time in a block")
    parser.add_argument("--cell-timeout-s", type=float, required=True, help="limit of one answer")
    parser.add_argument("--max-cases", type=int, help="only the first cases of the sweep")
    parser.add_argument("--bench", default=BENCH, help="module whose Bench does the work")
    options = parser.parse_args()
    for key in ("dtypes", "passes", "impls"):
        setattr(options, key, [name for names in getattr(options, key) for name in names])
    return options


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _with_twin(impls: list[str]) -> list[str]:
    """Ours runs twice, in two processes: the gap between the two is the noise floor."""
    rivals = [impl for impl in impls if impl not in (load.OURS, load.TWIN)]
    return [load.OURS, load.TWIN, *rivals] if load.OURS in impls else rivals


def _same_gpu(gpu: lease.Gpu, environment: dict, path: Path) -> None:
    known = (environment.get("gpu") or {}).get("name")
    if known != gpu.name:
        raise UserError(f"{path}: describes {known or 'no GPU'}, not {gpu}; {ENVIRONMENT_REMEDY}")


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    command.run(main)

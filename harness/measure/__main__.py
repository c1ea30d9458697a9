"""Times one op on a locked GPU and writes `raw/<op>.csv` with its sidecar.

`python -m harness.measure --op softmax … --out raw/softmax.csv`; `--help` names the rest. Started
again after an interruption, it measures what was not yet finished.
"""

import argparse
import contextlib
import datetime
import os
import signal
import sys
import time
from collections.abc import Set
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

from harness import cli
from harness.calls import cell, drawn
from harness.cli import UserError
from harness.machine import ceilings, gpu_lock
from harness.machine import environment as surroundings
from harness.measure import autotune, checkpoint, close, scheduler, tables
from harness.measure.gate import Gate
from harness.measure.rows import work
from harness.measure.stopping import Timing
from harness.project import fingerprint, registry
from harness.project.implementations import OURS, TWIN, is_ours
from harness.project.source_tree import self_tuned
from harness.results import choices, floor, measured, parts, raw
from harness.workers import forkserver
from ops._spec import DTYPES, PASSES

ROOT = Path(__file__).resolve().parents[2]
WORKER = "harness.measure.worker:MeasureWorker"
# Whole networks do not fit in memory side by side.
PARKED_WORKER = "harness.measure.parked_worker:ParkedWorker"
# Calls of a block, by whether the op is a whole network: one takes up to seconds. A block of one
# has seconds of calls (`parked_worker`), so it scatters less, and fewer do.
LEAST_CALLS = {False: 3, True: 1}
NETWORK_BLOCKS = 6
# The digest of the configuration; no option of the rule, for it changes without moving a number.
CONFIG = "TILEWRIGHT_CONFIG_SHA256"
TIMING = [field.name for field in fields(Timing)]
# Other compilers would run beside the first timings. Without them a first call takes longer, and
# that is not timed.
SURROUNDINGS = choices.ONE_COMPILER | choices.KEEP


def main() -> None:
    options = _options()
    began = time.monotonic()
    for name, value in SURROUNDINGS.items():
        os.environ.setdefault(name, value)
    # It imports what the workers need while this process imports what it needs itself.
    forkserver.current()
    op, family = registry.op(options.op)
    if not options.narrower:
        wanted = {key: vars(options)[key] for key in ("dtypes", "passes", "max_cases", "part")}
        measured.refuse_narrower([(options.out, options.impls)], **wanted)
    drawn_seed = drawn.read(options.drawn)
    # A file that is wrong is named before a GPU is waited for.
    ceilings.read(options.ceilings)
    wanted = options.dtypes, options.passes, options.max_cases
    cells = list(cell.sweep(op, *wanted, drawn_seed))
    if not cells:
        wanted = f"dtypes {', '.join(options.dtypes)}, passes {', '.join(options.passes)}"
        # Its files are written all the same, so that the study goes on without it.
        print(f"{op.name}: left out, no case of its sweep in {wanted}", file=sys.stderr)
    mine = cell.share(cells, *options.part) if options.part else cells
    impls = _with_twin(options.impls)
    timing = Timing(**{key: vars(options)[key] for key in TIMING})
    whole = registry.of_network(op.name)
    if whole:
        # The energy of a step is a result of the study, for each stack. A call is long: further
        # processes would only take a minute to start.
        blocks = min(timing.min_blocks, NETWORK_BLOCKS)
        timing = replace(timing, energy_impls=impls, processes=1, min_blocks=blocks)
    plan = scheduler.MeasurementPlan(
        op=op,
        family=family,
        impls=impls,
        cells=cells,
        seed=options.seed,
        timing=timing,
        ceilings={},
        worker=options.worker or (PARKED_WORKER if whole else WORKER),
        self_tuning={
            impl: choices.variables(choices.place(options.autotuned, op.name, impl))
            for impl in self_tuned(ROOT, op.name, impls)
        },
        singly=whole,
        drawn_seed=drawn_seed,
        least_calls=LEAST_CALLS[whole],
        others=frozenset(map(str, cells)).difference(map(str, mine)),
    )
    code = partial(fingerprint.implementation, ROOT, family)
    gate = Gate(options.verify, op.name, impls, code)
    gate.refuse_elsewhere(mine)
    tuned = autotune.required(ROOT, options.autotuned, op.name, impls, code)
    # While all GPUs are visible: one description serves the jobs on each.
    machine = surroundings.ensure(options.environment, ROOT, options.config_sha256)
    asked = time.monotonic()
    with autotune.lock_board(options.autotuned, op.name, tuned, options.board) as gpu:
        # The wait for the turns of other jobs is none of this one's work.
        began += time.monotonic() - asked
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        environment = surroundings.on_board(machine, gpu.uuid)
        limits = ceilings.ensure(options.ceilings, gpu.uuid)
        rates = {row["quantity"]: row["value"] for row in limits if row["source"] == "measured"}
        origin = origin_of(op.name, environment, limits)
        origin |= {"autotuned": tuned, "tables_sha256": tables.digest(ROOT, family)}
        monitor = gpu_lock.GpuMonitor(gpu)
        lacking = _lacking(options.recorded, op.name)
        measure(replace(plan, ceilings=rates), gate, monitor, origin, options.out, began, lacking)


def measure(
    plan: scheduler.MeasurementPlan,
    gate: Gate,
    monitor: gpu_lock.GpuMonitor,
    origin: dict[str, object],
    out: Path,
    began: float,
    lacking: Set[str] = frozenset(),
) -> None:
    """Runs a plan and writes both files whole, or neither; prints the share of overhead.

    Raises UserError where nothing has a time and `out` holds measured times, which stay.

    Cells that an earlier, interrupted run of the same plan has finished are taken over.

    - origin: the part of the sidecar that is known beforehand.
    - began: when the job began, by the monotonic clock, moved on by its wait for a GPU.
    - lacking: the names of the cells that come first.
    """
    started = _now()
    digest = checkpoint.digest(ROOT, _moving(plan, gate, origin))
    about = close.about(plan, gate, origin, monitor.board, started)
    journal = out.with_name(f".{plan.op.name}.journal")
    with checkpoint.Journal(journal, digest, plan.seed, about) as kept:
        there = plan.others | kept.cells.keys()
        rest = [each for each in _in_turn(plan, lacking) if str(each) not in there]
        runner = scheduler.Scheduler(replace(plan, cells=rest, seed=kept.seed), gate, monitor)
        with contextlib.closing(runner.cells()) as cells:
            for done in cells:
                # Whatever failed on a GPU that is gone says nothing of the implementations.
                monitor.refuse_vanished()
                now = time.monotonic()
                kept.add(done.name, asdict(done) | {"spent_s": now - began, "ended": _now()})
                began = now
        if not close.has_time(kept.cells):
            # Taken over, these cells would fail the next attempt too.
            kept.remove()
            _keep(out)
        total = sum(each["spent_s"] for each in kept.cells.values()) + time.monotonic() - began
        close.write(out, kept, total, {"began": started, "ended": _now()})
        kept.remove()


def _lacking(recorded: Path | None, op: str) -> set[str]:
    """The names of the cells that the recorded run of an op did not reach."""
    with contextlib.suppress(UserError):
        rows = raw.read(recorded / "raw" / f"{op}.csv", "")[0] if recorded else ()
        return {parts.name(parts.cell(row)) for row in rows if row["status"] == "unreached"}
    return set()


def _in_turn(plan: scheduler.MeasurementPlan, lacking: Set[str] = frozenset()) -> list[cell.Cell]:
    """Return the cells in the order in which they are timed: shapes with short calls first.

    lacking: the names of cells that come before all others. Short calls have further processes.
    They wait there until a large shape needs their memory, and to start them anew takes half a
    minute.
    """
    least: dict[tuple[str, str], float] = {}
    for each in plan.cells:
        shape = each.case.name, each.dtype
        time_us, _ = floor.floor_us(work(plan.op, each), plan.ceilings)
        least[shape] = min(time_us, least.get(shape, time_us))

    def turn(each: cell.Cell) -> tuple[bool, float]:
        return str(each) not in lacking, least[each.case.name, each.dtype]

    return sorted(plan.cells, key=turn)


def _now() -> str:
    return cli.utc(datetime.datetime.now(datetime.UTC))


def _keep(out: Path) -> None:
    """Raises UserError where `out` holds measured times; one that cannot be read may hold some."""
    if not measured.is_held(out):
        return
    with contextlib.suppress(UserError):
        if not any(row["status"] in raw.TIMED for row in raw.read(out, "")[0]):
            return
    raise UserError(
        f"{out}: holds measured times, and this measurement took none; they stay: set another run,"
        " or remove the file to have what failed in its place"
    )


def origin_of(op: str, environment: dict, limits: list[dict]) -> dict[str, object]:
    """The part of the sidecar that is known before the first cell."""
    return {
        "op": op,
        **{key: environment.get(key) for key in ("run_id", "date", "commit", "dirty")},
        "mode": "measured",
        "harness_sha256": fingerprint.harness(ROOT),
        "environment": environment,
        "environment_sha256": raw.environment_sha256(environment),
        "ceilings": limits,
    }


def _moving(
    plan: scheduler.MeasurementPlan, gate: Gate, origin: dict[str, object]
) -> dict[str, object]:
    """All that could move a number, except the code."""
    return {
        "impls": list(plan.impls),
        "cells": [
            [str(each), [asdict(gate.verdict(impl, each)) for impl in plan.impls]]
            for each in plan.cells
        ],
        "seed": plan.seed,
        "timing": asdict(plan.timing),
        "worker": plan.worker,
        "origin": origin,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="harness.measure", description=__doc__)
    parser.add_argument("--op", required=True)
    parser.add_argument("--verify", type=Path, required=True, help="folder of the reports")
    parser.add_argument(
        "--autotuned", type=Path, required=True, help="folder of harness.measure.autotune"
    )
    parser.add_argument("--environment", type=Path, required=True, help="made where it is not true")
    parser.add_argument("--config-sha256", default=os.environ.get(CONFIG, ""))
    parser.add_argument("--ceilings", type=Path, required=True)
    parser.add_argument("--board", type=gpu_lock.named, help="UUID of the GPU, or any")
    parser.add_argument("--recorded", type=Path, help="folder of a record: what it lacks is first")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=cli.seed, required=True, help="an integer, or fresh")
    parser.add_argument("--dtypes", type=_names, nargs="+", default=[list(DTYPES)])
    parser.add_argument("--passes", type=_names, nargs="+", default=[list(PASSES)])
    parser.add_argument("--impls", type=_names, nargs="+", required=True)
    for field in fields(Timing):
        kind = field.type if field.type in (int, float) else _names
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, required=True)
    parser.add_argument("--max-cases", type=int, help="only the first cases of the sweep")
    parser.add_argument("--part", type=cli.part, help="K/N: the part of the shapes that is timed")
    parser.add_argument("--narrower", action="store_true", help="replace times of more than these")
    parser.add_argument(
        "--drawn", type=Path, help="file of harness.calls.drawn, whose shapes are timed too"
    )
    parser.add_argument("--worker", help="class that does the work, module:Class")
    options = parser.parse_args()
    for key in ("dtypes", "passes", "impls"):
        setattr(options, key, [name for names in getattr(options, key) for name in names])
    for key, known in (("dtypes", DTYPES), ("passes", PASSES)):
        if unknown := [name for name in getattr(options, key) if name not in known]:
            raise UserError(f"--{key}: {unknown[0]!r} is none of {', '.join(known)}")
    return options


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _with_twin(impls: list[str]) -> list[str]:
    """Ours runs twice, in two processes: the gap between the two is the noise floor."""
    rivals = [impl for impl in impls if not is_ours(impl)]
    return [OURS, TWIN, *rivals] if OURS in impls else rivals


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    cli.run(main)

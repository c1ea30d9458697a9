"""Times the candidates of a kernel file: `python -m harness.tune --file softmax --out …`.

The result is a table of the format of kernels/tuned/, for this GPU and this file alone. The
launchers use it if TILEWRIGHT_TUNED is set to its folder, and `python -m harness.tune.merge` keeps
it.
"""

import argparse
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from harness import cli, files
from harness.cli import UserError
from harness.machine import gpu_lock
from harness.project.implementations import OURS
from ops._spec import DTYPES, PASSES

# Inputs and order are the same in each run, so that a table changes with the machine alone.
SEED = 0
WORKER = "harness.tune.worker:TuneWorker"


def main() -> None:
    parser = argparse.ArgumentParser(prog="harness.tune", description=__doc__)
    parser.add_argument("--file", required=True, help="stem of a kernel file")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--max-cases", type=int, help="keep the first cases of each sweep")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help="compilers that run side by side")
    parser.add_argument("--board", type=gpu_lock.named, help="UUID of the GPU, or any")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if not Path(f"kernels/{options.file}.py").is_file():
        raise UserError(f"kernels/{options.file}.py: no such file")
    if not gpu_lock.gpus():
        raise UserError("tuning needs a GPU and none is visible; set tuning to replay or heuristic")
    # Triton reads it while it is imported.
    os.environ.pop("TRITON_INTERPRET", None)
    wanted = (options.dtypes, options.passes, options.max_cases)
    held = functools.partial(locked, board=options.board)
    files.write_json(options.out, table(options.file, *wanted, options.jobs, locked=held))


@contextlib.contextmanager
def locked(exclusive: bool, board: str | None = None) -> Iterator[gpu_lock.GpuMonitor]:
    with gpu_lock.hold(exclusive, uuid=board) as gpu:
        yield gpu_lock.GpuMonitor(gpu)


def table(
    stem: str,
    dtypes: Sequence[str],
    passes: Sequence[str],
    most: int | None,
    jobs: int,
    worker: str = WORKER,
    locked: Callable = locked,
) -> dict[str, object]:
    """The table of one kernel file; prints as it goes.

    locked: a context in which a GPU is ours, alone or shared. It is ours alone for the timing only:
    other jobs may use it while candidates are compiled.
    """
    from harness.build import tables
    from harness.tune import candidates, merge, search

    for finding in tables.findings(stem):
        _say(f"tune {stem}: {finding['table']}: {finding['kernel']}: {finding['reason']}")
    began = time.monotonic()
    with locked(exclusive=False) as monitor, _tuner(stem, worker, monitor) as timer:
        gpu = _device(stem, timer)
    found = candidates.keys_in_sweep(stem, dtypes, passes, most, gpu.limits)
    rejected = candidates.rejected_candidates(stem, found, gpu.arch, gpu.limits, jobs)
    _say(f"tune {stem}: {len(found)} keys compiled in {time.monotonic() - began:.0f} s")
    entries: dict[str, list] = {}
    with locked(exclusive=True) as monitor, _tuner(stem, worker, monitor) as timer:
        if (other := _device(stem, timer)) != gpu:
            raise UserError(
                f"tune {stem}: compiled for {gpu.device}, and {other.device} is what is free;"
                " choose one kind of GPU by CUDA_VISIBLE_DEVICES"
            )
        for tuning_key, reasons in zip(found, rejected, strict=True):
            try:
                entry = timer.tune(tuning_key, reasons)
            except search.Lost as lost:
                _say(f"tune {stem}: {tuning_key}: the rule's own choice fails: {lost}")
                continue
            entries.setdefault(tuning_key.kernel, []).append(entry)
            _say(f"tune {stem}: {tuning_key}: {_told(entry)}")
    seconds = time.monotonic() - began
    _say(f"tune {stem}: {sum(map(len, entries.values()))} keys in {seconds:.0f} s")
    return {"device": gpu.device, "families": {stem: merge.record(stem, entries)}}


def _tuner(stem: str, worker: str, monitor: gpu_lock.GpuMonitor):
    from harness.tune.search import Tuner
    from harness.workers.gpu_memory import Memory
    from harness.workers.pool import WorkerHandle

    memory = Memory(monitor.used_bytes, monitor.users)
    return Tuner(lambda: WorkerHandle(stem, OURS, SEED, worker), SEED, memory)


def _device(stem: str, timer):
    from harness.tune.search import Lost

    try:
        return timer.device()
    except Lost as lost:
        raise UserError(f"tune {stem}: the worker does not start: {lost}") from None


def _told(entry: Mapping) -> str:
    from harness.build.tables import text

    chosen = f"{text(entry['config'])} {entry['us']:.1f} µs"
    chosen += " (the rule's)" if text(entry["config"]) == entry["rule"] else ""
    if second := entry["runner_up"]:
        tie = ", a tie" if second["tie"] else ""
        chosen += f"; next {second['config']} {second['gap']:+.1%}{tie}"
    return f"{chosen}; {len(entry['failed'])} failed" if entry["failed"] else chosen


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli.run(main)

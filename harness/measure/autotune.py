"""Lets a library that tunes itself do so while it has the GPU alone.

`python -m harness.measure.autotune --op matmul --impl quack --out …`. A library may time its
candidates in the first call with a shape and keep the choice on disk. In verification, or beside
the first calls of its rivals, others would use the GPU meanwhile, and it would choose among times
that are not its own. Here it meets every cell that may be timed, twice, in two phases.

First several processes meet the cells side by side, so that all is compiled; others may use the GPU
meanwhile. This compile phase keeps the GPU shared to its end, even if a job waits to have the GPU
alone. Each candidate of Triton's tuners has a call of its own there. A cell that takes too long
there is given up as hung, and tried neither alone nor in verification (`harness.results.hung`). Its
report names these cells.

Then the choices that were made there are removed, and one process meets the cells while nothing
else runs. It finds no earlier choice: its folder (`harness.results.choices`) is emptied before the
first phase, and compiled kernels are all that the side-by-side processes leave there. `--phase`
asks for one of the two: a study queues them apart, so that no library keeps others from compiling
while it waits for the GPU. An interrupted one compiles nothing again.

Verification comes after, so that it judges what was chosen; measuring, on the same board, finds the
same choices. A choice that a library does not keep is made again in its first call, which it makes
alone. A baseline whose library tunes itself names the ops in `AUTOTUNES`.
"""

import argparse
import contextlib
import datetime
import os
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from harness import cli, files
from harness.calls import cell, drawn
from harness.calls.cell import Cell
from harness.cli import UserError
from harness.machine import gpu_lock
from harness.measure.messages import Compile, Compiled, Prepare, Release
from harness.project import fingerprint, registry
from harness.project.source_tree import self_tuned
from harness.results import choices, schema
from harness.status import FATAL
from harness.workers import forkserver
from harness.workers.messages import Answer, Failure
from harness.workers.pool import WorkerPool, worker_name
from ops._spec import DTYPES, PASSES

ROOT = Path(__file__).resolve().parents[2]
WORKER = "harness.measure.tuning_worker:TuningWorker"
# The shapes decide what a tuner chooses, the entries do not.
SEED = 0
# How many times as long as alone a cell may take while others are compiled beside it. The norms of
# flash-attn try six numbers of warps, and for rows of 32768 the compiler takes over four minutes.
COMPILING = 4


def main() -> None:
    options = _options()
    for name, value in choices.KEEP.items():
        os.environ.setdefault(name, value)
    forkserver.current()
    op, family = registry.op(options.op)
    code = fingerprint.implementation(ROOT, family, options.impl)
    wanted = options.dtypes, options.passes, options.max_cases
    cells = list(cell.sweep(op, *wanted, drawn.read(options.drawn)))
    if options.part:
        cells = cell.share(cells, *options.part)
    # All libraries are to choose on the board that measures them all.
    board = options.board or next((gpu.uuid for gpu in gpu_lock.gpus()), None)
    for phase, run in PHASES.items():
        if options.phase in (phase, None):
            run(options, cells, code, board)


def _compile(
    options: argparse.Namespace, cells: Sequence[Cell], code: str, board: str | None
) -> None:
    """Empty the folder, compile the cells there, and write the report of this phase."""
    path = choices.compiled(options.out)
    # Without what was compiled and chosen both reports say nothing.
    for old in (path, options.out):
        old.unlink(missing_ok=True)
    about = options.worker, options.cell_timeout_s, choices.emptied(options.out.with_suffix(""))
    # On the board of another op it would keep the jobs of that one from having it alone.
    rather = options.compile_board or board
    with gpu_lock.hold(exclusive=False, rather=rather, compiles=True) as gpu:
        cores = len(os.sched_getaffinity(0))
        at_once = min(options.jobs or cores, cores)
        found = compile_beforehand(options.op, options.impl, cells, *about, at_once)
    hung = [{"cell": name, "limit_s": seconds} for name, seconds in found.items()]
    files.write_json(path, _report(options, code, gpu) | {"hung": hung})


def _tune(options: argparse.Namespace, cells: Sequence[Cell], code: str, board: str | None) -> None:
    """Have the library choose alone among what is compiled, and write its report.

    Raises UserError where the compile phase has no report, or one of other code or another GPU.
    """
    path, folder = choices.compiled(options.out), options.out.with_suffix("")
    remedy = "compile again with --phase compile"
    compiled = schema.read(path, "compiled", remedy)
    if compiled["code_sha256"] != code:
        raise UserError(f"{path}: is of other code or another version; {remedy}")
    options.out.unlink(missing_ok=True)
    choices.forget(folder)
    about = options.worker, options.cell_timeout_s, choices.variables(folder)
    hung = {each["cell"]: each["limit_s"] for each in compiled["hung"]}
    with gpu_lock.hold(exclusive=True, uuid=board) as gpu:
        if (former := compiled["gpu"]["name"]) != gpu.name:
            raise UserError(f"{path}: is of another GPU, {former}; {remedy}, or remove it")
        report = _report(options, code, gpu)
        found = tuned(options.op, options.impl, cells, *about, hung)
    files.write_json(options.out, report | {"cells": found})


def _report(options: argparse.Namespace, code: str, gpu: gpu_lock.Gpu) -> dict[str, object]:
    """Return what the reports of both phases begin with, as of now."""
    date = cli.utc(datetime.datetime.now(datetime.UTC))
    about = {"op": options.op, "impl": options.impl, "code_sha256": code, "date": date}
    return about | {"gpu": {"name": gpu.name, "uuid": gpu.uuid}}


PHASES = {"compile": _compile, "tune": _tune}


class Turns:
    """The calls that compile all cells, in turn; false when none is left.

    The last cells come first. Sweeps go on to larger shapes, whose kernels compile the longest, and
    at the end these would compile alone. The passes of a case share kernels, which side by side
    each would compile. So the calls of a pass begin when those of the passes before are done. The
    first call of a pass compiles the last candidate of each tuner, and says how many there are. The
    others have a call each. A backward pass begins beside them, after the first call of the forward
    pass: of that it needs no other candidate (`TuningWorker.compile`).
    """

    def __init__(self, cells: Sequence[Cell]):
        self._later: dict[tuple[str, str], deque[Cell]] = defaultdict(deque)
        for each in sorted(reversed(cells), key=lambda each: PASSES.index(each.pass_)):
            self._later[_shared(each)].append(each)
        self._open: Counter[tuple[str, str]] = Counter()
        self._ready: deque[tuple[Cell, int | None]] = deque()
        for key in self._later:
            self._go_on(key)

    def __len__(self) -> int:
        return len(self._ready)

    def take(self) -> tuple[Cell, int | None]:
        """Return the cell and the candidate of the next call; None is the last candidate."""
        return self._ready.popleft()

    def done(self, cell: Cell, candidate: int | None, answer: Answer) -> None:
        """Note what a call said; those that depend on it follow."""
        key = _shared(cell)
        if candidate is None and isinstance(answer, Compiled):
            others = range(answer.candidates - 1)
            # They have been waited for already.
            self._ready.extendleft((cell, other) for other in reversed(others))
            self._open[key] += len(others)
        self._open[key] -= 1
        follows = self._later[key][0].pass_ if self._later[key] else ""
        if not self._open[key] or (candidate is None and follows == "backward"):
            self._go_on(key)

    def _go_on(self, key: tuple[str, str]) -> None:
        if self._later[key]:
            self._ready.append((self._later[key].popleft(), None))
            self._open[key] += 1


def _shared(cell: Cell) -> tuple[str, str]:
    """Return what the cells whose kernels are the same have in common."""
    return cell.case.name, cell.dtype


def compile_beforehand(
    op: str,
    impl: str,
    cells: Sequence[Cell],
    worker: str,
    limit_s: float,
    variables: Mapping[str, str],
    processes: int,
) -> dict[str, float]:
    """Have so many workers compile the cells side by side; other arguments are as of `tuned`.

    Returns the cells of which a call was ended by its limit, and that limit in seconds. They are
    not tried again. No other failure counts, and none ends the phase: `tuned` meets each of the
    other cells again. If no worker starts, nothing is compiled.

    Compiling takes most of a first call, and it needs no GPU alone. Each worker takes the next turn
    when it has done one, within COMPILING times the limit. The last call in progress, if no turn is
    left, shares the cores with none of this library. From then on it has the plain limit at most.

    It does not give way to a job that waits to have the GPU alone. The calls in progress would keep
    the GPU shared for minutes, and no process would begin another.
    """
    variables, most_s = {**variables, **choices.ONE_COMPILER}, COMPILING * limit_s
    hung: dict[str, float] = {}
    began: dict[str, float] = {}
    asked: dict[str, tuple[Cell, int | None]] = {}
    turns = Turns(cells)
    with WorkerPool(op, SEED, worker, {impl: variables}) as workers:
        names = [worker_name(impl, number + 1) for number in range(processes)]
        # The others start if there are more turns at a time.
        lost = _failed(workers.start(names[: len(cells)]))
        # The last one has the next turn.
        idle = [name for name in reversed(names) if name not in lost]
        while began or (turns and idle):
            while turns and idle:
                name = idle.pop()
                if not _failed(workers.start([name])):
                    each, candidate = asked[name] = turns.take()
                    workers.send(name, Compile(each.case.name, each.dtype, each.pass_, candidate))
                    began[name] = time.monotonic()
            granted_s = most_s
            if len(began) == 1 and not turns:
                # It is waited for to its end, so this is asked once, as it becomes the last one.
                since_s = time.monotonic() - min(began.values())
                granted_s = min(most_s, since_s + limit_s)
            for name, answer in workers.first_answers(began, granted_s).items() if began else ():
                seconds = time.monotonic() - began.pop(name)
                each, candidate = asked.pop(name)
                which = "" if candidate is None else f", candidate {candidate + 1}"
                _tell(f"compile {op} {impl}: {each}{which}: {_status(answer)}, {seconds:.1f} s")
                turns.done(each, candidate, answer)
                fatal = isinstance(answer, Failure) and answer.status in FATAL
                if fatal and answer.status == "hung":
                    hung[str(each)] = round(granted_s, 3)
                if fatal or _failed(workers.ask([name], most_s, Release())):
                    workers.stop(name)
                idle.append(name)
    return hung


def _tell(line: str) -> None:
    """Write a line to the log at once: one cell may take most of the minutes of a phase."""
    print(line, file=sys.stderr, flush=True)


def _status(answer: Answer) -> str:
    return answer.status if isinstance(answer, Failure) else "ok"


def _failed(answers: Mapping[str, Answer]) -> set[str]:
    return {name for name, answer in answers.items() if isinstance(answer, Failure)}


def tuned(
    op: str,
    impl: str,
    cells: Sequence[Cell],
    worker: str,
    limit_s: float,
    variables: Mapping[str, str],
    hung: Mapping[str, float],
) -> list[dict[str, object]]:
    """Have a worker prepare one cell after the other; return status and seconds of each.

    - worker: the class that does the work, as `module:Class`.
    - limit_s: the seconds that a call may take.
    - variables: environment variables by which the library finds its folder.
    - hung: as `compile_beforehand` returns it. These cells have their rows without a call.

    Nothing is verified yet, so a process that crashes or hangs is replaced before the next cell. If
    a library is not installed, or ends its process as it is imported, the list ends there.
    """
    found = []
    with WorkerPool(op, SEED, worker, {impl: variables}) as workers:
        for number, each in enumerate(cells, 1):
            if (limit := hung.get(str(each))) is not None:
                reason = f"compiling took longer than {limit:.0f} s"
                found.append({"cell": str(each), "status": "hung", "reason": reason, "s": 0.0})
                continue
            began = time.monotonic()
            answer = workers.start([impl]).get(impl)
            if ready := not isinstance(answer, Failure):
                request = Prepare(each.case.name, each.dtype, each.pass_)
                answer = workers.ask([impl], limit_s, request)[impl]
            seconds = round(time.monotonic() - began, 3)
            failed = isinstance(answer, Failure)
            status, reason = _status(answer), answer.reason if failed else ""
            found.append({"cell": str(each), "status": status, "reason": reason, "s": seconds})
            _tell(f"tune {op} {impl}: {number} of {len(cells)}: {each}: {status}, {seconds} s")
            if status == "unavailable" or (not ready and status in FATAL):
                break
            if status not in FATAL:
                answer = workers.ask([impl], limit_s, Release())[impl]
                failed = isinstance(answer, Failure)
            if failed:
                workers.stop(impl)
    return found


def required(
    root: Path, folder: Path, op: str, impls: Iterable[str], code: Callable[[str], str]
) -> dict[str, dict[str, str]]:
    """When and on which board each library that tunes itself did so, by implementation.

    code: the digest of an implementation as it is now. Raises UserError where a report or its
    choices are missing, where it is of other code, or where two are of different boards.
    """
    found = {}
    for impl in self_tuned(root, op, impls):
        path = folder / op / f"{impl}.json"
        remedy = f"make it with python -m harness.measure.autotune --op {op} --impl {impl}"
        report = schema.read(path, "autotune", remedy)
        if report["code_sha256"] != code(impl):
            raise UserError(f"{path}: is of other code or another version; {remedy}")
        if not choices.place(folder, op, impl).is_dir():
            raise UserError(f"{path}: what the library chose is gone; {remedy} --out {path}")
        found[impl] = {"date": report["date"], "gpu": report["gpu"]["uuid"]}
    boards = sorted({one["gpu"] for one in found.values()})
    if len(boards) > 1:
        where = f"libraries tuned themselves on {len(boards)} boards, {', '.join(boards)}"
        raise UserError(f"{folder / op}: {where}; remove it and start again")
    return found


@contextlib.contextmanager
def lock_board(
    folder: Path, op: str, tuned: Mapping[str, Mapping[str, str]], wanted: str | None = None
) -> Iterator[gpu_lock.Gpu]:
    """Lock the board on which libraries tuned themselves, alone; `wanted` or any if none did.

    tuned: as `required` gives it. Raises UserError where that board is not here.
    """
    board = next((one["gpu"] for one in tuned.values()), wanted)
    if tuned and board not in {gpu.uuid for gpu in gpu_lock.gpus()}:
        problem = f"libraries tuned themselves on another board, {board}"
        raise UserError(f"{folder / op}: {problem}; remove it and start again")
    with gpu_lock.hold(exclusive=True, uuid=board) as gpu:
        yield gpu


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--op", required=True)
    parser.add_argument("--impl", required=True)
    parser.add_argument("--phase", choices=PHASES, help="only this one of the two")
    parser.add_argument("--board", type=gpu_lock.named, help="UUID of the GPU, or any")
    parser.add_argument(
        "--compile-board",
        type=gpu_lock.named,
        help="UUID of the GPU on which it rather compiles; any stands for that of --board",
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--max-cases", type=int, help="only the first cases of the sweep")
    parser.add_argument("--part", type=cli.part, help="K/N: the part of the shapes that is timed")
    parser.add_argument(
        "--drawn", type=Path, help="file of harness.calls.drawn, whose shapes it meets too"
    )
    parser.add_argument("--cell-timeout-s", type=float, default=180.0)
    parser.add_argument("--jobs", type=int, help="processes that compile; as many as cores if none")
    parser.add_argument("--worker", default=WORKER, help="class that does the work, module:Class")
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)

"""Verification of one implementation of one op: `python -m harness.verify --op O --impl I --out F`.

Child processes run the cells, so that one which kills or hangs its process becomes a row. The
inputs come from a seed that is drawn anew for each run and stands in the report. With a
GPU all cases run there. Without one our kernels run their edge cases in Triton's interpreter, and
the baselines run theirs on the CPU. Exit code 1: a kernel of ours is wrong; a baseline that is
wrong is a row of the paper, not an error. A baseline that compiles each shape anew may have three
time limits. The first is for the cells that will be timed, which come first. The second is for the
ordinary edge cases, on which its mark rests. The third is for the hostile ones. The cells that it
has not reached by then are `unreached`, which says nothing of the library. So are those of other
parts, if a part of the shapes is timed. A cell that hung when its library tuned itself is `hung`
here too, without a call.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from functools import partial
from pathlib import Path

from harness.calls import drawn
from harness.cli import UserError, fresh_seed, part, run, seed
from harness.files import write_json
from harness.machine import gpu_lock, nvml
from harness.project import fingerprint, libraries, source_tree
from harness.project.implementations import is_ours
from harness.results import choices, hung, parts, severity, withdrawn
from harness.verify import ledger
from harness.verify.messages import CheckUnit, ChooseUnits, Chosen
from harness.workers.messages import Answer, Failure, Hello, Request
from harness.workers.pool import POOL_DIED, START_S, WorkerHandle
from ops._spec import DTYPES, PASSES

ROOT = Path(__file__).resolve().parents[2]
WORKER = "harness.verify.worker:VerifyWorker"
# All share the GPU; then the cells whose memory ran out, one verification at a time; then alone.
# From the second on the oracle's results go to the memory of the host, if that of the GPU runs out.
ATTEMPTS = ("shared", "in turn", "alone")
# Between two questions for a turn.
TURN_S = 0.5
# The interpreter of Triton 3.6 computes bfloat16 wrongly, without an error.
INTERPRETED = ("float32", "float16")


def main() -> int:
    arguments = _arguments()
    if arguments.seed is None:
        arguments.seed = fresh_seed()
    if arguments.jobs > 1:
        for name, value in choices.ONE_COMPILER.items():
            os.environ.setdefault(name, value)
    ours = is_ours(arguments.impl)
    mode = "gpu" if nvml.gpus() else "interpreter" if ours else "cpu"
    # The digest is taken before the code runs: after an edit meanwhile the report is out of date.
    family = source_tree.every_op(ROOT).get(arguments.op, "")
    code = fingerprint.implementation(ROOT, family, arguments.impl)
    arguments.hung = hung.cells(arguments.choices, code)
    report = {"code_sha256": code} | verify(arguments, mode)
    write_json(arguments.out, report)
    print(summary(report))
    return int(ours and report["status"] not in ("ok", "unsupported"))


def verify(arguments: argparse.Namespace, mode: str) -> dict:
    """Run all cells and return the report.

    If memory ran out while other verifications used the GPU, that proves nothing. Such cells run
    again, one verification after another, and if need be alone on the GPU. If this one has to give
    way (`gpu_lock.is_awaited`), it ends the cells it has begun and goes on with another GPU.
    """
    units: dict[int, list] = {}
    taken_s: Counter[str] = Counter()
    for attempt in ATTEMPTS if mode == "gpu" else ATTEMPTS[:1]:
        facts, spent_s, spare = None, Counter(), attempt != ATTEMPTS[0]
        while facts is None:
            about = arguments.choices, arguments.board
            with _surroundings(mode, attempt, *about) as awaited:
                queue = _Queue(units, spent_s, awaited, 1 if spare else arguments.jobs)
                facts, units = _run(arguments, mode, queue, spare)
        taken_s += spent_s
        crowded = {n for n, cells in units.items() if any(c["status"] == "oom" for c in cells)}
        if not crowded:
            break
        if attempt != ATTEMPTS[-1] and mode == "gpu":
            name = f"verify {arguments.op} {arguments.impl}"
            found = f"{len(crowded)} of {len(units)} cases found no memory"
            print(f"{name}: {found} ({attempt})", file=sys.stderr)
            units = {n: cells for n, cells in units.items() if n not in crowded}
    cells = [cell for number in sorted(units) for cell in units[number]]
    report = {name: vars(arguments)[name] for name in ("op", "impl", "seed")}
    report |= {"mode": mode, "guard": withdrawn.GUARD} | severity.overall(cells)
    spent = {name: round(seconds, 1) for name, seconds in taken_s.items()}
    return report | facts | {"spent_s": spent, "cells": cells}


@contextlib.contextmanager
def _surroundings(
    mode: str, attempt: str, chosen: Path | None, board: str | None
) -> Iterator[Callable[[], bool] | None]:
    """Lock a GPU, or set Triton's interpreter for our kernels and no others.

    Yields the question whether to give way to a job that waits to have the GPU alone; None if the
    GPU is not shared.

    Inductor's own kernels would break under the variable of the interpreter. chosen: the folder of
    the choices that the library made while it had the GPU alone. It is verified with a copy of
    them. Choices that a compiler or a library makes here are not kept, because other verifications
    use the GPU meanwhile.

    board: that of the op, on which this verification is in the way of no other op.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    if mode == "gpu":
        with contextlib.ExitStack() as held:
            gpu = _held(attempt, held, board)
            os.environ.update(choices.KEEP)
            own = Path(held.enter_context(tempfile.TemporaryDirectory()))
            if chosen is not None and chosen.is_dir():
                os.environ.update(choices.copied(chosen, own))
            else:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own)
            yield None if attempt == "alone" else partial(gpu_lock.is_awaited, gpu)
        return
    if mode == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    yield None


def _held(attempt: str, held: contextlib.ExitStack, board: str | None):
    """Lock a GPU as the attempt has it, rather this board, until `held` is closed.

    A verification that waits for its turn holds nothing, so it is in no other job's way.
    """
    while True:
        with contextlib.ExitStack() as mine:
            alone = attempt == "alone"
            # One that waits for a turn takes that of any GPU.
            wanted = None if attempt == "in turn" else board
            gpu = mine.enter_context(gpu_lock.hold(exclusive=alone, rather=wanted))
            if attempt != "in turn" or mine.enter_context(gpu_lock.turn(gpu)):
                held.push(mine.pop_all())
                return gpu
        time.sleep(TURN_S)


class _Queue:
    """The units that are still to run, handed out one by one, and the cells of the others.

    - units: the cells by number of the unit.
    - spent_s: the seconds by class of cell; see `_class`.
    - awaited: tells whether to give way to a job that waits to have the GPU alone; None if the GPU
      is not shared. If so, no more units than `least` are handed out.
    - paused: whether units are left for that reason.
    - fault: the first one, after which no unit is handed out.
    """

    def __init__(
        self,
        units: dict[int, list],
        spent_s: Counter | None = None,
        awaited: Callable[[], bool] | None = None,
        least: int = 1,
    ):
        self.units, self.spent_s = units, Counter() if spent_s is None else spent_s
        self._taken, self._lock = set(units), threading.Lock()
        self._awaited, self._enough = awaited, len(units) + least
        self.paused = False
        self.fault: BaseException | None = None
        self._workers: list[WorkerHandle] = []

    def take(self, plan: Chosen) -> int | None:
        """Return the number of the next unit, None if there is none."""
        with self._lock:
            left = (n for n in range(len(plan.units)) if n not in self._taken)
            number = None if self.fault else next(left, None)
            if number is None:
                return None
            # A turn without any unit could follow another for ever.
            self.paused = self.paused or bool(
                self._awaited and len(self._taken) >= self._enough and self._awaited()
            )
            if self.paused:
                return None
            self._taken.add(number)
            return number

    def spend(self, name: str, seconds: float) -> None:
        """Count the seconds of a unit to its class of cells."""
        with self._lock:
            self.spent_s[name] += seconds

    @contextlib.contextmanager
    def served_by(self, worker: WorkerHandle) -> Iterator[None]:
        """Within the body a worker runs units of the queue."""
        self._workers.append(worker)
        try:
            yield
        finally:
            self._workers.remove(worker)

    def closed_for(self, fault: BaseException) -> BaseException:
        """Hand out no more, and end the workers, since nobody waits for what they would say.

        Returns the first fault: that of a worker which was ended here follows from it.
        """
        with self._lock:
            self.fault = self.fault or fault
        for worker in list(self._workers):
            if worker.pid is not None:
                worker.send_sigkill()
        return self.fault


def _run(
    arguments: argparse.Namespace, mode: str, queue: _Queue, spare: bool
) -> tuple[dict | None, dict]:
    """Add the cells of each missing unit; return the facts of the whole report, and all cells.

    `--jobs` processes work at a time, unless memory is to be spared. There are no facts yet if the
    queue is paused.
    """

    def lane(finish: Callable | None = None) -> dict | None:
        try:
            return _lane(arguments, mode, spare, queue, finish)
        except BaseException as fault:
            raise queue.closed_for(fault) from None

    with futures.ThreadPoolExecutor(max(1, arguments.jobs)) as pool:
        others = [pool.submit(lane) for _ in range(1, 1 if spare else arguments.jobs)]
        facts = lane(lambda *last: _facts(queue, others, *last))
    if queue.fault:
        raise queue.fault
    if queue.paused:
        return None, queue.units
    return facts, queue.units if "ledger" in facts else {}


def _lane(
    arguments: argparse.Namespace,
    mode: str,
    spare: bool,
    queue: _Queue,
    finish: Callable | None = None,
) -> dict | None:
    """Run units of a queue, in a new process after each that is lost.

    Returns what `finish` says at the end, with the last process; or, of an absent library, the
    facts of its report.
    """
    name, limit_s = f"verify {arguments.op} {arguments.impl}", arguments.cell_timeout_s
    while not (queue.fault or queue.paused):
        with _worker(arguments) as worker, queue.served_by(worker):
            hello = worker.answer(START_S)
            failed = isinstance(hello, Failure)
            # A library that has run units is installed.
            if failed and not queue.units and (found := _absent(hello, worker, arguments.impl)):
                return found
            plan = hello
            if not isinstance(hello, Failure):
                plan = _ask(worker, limit_s, _chosen(arguments, mode, spare))
            if isinstance(plan, Failure):
                if plan.status != "unsupported":
                    print(worker.log_tail(), file=sys.stderr)
                raise UserError(f"{name}: {plan.reason}")
            while (number := queue.take(plan)) is not None:
                lost, blanks = _hung_apart(plan.units[number], arguments.hung)
                late = _late(blanks, arguments, queue.spent_s) if blanks else []
                if number in plan.elsewhere:
                    late, lost = _unreached(lost + blanks, parts.ELSEWHERE), []
                if late or not blanks:
                    queue.units[number] = lost + late
                    continue
                passes = [blank["pass"] for blank in blanks] if lost else None
                began = time.monotonic()
                answer = _ask(worker, limit_s, CheckUnit(number, passes))
                # Several lanes share the time that the limit of the class allows.
                spent_s = (time.monotonic() - began) / (1 if spare else max(1, arguments.jobs))
                queue.spend(_class(blanks[0]), spent_s)
                if isinstance(answer, Failure):
                    if answer.status == "unsupported":
                        raise UserError(f"{name}: {answer.reason}")
                    fault = {"status": answer.status, "reason": answer.reason}
                    queue.units[number] = lost + [blank | fault for blank in blanks]
                    # The report may never come, if this job is ended before.
                    case = f"{name}: {blanks[0]['case']} {blanks[0]['dtype']}"
                    print(f"{case}: {answer.status}: {answer.reason}", file=sys.stderr)
                else:
                    queue.units[number] = lost + answer.cells
                if any(cell["status"] == "crashed" for cell in queue.units[number]):
                    print(worker.log_tail(), file=sys.stderr)
                if isinstance(answer, Failure) or not answer.alive:
                    break
            else:
                return finish and finish(hello, plan, partial(_ask, worker, limit_s))
    return None


def _facts(
    queue: _Queue, others: Iterable[futures.Future], hello: Hello, plan: Chosen, ask: Callable
) -> dict:
    """Return the facts of a report as soon as the other lanes are done; ask: of the last process.

    Raises UserError if one of them has failed.
    """
    for other in others:
        other.result()
    if queue.paused:
        return {}
    facts = {"impl_version": hello.impl_version, "device": plan.device}
    return facts | {"ledger": ledger.take(queue.units, plan.declared, ask)}


def _absent(failure: Failure, worker: WorkerHandle, impl: str) -> dict[str, str]:
    """Return the facts of a report without cells: the library is absent, or killed or hung its
    process as it was imported. Return {} for any other failure.
    """
    if failure.status == "unavailable":
        return {
            "impl_version": "",
            "device": "",
            "status": failure.status,
            "reason": failure.reason,
        }
    fell = failure.status in ("crashed", "hung") and worker.ended and failure.reason != POOL_DIED
    if is_ours(impl) or not fell:
        return {}
    print(worker.log_tail(), file=sys.stderr)
    facts = {"impl_version": _installed(impl), "device": ""}
    return facts | {"status": failure.status, "reason": f"at import: {failure.reason}"}


def _installed(impl: str) -> str:
    """Return the version of the library behind a baseline, without importing it."""
    return libraries.version(source_tree.rests_on(ROOT, impl)) or ""


def _hung_apart(blanks: list[dict], hung_cells: Mapping[str, str]) -> tuple[list[dict], list[dict]]:
    """Return the rows of a unit that need no call, and the cells that are to run.

    hung_cells: as `harness.results.hung.cells` gives them. Only cells that are timed were tuned: an
    edge case of that name is judged with one candidate of each tuner.
    """
    lost, others = [], []
    for blank in blanks:
        timed = hung_cells and blank["kind"] != "edge"
        reason = hung_cells.get("{case} {dtype} {pass}".format_map(blank)) if timed else None
        if reason is None:
            others.append(blank)
        else:
            lost.append(blank | {"status": hung.STATUS, "reason": reason})
    return lost, others


def _late(blanks: list[dict], arguments: argparse.Namespace, spent_s: Counter) -> list[dict]:
    """Return the rows of a unit that the time limit of its class leaves out; [] if it is to run."""
    name = _class(blanks[0])
    limit_s = vars(arguments)[f"{name}_s"]
    if is_ours(arguments.impl) or limit_s is None or spent_s[name] < limit_s:
        return []
    return _unreached(blanks, f"time limit of {limit_s:g} s")


def _unreached(blanks: list[dict], reason: str) -> list[dict]:
    return [blank | {"status": "unreached", "reason": reason} for blank in blanks]


def _class(cell: dict) -> str:
    """Return the time limit that binds a cell: sweep, ordinary or hostile edge cases."""
    if cell["kind"] != "edge":
        return "sweep"
    return "hostile" if cell["hostile"] else "ordinary"


def summary(report: dict) -> str:
    """Return a line for each cell that is not ok, and a last one with the count and the verdict."""
    name = f"verify {report['op']} {report['impl']} ({report['mode']})"
    lines = [
        f"{name}: {severity.name(cell)}: {cell['status']}: {cell['reason']}"
        for cell in report["cells"]
        if cell["status"] not in ("ok", "unreached")
    ]
    counts = Counter(cell["status"] for cell in report["cells"])
    passed = f"{counts['ok']} of {len(report['cells'])} cells ok"
    if counts["unreached"]:
        passed += f", {counts['unreached']} not reached"
    verdict = ": ".join(filter(None, (report["status"], report["reason"])))
    return "\n".join([*lines, f"{name}: seed {report['seed']}: {passed}; {verdict}"])


@contextlib.contextmanager
def _worker(arguments: argparse.Namespace) -> Iterator[WorkerHandle]:
    worker = WorkerHandle(arguments.op, arguments.impl, arguments.seed, WORKER)
    try:
        yield worker
    finally:
        worker.kill()


def _ask(worker: WorkerHandle, limit_s: float, request: Request) -> Answer:
    worker.send(request)
    return worker.answer(limit_s)


def _chosen(arguments: argparse.Namespace, mode: str, spare: bool) -> ChooseUnits:
    edge_only = arguments.edge_only or mode != "gpu"
    # The time for a baseline may be limited, so the cases that will be timed come first.
    timed = ["sweep", "drawn"]
    kinds = ["edge", *timed] if is_ours(arguments.impl) else [*timed, "edge"]
    dtypes = arguments.dtypes
    if mode != "gpu":
        # Without a GPU, a study of bfloat16 alone is still verified, in float32.
        dtypes = [name for name in dtypes if name in INTERPRETED] or list(INTERPRETED[:1])
    return ChooseUnits(
        gpu=mode == "gpu",
        dtypes=dtypes,
        passes=arguments.passes,
        kinds=["edge"] if edge_only else kinds,
        most=arguments.max_cases,
        drawn_seed=drawn.read(arguments.drawn),
        spare=spare,
        part=list(arguments.part) if arguments.part and not is_ours(arguments.impl) else None,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="harness.verify", description=__doc__.split("\n")[0])
    parser.add_argument("--op", required=True)
    parser.add_argument("--impl", required=True, help="ours, or the stem of a baseline's file")
    parser.add_argument("--out", required=True, help="the report, JSON")
    parser.add_argument("--seed", type=seed, help="an integer from 0, or fresh (the default)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16"])
    parser.add_argument("--passes", nargs="+", default=list(PASSES))
    parser.add_argument("--max-cases", type=int, help="so many of each kind of case")
    parser.add_argument(
        "--part", type=part, help="K/N: the part of a baseline's cases; of ours all are run"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that verify at a time")
    parser.add_argument(
        "--drawn", type=Path, help="file of harness.calls.drawn; on a GPU its shapes too"
    )
    parser.add_argument("--edge-only", action="store_true")
    parser.add_argument("--cell-timeout-s", type=float, default=600.0, help="then a case hangs")
    parser.add_argument("--board", type=gpu_lock.named, help="UUID of the op's GPU, or any")
    parser.add_argument("--choices", type=Path, help="folder of what the library chose alone")
    limited = "seconds after which a baseline begins no further {}; none where left out"
    parser.add_argument("--sweep-s", type=float, help=limited.format("case of its sweep"))
    parser.add_argument("--ordinary-s", type=float, help=limited.format("ordinary edge case"))
    parser.add_argument("--hostile-s", type=float, help=limited.format("hostile one"))
    arguments = parser.parse_args()
    for key in ("dtypes", "passes"):
        # Blanks or commas: a list of the configuration, or one word of a command line.
        words = ",".join(getattr(arguments, key))
        setattr(arguments, key, [word for word in words.split(",") if word])
    for key, known in (("dtypes", DTYPES), ("passes", PASSES)):
        if unknown := sorted(set(getattr(arguments, key)) - set(known)):
            raise UserError(f"--{key}: {unknown[0]!r} is none of {', '.join(known)}")
    return arguments


if __name__ == "__main__":
    run(main)

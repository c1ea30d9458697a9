"""Times the forms of a kernel, from the simplest to the shipped one: what each technique buys.

Each form of a cell, and each rival, lives in a process of its own, as in the study
(`harness.measure.scheduler`). All hold their graphs at once. They are timed as the study times its
cells, in blocks in which all take turns in a random order. No form is timed whose results are not
those of the shipped one, which verification judges. One that raises, dies or hangs becomes a row,
and the others go on.
"""

import random
from collections.abc import Iterable, Iterator, Sequence

import torch

from harness.calls import drawn
from harness.measure.dissect.messages import FormReady, PrepareForm
from harness.measure.dissect.rungs import LADDERS, SHIPPED
from harness.measure.dissect.steps import Row
from harness.measure.messages import Check, TimeBlock
from harness.project import registry
from harness.project.implementations import OURS
from harness.workers.messages import Answer, Failure, Request
from harness.workers.pool import WorkerPool, worker_name

WORKER = "harness.measure.dissect.form_worker:FormWorker"
# An answer may take so long: a first call compiles two forms, or lets a library tune itself.
LIMIT_S = 600.0
READ = ("device_us", "sm_mhz", "temp_c", "power_w")


def kernel_ladder(
    op: str,
    cells: Sequence[str],
    dtype: str,
    rivals: Sequence[str],
    blocks: int,
    seed: int,
    worker: str = WORKER,
) -> Iterator[Row]:
    """The times of all forms of an op, and of rivals, in cells named `case.pass`.

    worker: the class that does the work, as `module:Class`. Its processes take the GPU, or a CPU if
    TRITON_INTERPRET is 1.
    """
    for cell in cells:
        case, _, pass_ = cell.rpartition(".")
        if (op, pass_) not in LADDERS:
            raise ValueError(f"{cell}: {op} has no ladder of this pass")
        with WorkerPool(op, seed, worker) as workers:
            yield from _cell(workers, op, case, dtype, pass_, rivals, blocks, seed)


def _cell(workers, op, case, dtype, pass_, rivals, blocks, seed):
    ladder, declared = LADDERS[op, pass_], registry.op(op)[0]
    cost = declared.cost(drawn.named(declared, case), pass_, getattr(torch, dtype).itemsize)
    about: Row = {"op": op, "case": case, "dtype": dtype, "pass": pass_, "flops": cost.flops}
    numbers = {worker_name(OURS, number): number for number in range(len(ladder))}
    words = {
        name: about | {"impl": OURS, "rung": number, "adds": ladder[number].adds}
        for name, number in numbers.items()
    }
    words |= {name: about | {"impl": name} for name in rivals}
    turns = _Turns(workers, words)
    ready: dict[str, FormReady] = {}
    # One after the other: a library that tunes itself in its first call is to be alone. The shipped
    # form comes first. It fills the compiler's cache, in which the other processes find it.
    shipped = worker_name(OURS, ladder.index(SHIPPED))
    for name in sorted(words, key=lambda name: name != shipped):
        request = PrepareForm(case, dtype, pass_, numbers.get(name))
        if answer := turns.ask(name, request):
            ready[name] = answer
        else:
            yield words[name] | turns.failure(name)
    order, taken = random.Random(seed), []
    for block in range(blocks):
        for name in order.sample(list(ready), len(ready)):
            if times := turns.ask(name, TimeBlock(ready[name].calls, block)):
                row = {"status": "ok", "reason": ready[name].remark, "block": block}
                row |= {key: getattr(times, key) for key in READ}
                taken.append((name, words[name] | row))
    # A form that failed while it was timed, or gave other results meanwhile, has no time.
    for name in ready:
        if not turns.ask(name, Check()):
            yield words[name] | turns.failure(name)
    yield from (row for name, row in taken if not turns.failure(name))


class _Turns:
    """The workers of a cell, asked one at a time; one that fails is ended, and asked no more."""

    def __init__(self, workers: WorkerPool, names: Iterable[str]):
        self._workers, self._failures = workers, {}
        for name, answer in workers.start(names).items():
            self._note(name, answer)

    def ask(self, name: str, request: Request) -> Answer | None:
        """Return the answer of a worker; None if it fails now, or has failed before."""
        if name not in self._failures:
            answer = self._workers.ask([name], LIMIT_S, request)[name]
            self._note(name, answer)
        return None if name in self._failures else answer

    def failure(self, name: str) -> Row:
        """Return the status and the reason of a worker that has failed; nothing of another."""
        failure = self._failures.get(name)
        return {"status": failure.status, "reason": failure.reason} if failure else {}

    def _note(self, name: str, answer: Answer) -> None:
        if isinstance(answer, Failure):
            self._failures[name] = answer
            # After a fault of the GPU a process is of no use, and what it printed may say more.
            self._workers.stop(name)

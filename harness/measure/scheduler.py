"""Times the implementations of one op against each other, each in a process of its own.

All prepare a cell at the same time, except those that tune themselves, those that found no memory
beside others before, and networks. Then each block visits all of them in an order drawn anew, so
that drift of the machine hits all alike. Only those far slower than the fastest wait for every
third block. A process that fails is a row with a status, and is replaced before the next cell; the
others go on.

Processes that run the same code differ by some 0.2 us a call, however long the call is
(docs/lab/statistics.md). If calls are short, several processes of each implementation are therefore
timed. A worker is named by its implementation, and by a number if it is a further one.
"""

import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.calls.cell import Cell
from harness.machine.gpu_lock import GpuMonitor
from harness.measure.gate import Gate
from harness.measure.messages import (
    BlockTimes,
    Check,
    Energy,
    GpuWork,
    MeasureEnergy,
    Prepare,
    Prepared,
    Release,
    TimeBlock,
)
from harness.measure.phase_times import PhaseTimes
from harness.measure.rows import Rows, work
from harness.measure.stopping import Rule, Timing
from harness.results.floor import floor_us
from harness.stats import FEWEST_BLOCKS
from harness.status import FATAL
from harness.workers.gpu_memory import Memory
from harness.workers.messages import Answer, Failure, Request
from harness.workers.pool import POOL_DIED, WorkerPool, process_of, worker_name
from ops._spec import Op

MOST_CALLS = 100
# A call whose wall time is longer than so many blocks is timed once in a block. PyTorch's own
# attention takes 260 ms where others take 3. Three such calls in each block took most of a cell.
LONG = 3
# If its GPU time is as long, and FAR times that of the shortest call, it is timed in one of SELDOM
# blocks. Its ratio needs no narrow interval.
FAR, SELDOM = 10, 3
# One GPU takes some hundred processes, however little memory they hold. On an H200 with driver
# 580 the last one or two of 102 were told that there was no memory (docs/lab/attention.md).
MOST_PROCESSES = 96


@dataclass(frozen=True)
class MeasurementPlan:
    """The cells to time and how.

    - impls: in the order in which failures are listed.
    - seed: root of the inputs and of the order; None until one is drawn.
    - ceilings: GB/s and TFLOP/s by quantity, empty if unknown.
    - worker: the class that does the work, as `module:Class`.
    - self_tuning: the implementations whose library times candidates in its first call. The value
      holds the environment variables by which it finds its earlier choices
      (`harness.results.choices`). Each makes its first call alone, after the others.
    - singly: whether all prepare and check one by one, because they do not fit side by side.
    - drawn_seed: the seed of the drawn shapes among the cells, None if there are none.
    - least_calls: the calls of a block, and those of the warm-up block. A LONG call has one.
    - others: the cells by name that another part of the measurement times.
    """

    op: Op
    family: str
    impls: Sequence[str]
    cells: Sequence[Cell]
    seed: int | None
    timing: Timing
    ceilings: Mapping[str, float]
    worker: str
    self_tuning: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    singly: bool = False
    drawn_seed: int | None = None
    least_calls: int = 3
    others: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FinishedCell:
    """The rows of a cell and the time that it took.

    - stopped: why its timing ended, a key of `stopping.REASONS`.
    - timed_s: the seconds in which the GPU was timed or warmed up.
    - first_s: those of the first calls, in which libraries compile and tune.
    """

    name: str
    rows: list[dict[str, object]]
    stopped: str
    timed_s: float
    first_s: float


@dataclass(frozen=True)
class Ready:
    """A worker that can be timed in the cell.

    prepared: its answer. device_us: the GPU time of a call in its warm-up block. calls: the number
    of calls in a block.
    """

    prepared: Prepared
    device_us: float
    calls: int


class Scheduler:
    """Times the cells of a plan, one after the other."""

    def __init__(self, plan: MeasurementPlan, gate: Gate, monitor: GpuMonitor):
        self._plan, self._gate, self._monitor = plan, gate, monitor
        self._memory = Memory(monitor.used_bytes, monitor.users)
        self._versions: dict[str, str] = {}
        # The implementations that found no memory when no further process was there, and those that
        # found some only when no other prepared at the same time.
        self._too_large: set[tuple[str, str, str]] = set()
        self._starving: set[str] = set()
        self._launched_early = False

    def cells(self) -> Iterator[FinishedCell]:
        """Yield each cell as soon as it is done; end the workers when the iterator is closed."""
        plan = self._plan
        with WorkerPool(plan.op.name, plan.seed, plan.worker, plan.self_tuning) as self._workers:
            for cell in plan.cells:
                done = self._finish(cell)
                if any(row["reason"] == POOL_DIED for row in done.rows):
                    print(f"{plan.op.name} {cell}: {POOL_DIED}; once more", file=sys.stderr)
                    done = self._finish(cell)
                print(f"{plan.op.name} {cell}: {_digest(done.rows)}", file=sys.stderr)
                print(f"{plan.op.name} {cell}: {self._phase_times}", file=sys.stderr)
                yield done

    def _finish(self, cell: Cell) -> FinishedCell:
        self._rows = Rows(
            self._plan.op, self._plan.family, cell, self._plan.ceilings, self._monitor.board
        )
        self._timed_s, self._first_s, self._phase_times = 0.0, 0.0, PhaseTimes()
        self._spent_s: dict[str, float] = defaultdict(float)
        stopped = self._measure(cell)
        return FinishedCell(str(cell), self._rows.taken, stopped, self._timed_s, self._first_s)

    def _measure(self, cell: Cell) -> str:
        ready = self._prepare(cell)
        ready |= self._prepare_further(cell, ready)
        seldom, every = self._seldom(ready), self._every
        # Ours is compared with one that is timed in each block, if there is any.
        rule = Rule(self._plan.timing, sorted(self._plan.impls, key=seldom.__contains__))
        block, began = 0, time.monotonic()
        while not (stopped := rule.stop(_impls(ready), block, time.monotonic() - began)):
            self._memory.settle()
            self._memory.ready()
            taking = [n for n in ready if block % every == 0 or process_of(n)[0] not in seldom]
            for order, name in enumerate(self._draw(taking, cell, block)):
                if name not in ready:  # another process of the implementation has failed
                    continue
                prepared, calls = ready[name].prepared, ready[name].calls
                answer = self._block(name, calls, block)
                if isinstance(answer, Failure):
                    self._failed(name, answer, block, order)
                    self._leave_out(name, ready)
                else:
                    version = self._versions[process_of(name)[0]]
                    self._rows.timed(name, version, prepared, calls, answer, block, order)
            for impl, device_us in self._rows.block(block).items():
                rule.timed(impl, block, device_us)
            block += 1
        self._conclude(ready, cell, block - 1)
        return stopped

    def _seldom(self, ready: Mapping[str, Ready]) -> set[str]:
        """Return the implementations whose calls are long, and far longer than the shortest."""
        shortest = min((each.device_us for each in ready.values()), default=0.0)
        bound = max(LONG * self._plan.timing.block_ms * 1e3, FAR * shortest)
        return {process_of(name)[0] for name, each in ready.items() if each.device_us > bound}

    @property
    def _every(self) -> int:
        """One of how many blocks times a call that is far longer than others; enough are left."""
        return max(1, min(SELDOM, self._plan.timing.min_blocks // FEWEST_BLOCKS))

    def _prepare(self, cell: Cell) -> dict[str, Ready]:
        """Prepare the cell in a worker of each implementation; return those that can be timed."""
        self._memory.settle()
        impls = self._verified(cell)
        refused = self._begin(impls)
        self._memory.idle()
        started = [impl for impl in impls if impl not in refused]
        early = self._launch_early(started, cell)
        answers = refused | self._ask_to_prepare(started, cell, early)
        if len(answers) > 1 or early:
            # Those that prepared or started meanwhile may have held the memory: once more, alone.
            starved = _starved(answers)
            answers = self._once_more(answers, cell, ())
            if not early:
                self._starving.update(set(starved).difference(_starved(answers)))
        prepared = self._without_failures(self._without_idle(answers, cell))
        self._memory.settle()
        self._memory.ready()
        ready = {}
        for impl, said in prepared.items():
            # The first block is warm-up; it also says how many calls fill the time of a block.
            answer = self._block(impl, self._plan.least_calls)
            if _is_failure(answer, "oom"):
                said, answer = self._warmed_up_alone(impl, said, answer, cell)
            if isinstance(answer, Failure):
                self._failed(impl, answer)
            else:
                ready[impl] = Ready(said, answer.device_us, _calls(self._plan, answer))
        return ready

    def _launch_early(self, impls: Sequence[str], cell: Cell) -> list[str]:
        """Launch further processes, once, if the cell may want them; return their names.

        They start while the first ones compile, which takes as long. The floor of a call says
        whether it may be short. If memory holds few processes, `_prepare_further` starts them, for
        then it can tell how many. So it does after they were ended.
        """
        least_us, _ = floor_us(work(self._plan.op, cell), self._plan.ceilings)
        used, free = self._monitor.used_bytes(), self._monitor.free_bytes()
        if not impls or not 0 < least_us < self._plan.timing.short_us or used is None:
            return []
        names = _further(impls, self._most_further)
        alone = used / len(impls)
        if self._launched_early or len(names) * alone > (free or 0) / 2:
            return []
        self._launched_early = True
        self._workers.launch(names)
        return names

    def _await_early(self, names: Sequence[str], answers: Mapping[str, Answer]) -> None:
        """Wait until the launched processes have started, or end them all.

        answers: of those that prepared meanwhile. If one of them is to be ended, or if a launched
        one has failed, its memory must come back. A driver that lists no processes tells how much
        that is only if the launched ones are ended too.
        """
        if not names:
            return
        began = time.monotonic()
        said = self._workers.start(names)
        self._phase_times.add("start", time.monotonic() - began, said)
        lost = [name for name, answer in said.items() if isinstance(answer, Failure)]
        ended = any(isinstance(each, Failure) and each.status in FATAL for each in answers.values())
        if lost or ended:
            self._memory.joined()
            for name in names:
                self._stop(name)
        else:
            self._memory.ready()

    def _once_more(
        self, answers: Mapping[str, Answer], cell: Cell, idle: Iterable[str]
    ) -> dict[str, Answer]:
        """Have those that found no memory prepare again, one by one, without idle processes.

        Returns the answers of all.
        """
        starved = _starved(answers)
        # One that did not even start is none of the workers.
        for name in set(self._workers.names).intersection((*idle, *starved)):
            self._stop(name)
        found = {impl: answer for impl, answer in answers.items() if impl not in starved}
        for impl in starved:
            self._memory.settle()
            # Without memory not even a process starts.
            refused = self._begin([impl])
            found |= refused
            if not refused:
                # It may hold memory now for the first time in the cell.
                self._memory.ready()
                found |= self._ask_to_prepare([impl], cell)
        return found

    def _without_idle(self, answers: Mapping[str, Answer], cell: Cell) -> dict[str, Answer]:
        """Have those that found no memory prepare again when no process waits for another cell.

        Further processes wait for a cell with short calls. Returns the answers of all.
        """
        kind, idle = (cell.dtype, cell.pass_), [*filter(_is_further, self._workers.names)]
        if not idle or all((impl, *kind) in self._too_large for impl in _starved(answers)):
            return dict(answers)
        answers = self._once_more(answers, cell, idle)
        self._too_large.update((impl, *kind) for impl in _starved(answers))
        return answers

    def _warmed_up_alone(
        self, impl: str, prepared: Prepared, failure: Failure, cell: Cell
    ) -> tuple[Prepared | Failure, Answer]:
        """Prepare and warm up without idle processes; return both answers, as they were if none."""
        again = self._without_idle({impl: failure}, cell)[impl]
        self._memory.settle()
        self._memory.ready()
        if isinstance(again, Failure):
            return prepared, again
        answer = self._block(impl, self._plan.least_calls)
        if _is_failure(answer, "oom"):
            self._too_large.add((impl, cell.dtype, cell.pass_))
        return again, answer

    def _prepare_further(self, cell: Cell, ready: Mapping[str, Ready]) -> dict[str, Ready]:
        """Prepare a cell in further processes; return those that can be timed.

        They are for a cell with a short call, and for an op that searches a table. The time of such
        an op depends on the place of the table in memory, which differs from process to process. A
        process that cannot be prepared is left out: the implementation has a time without it. If
        the GPU's memory holds fewer, each implementation has fewer.
        """
        timing = self._plan.timing
        shortest = min((each.device_us for each in ready.values()), default=0.0)
        searches = any(tensor.ascending for tensor in self._plan.op.inputs.values())
        if not ready or (shortest >= timing.short_us and not searches):
            return {}
        # A first process may have ended in its warm-up. Those that start here take memory too.
        self._memory.settle()
        most = self._most_further
        count = self._fitting(ready, most)
        if count < most:
            print(f"{cell}: memory for {count} of {most} further processes each", file=sys.stderr)
        names = _further(ready, count)
        began = time.monotonic()
        answers = self._workers.start(names)
        self._phase_times.add("start", time.monotonic() - began, answers)
        for name, answer in answers.items():
            if isinstance(answer, Failure):
                _say_left_out(name, answer)
                # It held nothing of a cell, and the others have taken memory to start meanwhile.
                self._workers.stop(name)
                names.remove(name)
        # The memory that they hold without a cell is not that of one which is lost from here on.
        self._memory.settle()
        self._memory.ready()
        further = {}
        for name, prepared in self._ask_to_prepare(names, cell).items():
            failed = isinstance(prepared, Failure)
            answer = prepared if failed else self._block(name, self._plan.least_calls)
            if isinstance(answer, Failure):
                self._leave_behind(name, answer)
            else:
                calls = ready[process_of(name)[0]].calls
                further[name] = Ready(prepared, answer.device_us, calls)
        self._memory.settle()
        self._memory.ready()
        return further

    @property
    def _most_further(self) -> int:
        """How many further processes of each implementation a cell with short calls may have."""
        held = MOST_PROCESSES // len(self._plan.impls)
        return max(0, min(self._plan.timing.processes, held) - 1)

    def _fitting(self, ready: Mapping[str, Ready], most: int) -> int:
        """Return how many further processes of each implementation the GPU's memory holds.

        Each takes what the first one holds for the cell. If it is not started yet, it takes as much
        besides as the running ones hold on average without cells. One that finds no memory costs
        the time of its start, and that of another one for the next cell.
        """
        used, free = self._monitor.used_bytes(), self._monitor.free_bytes()
        if used is None or free is None:
            return most
        held = sum(each.prepared.held_bytes for each in ready.values())
        running = self._workers.names
        alone = max(0, used - held) / max(1, len(running))
        for count in range(1, most + 1):
            fresh = sum(worker_name(impl, count) not in running for impl in ready)
            free -= held + alone * fresh
            if free < 0:
                return count - 1
        return most

    def _ask_to_prepare(
        self, names: Sequence[str], cell: Cell, early: Sequence[str] = ()
    ) -> dict[str, Prepared | Failure]:
        """Have workers prepare a cell: together, but after them some one by one.

        They are those that tune themselves, and those that found no memory together; in a plan that
        says so, all. early: the processes that start beside the first ones.
        """
        late = self._starving.union(self._plan.self_tuning)
        alone = [name for name in names if self._plan.singly or process_of(name)[0] in late]
        answers = self._ask([name for name in names if name not in alone], _prepare(cell))
        self._await_early(early, answers)
        self._give_up(answers)
        for name in alone:
            self._memory.settle()
            answer = self._ask([name], _prepare(cell))
            self._give_up(answer)
            answers |= answer
        return answers

    def _give_up(self, answers: Mapping[str, Answer]) -> None:
        """End the workers that failed, or have them release their cell.

        Those that prepare after them need the memory that they took.
        """
        for name, answer in answers.items():
            if not isinstance(answer, Failure) or name not in self._workers.names:
                continue  # it did not even start, or was ended
            if answer.status in FATAL:
                self._stop(name)
            else:
                self._release([name])

    def _leave_behind(self, name: str, failure: Failure) -> None:
        """Go on without a further process that has begun the cell."""
        _say_left_out(name, failure)
        if name in self._workers.names:
            self._stop(name)

    def _leave_out(self, name: str, ready: dict[str, Ready]) -> None:
        """Go on without an implementation of which a process has failed."""
        impl, _ = process_of(name)
        del ready[name]
        others = [other for other in ready if process_of(other)[0] == impl]
        for other in others:
            del ready[other]
        self._release(others)

    def _verified(self, cell: Cell) -> list[str]:
        """Return the implementations that the gate lets through; the others leave a row."""
        passed = []
        for impl in self._plan.impls:
            verdict = self._gate.verdict(impl, cell)
            self._versions.setdefault(impl, verdict.impl_version)
            if verdict.status == "ok":
                passed.append(impl)
            else:
                failure = Failure(verdict.status, verdict.reason)
                self._rows.failed(impl, self._versions[impl], failure, 0, 0)
        return passed

    def _begin(self, impls: Sequence[str]) -> dict[str, Failure]:
        """Start the workers that are missing; return why some did not start."""
        began, refused = time.monotonic(), {}
        answers = self._workers.start(impls)
        self._phase_times.add("start", time.monotonic() - began, answers)
        for impl, answer in answers.items():
            if isinstance(answer, Failure):
                self._stop(impl)
                refused[impl] = answer
            else:
                self._versions[impl] = answer.impl_version
        return refused

    def _draw(self, names: Iterable[str], cell: Cell, what: object) -> list[str]:
        """Return the workers in the order that the seed gives them here."""
        draw = random.Random(f"{self._plan.seed}/{self._plan.op.name}/{cell}/{what}")
        names = sorted(names)
        return draw.sample(names, len(names))

    def _block(self, name: str, calls: int, turn: int = 0) -> BlockTimes | Failure:
        self._memory.settle()
        answer = self._ask_alone(name, TimeBlock(calls, turn))
        if not isinstance(answer, Failure) and min(answer.device_us, answer.call_us) <= 0:
            return Failure("crashed", "answers without a time above zero", spent_s=answer.spent_s)
        return answer

    def _conclude(self, ready: Mapping[str, Ready], cell: Cell, last: int) -> None:
        """End a cell: measure energy, check the timed calls, and have memory given back."""
        timing, timed = self._plan.timing, set(ready)
        # If the L2 holds all that a call touches, calls without a flush between are other calls.
        telling = [n for n, each in ready.items() if self._rows.beyond(each.prepared.l2_bytes)]
        wanted = [name for name in telling if name in timing.energy_impls and timing.energy_ms]
        for name in self._draw(wanted, cell, "energy"):
            self._memory.settle()
            answer: Energy | Failure = self._ask_alone(name, MeasureEnergy(timing.energy_ms))
            if isinstance(answer, Failure):
                self._failed(name, answer, last)
                timed.remove(name)
            else:
                self._rows.energy(name, answer)
        if foreign := self._monitor.foreign_processes(self._workers.groups):
            self._rows.shared(foreign[0])
        checked = [name for name in ready if name in timed]
        for name in checked if self._plan.singly else self._check(checked, cell, last):
            self._check([name], cell, last)

    def _check(self, names: Sequence[str], cell: Cell, last: int) -> list[str]:
        """Have workers check their timed calls, together, and give back the memory of the cell.

        A check makes a call. Returns those that found no memory for it beside the calls of others:
        they keep their cell, to be checked once more.
        """
        self._memory.settle()
        answers = self._ask(names, Check())
        starved = _starved(answers) if len(names) > 1 else []
        done = [name for name in names if name not in starved]
        for name in names:
            answer = answers[name]
            if _is_failure(answer, "inaccurate"):
                self._rows.mark_inaccurate(name, answer)
            elif isinstance(answer, Failure) and name in done:
                self._failed(name, answer, last)
                done.remove(name)
            elif not isinstance(answer, Failure) and answer.leaked_bytes:
                print(
                    f"{name}: {cell}: leaked {answer.leaked_bytes} bytes in its blocks",
                    file=sys.stderr,
                )
        self._release(done)
        return starved

    def _without_failures(self, answers: Mapping[str, Answer]) -> dict[str, Answer]:
        """Write failures of workers that were given up, and return the other answers."""
        for name, answer in answers.items():
            if isinstance(answer, Failure):
                self._rows.failed(name, self._versions[process_of(name)[0]], answer, 0, 0)
        return {name: each for name, each in answers.items() if not isinstance(each, Failure)}

    def _failed(self, name: str, failure: Failure, block: int = 0, order: int = 0) -> None:
        """Write a failure down; end the worker, or have it release its cell."""
        version = self._versions[process_of(name)[0]]
        self._rows.failed(name, version, failure, block, order)
        self._give_up({name: failure})

    def _release(self, names: Iterable[str]) -> None:
        for name, answer in self._ask(names, Release()).items():
            if isinstance(answer, Failure) or self._memory.leaks(answer.held_bytes):
                self._stop(name)
            else:
                self._memory.released(name)

    def _stop(self, name: str) -> None:
        self._memory.lost(name, self._workers.stop(name))

    def _ask_alone(self, name: str, request: Request) -> Answer:
        """Ask one worker while the others wait, within what is left of its time in the cell."""
        timing, began = self._plan.timing, time.monotonic()
        left_s = timing.cell_limit_s - self._spent_s[name]
        limit_s = min(left_s, timing.cell_timeout_s)
        answer = self._ask([name], request, limit_s)[name]
        self._spent_s[name] += time.monotonic() - began
        if _is_failure(answer, "hung") and left_s <= timing.cell_timeout_s:
            reason = f"more than {timing.cell_limit_s:g} s for its blocks in this cell"
            return replace(answer, reason=reason)
        return answer

    def _ask(
        self, names: Iterable[str], request: Request, limit_s: float | None = None
    ) -> dict[str, Answer]:
        limit_s = self._plan.timing.cell_timeout_s if limit_s is None else limit_s
        began = time.monotonic()
        answers = self._workers.ask(names, limit_s, request)
        spent_s = time.monotonic() - began
        self._phase_times.add(request.do, spent_s, answers)
        # Workers side by side share one GPU, and each waits for the others: the longest counts.
        worked = [answer for answer in answers.values() if isinstance(answer, GpuWork)]
        timed_s = max((answer.busy_s for answer in worked), default=0.0)
        whole_s = max((answer.busy_s + _first_s(answer) for answer in worked), default=0.0)
        hung = any(_is_failure(answer, "hung") for answer in answers.values())
        if hung and isinstance(request, Prepare):
            # A library that has compiled or tuned until its time was over made its first call, too.
            whole_s = max(whole_s, spent_s)
        self._timed_s += timed_s
        self._first_s += whole_s - timed_s
        for name, answer in answers.items():
            if isinstance(answer, Prepared):
                self._memory.holds(name, answer.held_bytes)
        return answers


def _prepare(cell: Cell) -> Prepare:
    return Prepare(cell.case.name, cell.dtype, cell.pass_)


def _first_s(answer: Answer) -> float:
    return answer.first_s if isinstance(answer, Prepared) else 0.0


def _is_failure(answer: Answer, status: str) -> bool:
    return isinstance(answer, Failure) and answer.status == status


def _starved(answers: Mapping[str, Answer]) -> list[str]:
    """Return the implementations that found no memory."""
    return [impl for impl, answer in answers.items() if _is_failure(answer, "oom")]


def _further(impls: Iterable[str], count: int) -> list[str]:
    """Return the names of so many further processes of each implementation."""
    return [worker_name(impl, number + 1) for number in range(count) for impl in impls]


def _say_left_out(name: str, failure: Failure) -> None:
    print(f"{name}: left out: {failure.status}: {failure.reason}", file=sys.stderr)


def _is_further(name: str) -> bool:
    return process_of(name)[1] > 0


def _impls(names: Iterable[str]) -> list[str]:
    """Return the implementations of workers."""
    return list(dict.fromkeys(process_of(name)[0] for name in names))


def _calls(plan: MeasurementPlan, warm: BlockTimes) -> int:
    """Return how many calls fill a block, within bounds. warm: the times of the warm-up block."""
    block_us = plan.timing.block_ms * 1e3
    filling = block_us / max(warm.device_us, 1e-3)
    least = 1 if warm.call_us > LONG * block_us else plan.least_calls
    return int(min(max(filling, least), MOST_CALLS))


def _digest(rows: Sequence[Mapping]) -> str:
    """Return a line for the log: the median of each implementation's times, or its status."""
    words = []
    for impl in dict.fromkeys(row["impl"] for row in rows):
        mine = [row for row in rows if row["impl"] == impl]
        bad = next((row["status"] for row in mine if row["status"] != "ok"), None)
        times = [row["device_us"] for row in mine if row.get("device_us")]
        words.append(f"{impl} {bad or f'{statistics.median(times):.1f} us'}")
    return ", ".join(words)

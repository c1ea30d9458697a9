"""Times the implementations of one op against each other, each in a process of its own.

All prepare a cell at the same time, but for those that tune themselves. Then each block visits all
of them in an order drawn anew, so that drift of the machine hits all alike. A process that fails is
a row with a status, and is replaced before the next cell; the others go on.

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
from dataclasses import dataclass, field

from harness.calls.cell import Cell
from harness.machine.gpu_lock import Watch
from harness.measure.gate import Gate
from harness.measure.phase_times import Stages
from harness.measure.rows import Rows
from harness.measure.stopping import Rule, Timing
from harness.results import raw
from harness.status import FATAL
from harness.workers.gpu_memory import Memory
from harness.workers.pool import LOST, Crew, further, process_of
from ops._spec import Op

WARM_UP_CALLS = 3
CALLS = (3, 100)


@dataclass(frozen=True)
class Plan:
    """The cells to time and how.

    impls: in the order in which failures are listed. seed: root of the inputs and of the order;
    None until one is drawn. ceilings: GB/s and TFLOP/s by quantity, empty where unknown. bench: the
    module that does the work in the workers. alone: those whose library times candidates in its
    first call, and makes it after the others, by itself; with the environment variables by which it
    finds what it chose before (`harness.results.choices`). drawn_seed: that from which the drawn
    shapes among the cells follow; None where there are none.
    """

    op: Op
    family: str
    impls: Sequence[str]
    cells: Sequence[Cell]
    seed: int | None
    timing: Timing
    ceilings: Mapping[str, float]
    bench: str
    alone: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    drawn_seed: int | None = None


@dataclass(frozen=True)
class Done:
    """A finished cell: its rows, why its timing stopped (a key of `stopping.REASONS`), the seconds
    in which the GPU was timed or warmed up for it, and those of the first calls, in which the
    libraries compile and tune.
    """

    name: str
    rows: list[dict[str, object]]
    stopped: str
    timed_s: float
    first_s: float


class Engine:
    """Walks the cells of a plan."""

    def __init__(self, plan: Plan, gate: Gate, watch: Watch):
        self._plan, self._gate, self._watch = plan, gate, watch
        self._memory = Memory(watch.used_bytes, watch.users)
        self._versions: dict[str, str] = {}

    def cells(self) -> Iterator[Done]:
        """Each cell as soon as it is done; ends the workers when it is closed."""
        plan = self._plan
        with Crew(plan.op.name, plan.seed, plan.bench, plan.alone) as self._crew:
            for cell in plan.cells:
                done = self._done(cell)
                if any(row["reason"] == LOST for row in done.rows):
                    print(f"{plan.op.name} {cell}: {LOST}; once more", file=sys.stderr)
                    done = self._done(cell)
                print(f"{plan.op.name} {cell}: {_digest(done.rows)}", file=sys.stderr)
                print(f"{plan.op.name} {cell}: {self._stages}", file=sys.stderr)
                yield done

    def _done(self, cell: Cell) -> Done:
        self._rows = Rows(self._plan.op, self._plan.family, cell, self._plan.ceilings)
        self._timed_s, self._first_s, self._stages = 0.0, 0.0, Stages()
        self._spent_s: dict[str, float] = defaultdict(float)
        stopped = self._measure(cell)
        return Done(str(cell), self._rows.taken, stopped, self._timed_s, self._first_s)

    def _measure(self, cell: Cell) -> str:
        ready = self._prepare(cell)
        ready |= self._prepare_further(cell, ready)
        rule = Rule(self._plan.timing, self._plan.impls)
        block, began = 0, time.monotonic()
        while not (stopped := rule.stop(_impls(ready), block, time.monotonic() - began)):
            self._memory.settle()
            self._memory.ready()
            for order, name in enumerate(self._draw(ready, cell, block)):
                if name not in ready:  # another process of the implementation has failed
                    continue
                answer = self._block(name, ready[name]["calls"], block)
                if self._failed(name, answer, block, order):
                    self._leave_out(name, ready)
                else:
                    version = self._versions[process_of(name)[0]]
                    self._rows.timed(name, version, ready[name], answer, block, order)
            for impl, device_us in self._rows.block(block).items():
                rule.timed(impl, block, device_us)
            block += 1
        self._conclude(ready, cell, block - 1)
        return stopped

    def _prepare(self, cell: Cell) -> dict[str, dict]:
        """What each implementation that can be timed said of the cell, and its calls a block."""
        what = {"case": cell.case.name, "dtype": cell.dtype, "direction": cell.direction}
        self._memory.settle()
        started = self._start(self._verified(cell))
        self._memory.idle()
        alone = [impl for impl in started if impl in self._plan.alone]
        ready = self._ask([impl for impl in started if impl not in alone], "prepare", **what)
        for impl in alone:
            ready |= self._ask([impl], "prepare", **what)
        short = [impl for impl, answer in ready.items() if answer["status"] == "oom"]
        if len(ready) > 1:
            # Rivals that prepared at the same time may have held the memory: once more, alone.
            for impl in short:
                self._dismiss(impl)
                del ready[impl]
            for impl in short:
                self._memory.settle()
                ready |= self._ask(self._start([impl]), "prepare", **what)
        for impl, prepared in list(ready.items()):
            if self._failed(impl, prepared):
                del ready[impl]
        self._memory.settle()
        self._memory.ready()
        for impl, prepared in list(ready.items()):
            # The first block is warm-up; it also says how many calls fill the time of a block.
            answer = self._block(impl, WARM_UP_CALLS)
            if self._failed(impl, answer):
                del ready[impl]
            else:
                prepared["device_us"] = answer["device_us"]
                prepared["calls"] = _calls(self._plan.timing.block_ms, answer["device_us"])
        return ready

    def _prepare_further(self, cell: Cell, ready: Mapping[str, dict]) -> dict[str, dict]:
        """What further processes said of a cell with a short call; none of a cell without.

        One that cannot be prepared is left out: the implementation has a time without it.
        """
        timing = self._plan.timing
        shortest = min((prepared["device_us"] for prepared in ready.values()), default=0.0)
        if not ready or shortest >= timing.short_us:
            return {}
        what = {"case": cell.case.name, "dtype": cell.dtype, "direction": cell.direction}
        names = [further(impl, n) for n in range(1, timing.processes) for impl in ready]
        for name, answer in self._crew.start(names).items():
            if answer["status"] != "ok":
                self._leave_behind(name, answer)
                names.remove(name)
        alone = [name for name in names if process_of(name)[0] in self._plan.alone]
        prepared = self._ask([name for name in names if name not in alone], "prepare", **what)
        for name in alone:
            prepared |= self._ask([name], "prepare", **what)
        for name, answer in list(prepared.items()):
            warm = self._block(name, WARM_UP_CALLS) if answer["status"] == "ok" else answer
            if warm["status"] != "ok":
                self._leave_behind(name, warm)
                del prepared[name]
            else:
                answer["calls"] = ready[process_of(name)[0]]["calls"]
        self._memory.settle()
        self._memory.ready()
        return prepared

    def _leave_behind(self, name: str, answer: Mapping) -> None:
        """Goes on without a further process."""
        print(f"{name}: left out: {answer['status']}: {answer['reason']}", file=sys.stderr)
        self._dismiss(name)

    def _leave_out(self, name: str, ready: dict[str, dict]) -> None:
        """Goes on without an implementation of which a process has failed."""
        impl, _ = process_of(name)
        del ready[name]
        others = [other for other in ready if process_of(other)[0] == impl]
        for other in others:
            del ready[other]
        self._release(others)

    def _verified(self, cell: Cell) -> list[str]:
        """The implementations that the gate lets through; the others leave a row."""
        passed = []
        for impl in self._plan.impls:
            verdict = self._gate.verdict(impl, cell)
            self._versions.setdefault(impl, verdict.impl_version)
            if verdict.status == "ok":
                passed.append(impl)
            else:
                answer = {"status": verdict.status, "reason": verdict.reason}
                self._rows.failed(impl, self._versions[impl], answer, 0, 0)
        return passed

    def _start(self, impls: Sequence[str]) -> list[str]:
        """Those of the implementations that have a worker now; the others leave a row."""
        started, began = list(impls), time.monotonic()
        answers = self._crew.start(impls)
        self._stages.add("start", time.monotonic() - began, answers)
        for impl, answer in answers.items():
            if answer["status"] == "ok":
                self._versions[impl] = answer["impl_version"]
            else:
                self._rows.failed(impl, self._versions[impl], answer, 0, 0)
                self._crew.dismiss(impl)
                started.remove(impl)
        return started

    def _draw(self, names: Mapping, cell: Cell, what: object) -> list[str]:
        """The workers in the order that the seed gives them here."""
        draw = random.Random(f"{self._plan.seed}/{self._plan.op.name}/{cell}/{what}")
        return draw.sample(sorted(names), len(names))

    def _block(self, name: str, calls: int, turn: int = 0) -> dict:
        self._memory.settle()
        answer = self._ask_alone(name, "block", calls=calls, turn=turn) | {"calls": calls}
        if answer["status"] == "ok" and not all(map(_positive, map(answer.get, raw.TIMES))):
            answer |= {"status": "crashed", "reason": "answers without a time above zero"}
        return answer

    def _conclude(self, ready: dict[str, dict], cell: Cell, last: int) -> None:
        """The end of a cell: energy, the check of the timed calls, and what is given back."""
        timing = self._plan.timing
        # Calls without a flush between them are other calls where the L2 holds all they touch.
        telling = [impl for impl in ready if self._rows.beyond(ready[impl]["l2_bytes"])]
        wanted = [impl for impl in telling if impl in timing.energy_impls and timing.energy_ms]
        for impl in self._draw(wanted, cell, "energy"):
            self._memory.settle()
            answer = self._ask_alone(impl, "energy", window_ms=timing.energy_ms)
            if self._failed(impl, answer, last):
                del ready[impl]
            else:
                self._rows.energy(impl, answer)
        if strangers := self._watch.strangers(self._crew.groups):
            self._rows.shared(strangers[0])
        for name, answer in self._ask(ready, "check").items():
            if answer["status"] == "inaccurate":
                self._rows.condemn(name, answer)
            elif self._failed(name, answer, last):
                del ready[name]
            elif leaked := answer.get("leaked_bytes"):
                print(f"{name}: {cell}: leaked {leaked} bytes in its blocks", file=sys.stderr)
        self._release(ready)

    def _failed(self, name: str, answer: Mapping, block: int = 0, order: int = 0) -> bool:
        """Whether an answer is a failure; if so it is written down and its worker dealt with."""
        if answer["status"] == "ok":
            return False
        version = self._versions[process_of(name)[0]]
        self._rows.failed(name, version, answer, block, order)
        if answer["status"] in FATAL:
            self._dismiss(name)
        else:
            self._release([name])
        return True

    def _release(self, names: Iterable[str]) -> None:
        for name, answer in self._ask(names, "release").items():
            if answer["status"] != "ok" or self._memory.leaks(answer["held_bytes"]):
                self._dismiss(name)
            else:
                self._memory.released(name)

    def _dismiss(self, name: str) -> None:
        self._memory.lost(name, self._crew.dismiss(name))

    def _ask_alone(self, name: str, do: str, **arguments: object) -> dict:
        """The answer of one while the others wait, within what is left of its time in the cell."""
        timing, began = self._plan.timing, time.monotonic()
        left_s = timing.cell_limit_s - self._spent_s[name]
        limit_s = min(left_s, timing.cell_timeout_s)
        answer = self._ask([name], do, limit_s, **arguments)[name]
        self._spent_s[name] += time.monotonic() - began
        if answer["status"] == "hung" and left_s <= timing.cell_timeout_s:
            answer["reason"] = f"more than {timing.cell_limit_s:g} s for its blocks in this cell"
        return answer

    def _ask(
        self, names: Iterable[str], do: str, limit_s: float | None = None, **arguments: object
    ) -> dict[str, dict]:
        limit_s = self._plan.timing.cell_timeout_s if limit_s is None else limit_s
        began = time.monotonic()
        answers = self._crew.ask(names, limit_s, do, **arguments)
        self._stages.add(do, time.monotonic() - began, answers)
        # Side by side they share one GPU, and each waits for the others: the longest counts.
        timed = {name: answer.get("busy_s", 0.0) for name, answer in answers.items()}
        whole = (timed[name] + answer.get("first_s", 0.0) for name, answer in answers.items())
        timed_s = max(timed.values(), default=0.0)
        self._timed_s += timed_s
        self._first_s += max(whole, default=0.0) - timed_s
        for name, answer in answers.items():
            if do == "prepare" and answer["status"] == "ok":
                self._memory.holds(name, answer["held_bytes"])
        return answers


def _impls(names: Iterable[str]) -> list[str]:
    """The implementations of workers."""
    return list(dict.fromkeys(process_of(name)[0] for name in names))


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _calls(block_ms: float, device_us: float) -> int:
    """How many calls of this length fill a block, between CALLS."""
    least, most = CALLS
    return int(min(max(block_ms * 1e3 / max(device_us, 1e-3), least), most))


def _digest(rows: Sequence[Mapping]) -> str:
    """One line for the log: the median of each implementation's times, or its status."""
    words = []
    for impl in dict.fromkeys(row["impl"] for row in rows):
        mine = [row for row in rows if row["impl"] == impl]
        bad = next((row["status"] for row in mine if row["status"] != "ok"), None)
        times = [row["device_us"] for row in mine if row.get("device_us")]
        words.append(f"{impl} {bad or f'{statistics.median(times):.1f} us'}")
    return ", ".join(words)

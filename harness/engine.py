"""Times the implementations of one op against each other, each in a process of its own.

All prepare a cell at the same time, but for those that tune themselves. Then each block visits all
of them in an order drawn anew, so that drift of the machine hits all alike. A process that fails is
a row with a status, and is replaced before the next cell; the others go on.
"""

import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness import raw
from harness.cell import Cell, Rows
from harness.gate import Gate
from harness.lease import Watch
from harness.memory import Memory
from harness.process import LOST, Crew
from harness.stages import Stages
from harness.stopping import Rule, Timing
from kernels._contract import Op

WARM_UP_CALLS = 3
CALLS = (3, 100)
# After these a process holds memory or cannot be trusted.
FATAL = ("crashed", "hung", "oom")


@dataclass(frozen=True)
class Plan:
    """What to time and how.

    impls: in the order in which failures are listed. seed: root of the inputs and of the order;
    None until one is drawn. ceilings: GB/s and TFLOP/s by quantity, empty where unknown. bench:
    the module that does the work in the workers. alone: those whose library times candidates in
    its first call, and makes it after the others, by itself; with the environment variables by
    which it finds what it chose before (`harness.choices`). drawn_seed: that from which the drawn
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
        self._spent_s = dict.fromkeys(self._plan.impls, 0.0)
        stopped = self._measure(cell)
        return Done(str(cell), self._rows.taken, stopped, self._timed_s, self._first_s)

    def _measure(self, cell: Cell) -> str:
        ready = self._prepare(cell)
        rule = Rule(self._plan.timing, self._plan.impls)
        block, began = 0, time.monotonic()
        while not (stopped := rule.stop(list(ready), block, time.monotonic() - began)):
            self._memory.settle()
            self._memory.ready()
            for order, impl in enumerate(self._draw(ready, cell, block)):
                prepared = ready[impl]
                answer = self._block(impl, prepared["calls"], block)
                if self._failed(impl, answer, block, order):
                    del ready[impl]
                else:
                    version = self._versions[impl]
                    self._rows.timed(impl, version, prepared, answer, block, order)
                    rule.timed(impl, block, answer["device_us"])
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
                prepared["calls"] = _calls(self._plan.timing.block_ms, answer["device_us"])
        return ready

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

    def _draw(self, impls: Mapping, cell: Cell, what: object) -> list[str]:
        """The implementations in the order that the seed gives them here."""
        draw = random.Random(f"{self._plan.seed}/{self._plan.op.name}/{cell}/{what}")
        return draw.sample(sorted(impls), len(impls))

    def _block(self, impl: str, calls: int, turn: int = 0) -> dict:
        self._memory.settle()
        answer = self._ask_alone(impl, "block", calls=calls, turn=turn) | {"calls": calls}
        if answer["status"] == "ok" and not all(map(_positive, map(answer.get, raw.TIMES))):
            answer |= {"status": "crashed", "reason": "answers without a time above zero"}
        return answer

    def _conclude(self, ready: dict[str, dict], cell: Cell, last: int) -> None:
        """What follows the last block: energy, the check of the timed calls, and the end."""
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
        for impl, answer in self._ask(ready, "check").items():
            if answer["status"] == "inaccurate":
                self._rows.condemn(impl, answer)
            elif self._failed(impl, answer, last):
                del ready[impl]
            elif leaked := answer.get("leaked_bytes"):
                print(f"{impl}: {cell}: leaked {leaked} bytes in its blocks", file=sys.stderr)
        self._release(ready)

    def _failed(self, impl: str, answer: Mapping, block: int = 0, order: int = 0) -> bool:
        """Whether an answer is a failure; if so it is written down and its worker dealt with."""
        if answer["status"] == "ok":
            return False
        self._rows.failed(impl, self._versions[impl], answer, block, order)
        if answer["status"] in FATAL:
            self._dismiss(impl)
        else:
            self._release([impl])
        return True

    def _release(self, impls: Sequence[str]) -> None:
        for impl, answer in self._ask(impls, "release").items():
            if answer["status"] != "ok" or self._memory.leaks(answer["held_bytes"]):
                self._dismiss(impl)
            else:
                self._memory.released(impl)

    def _dismiss(self, impl: str) -> None:
        self._memory.lost(impl, self._crew.dismiss(impl))

    def _ask_alone(self, impl: str, do: str, **arguments: object) -> dict:
        """The answer of one while the others wait, within what is left of its time in the cell."""
        timing, began = self._plan.timing, time.monotonic()
        left_s = timing.cell_limit_s - self._spent_s[impl]
        limit_s = min(left_s, timing.cell_timeout_s)
        answer = self._ask([impl], do, limit_s, **arguments)[impl]
        self._spent_s[impl] += time.monotonic() - began
        if answer["status"] == "hung" and left_s <= timing.cell_timeout_s:
            answer["reason"] = f"more than {timing.cell_limit_s:g} s for its blocks in this cell"
        return answer

    def _ask(
        self, impls: Sequence[str], do: str, limit_s: float | None = None, **arguments: object
    ) -> dict[str, dict]:
        limit_s = self._plan.timing.cell_timeout_s if limit_s is None else limit_s
        began = time.monotonic()
        answers = self._crew.ask(impls, limit_s, do, **arguments)
        self._stages.add(do, time.monotonic() - began, answers)
        # Side by side they share one GPU, and each waits for the others: the longest counts.
        timed = {impl: answer.get("busy_s", 0.0) for impl, answer in answers.items()}
        whole = (timed[impl] + answer.get("first_s", 0.0) for impl, answer in answers.items())
        timed_s = max(timed.values(), default=0.0)
        self._timed_s += timed_s
        self._first_s += max(whole, default=0.0) - timed_s
        for impl, answer in answers.items():
            if do == "prepare" and answer["status"] == "ok":
                self._memory.holds(impl, answer["held_bytes"])
        return answers


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

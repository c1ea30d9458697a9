"""Times the implementations of one op against each other, each in a process of its own.

All prepare a cell at the same time. Then each block visits all of them in an order drawn anew, so
that drift of the machine hits all alike. A process that fails is a row with a status, and is
replaced before the next cell; the others go on.
"""

import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.cell import Cell, Rows
from harness.gate import Gate
from harness.process import Crew
from kernels._contract import Op

WARM_UP_CALLS = 3
CALLS = (3, 200)
# After these a process holds memory or cannot be trusted.
FATAL = ("crashed", "hung", "oom")


@dataclass(frozen=True)
class Plan:
    """What to time and how.

    impls: in the order in which failures are listed. ceilings: GB/s and TFLOP/s by quantity, empty
    where unknown. bench: the module that does the work in the workers. block_ms: GPU time of an
    implementation in a block. timeout_s: the longest wait for one answer.
    """

    op: Op
    family: str
    impls: Sequence[str]
    cells: Sequence[Cell]
    seed: int
    blocks: int
    block_ms: float
    timeout_s: float
    ceilings: Mapping[str, float]
    bench: str


class Engine:
    """Walks the cells of a plan; `busy_s` is the time that the workers spent in timed loops."""

    def __init__(self, plan: Plan, gate: Gate):
        self.busy_s = 0.0
        self._plan, self._gate = plan, gate
        self._versions: dict[str, str] = {}

    def cells(self) -> Iterator[list[dict[str, object]]]:
        """The rows of each cell as soon as it is done; ends its workers when it is closed."""
        plan = self._plan
        with Crew(plan.op.name, plan.seed, plan.bench) as self._crew:
            for cell in plan.cells:
                self._rows = Rows(plan.op, plan.family, cell, plan.ceilings)
                self._measure(cell)
                print(f"{plan.op.name} {cell}: {_digest(self._rows.taken)}", file=sys.stderr)
                yield self._rows.taken

    def _measure(self, cell: Cell) -> None:
        ready = self._prepare(cell)
        for block in range(self._plan.blocks):
            names = sorted(ready)
            draw = random.Random(f"{self._plan.seed}/{self._plan.op.name}/{cell}/{block}")
            for order, impl in enumerate(draw.sample(names, len(names))):
                prepared = ready[impl]
                answer = self._block(impl, prepared["calls"])
                if self._failed(impl, answer, block, order):
                    del ready[impl]
                else:
                    version = self._versions[impl]
                    self._rows.timed(impl, version, prepared, answer, block, order)
        for impl, answer in self._ask(ready, "check").items():
            if answer["status"] == "inaccurate":
                self._rows.condemn(impl, answer)
            elif self._failed(impl, answer, self._plan.blocks - 1):
                del ready[impl]
        self._release(ready)

    def _prepare(self, cell: Cell) -> dict[str, dict]:
        """What each implementation that can be timed said of the cell, and its calls a block."""
        what = {"case": cell.case.name, "dtype": cell.dtype, "direction": cell.direction}
        ready = self._ask(self._start(self._verified(cell)), "prepare", **what)
        short = [impl for impl, answer in ready.items() if answer["status"] == "oom"]
        if len(ready) > 1:
            # Rivals that prepared at the same time may have held the memory: once more, alone.
            for impl in short:
                self._crew.dismiss(impl)
                del ready[impl]
                ready |= self._ask(self._start([impl]), "prepare", **what)
        for impl, prepared in list(ready.items()):
            # The first block is warm-up; it also says how many calls fill the time of a block.
            if not self._failed(impl, prepared):
                answer = self._block(impl, WARM_UP_CALLS)
                if not self._failed(impl, answer):
                    prepared["calls"] = _calls(self._plan.block_ms, answer["device_us"])
                    continue
            del ready[impl]
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
        started = list(impls)
        for impl, answer in self._crew.start(impls).items():
            if answer["status"] == "ok":
                self._versions[impl] = answer["impl_version"]
            else:
                self._rows.failed(impl, self._versions[impl], answer, 0, 0)
                self._crew.dismiss(impl)
                started.remove(impl)
        return started

    def _block(self, impl: str, calls: int) -> dict:
        answer = self._ask([impl], "block", calls=calls)[impl]
        self.busy_s += answer.get("busy_s", 0.0)
        return answer | {"calls": calls}

    def _failed(self, impl: str, answer: Mapping, block: int = 0, order: int = 0) -> bool:
        """Whether an answer is a failure; if so it is written down and its worker dealt with."""
        if answer["status"] == "ok":
            return False
        self._rows.failed(impl, self._versions[impl], answer, block, order)
        if answer["status"] in FATAL:
            self._crew.dismiss(impl)
        else:
            self._release([impl])
        return True

    def _release(self, impls: Sequence[str]) -> None:
        for impl, answer in self._ask(impls, "release").items():
            if answer["status"] != "ok":
                self._crew.dismiss(impl)

    def _ask(self, impls: Sequence[str], do: str, **arguments: object) -> dict[str, dict]:
        return self._crew.ask(impls, self._plan.timeout_s, do, **arguments)


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

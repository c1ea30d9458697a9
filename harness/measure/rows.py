"""The rows of a cell."""

import statistics
from collections import defaultdict
from collections.abc import Mapping

from harness.calls.cell import Cell
from harness.machine import nvml
from harness.measure.messages import BlockTimes, Energy, Prepared
from harness.results import raw
from harness.results.floor import Work, impossible
from harness.workers.messages import Failure
from harness.workers.pool import process_of
from ops._spec import ITEMSIZE, Op

# The readings of a cell, and those of a block.
ENERGY = ("energy_uj", "energy_pm_uj")
RUNNING = tuple(name for name in raw.READINGS if name not in ENERGY)


class Rows:
    """The rows of one cell, in the order in which they were taken.

    board: the UUID of the GPU. name: that of a worker, which tells the implementation and its
    process.
    """

    def __init__(
        self, op: Op, family: str, cell: Cell, ceilings: Mapping[str, float], board: str = ""
    ):
        self.taken: list[dict[str, object]] = []
        self._cell, self._ceilings = cell, ceilings
        self._work = work(op, cell)
        self._common = {
            "op": op.name,
            "family": family,
            "case": cell.case.name,
            "dtype": cell.dtype,
            "pass": cell.pass_,
            "set": cell.set,
            "board": board,
            "bytes_read": self._work.bytes_read,
            "bytes_written": self._work.bytes_written,
            "flops": self._work.flops,
        }

    def failed(self, name: str, version: str, failure: Failure, block: int, order: int) -> None:
        """Add a row without times, for a failure in this block; block 0 also before the first."""
        what = {"status": failure.status, "reason": failure.reason}
        self._add(name, version, block, order, **what)

    def timed(
        self,
        name: str,
        version: str,
        prepared: Prepared,
        calls: int,
        times: BlockTimes,
        block: int,
        order: int,
    ) -> None:
        """Add a row for a block of `calls` calls."""
        status, why = "ok", ""
        if nvml.slowed(times.throttle):
            status, why = "throttled", times.throttle
        if too_fast := impossible(times.device_us, self._work, self._ceilings):
            status, why = "impossible", too_fast
        found = vars(times)
        measured = {name: _rounded(found[name]) for name in (*raw.TIMES, *RUNNING)}
        measured |= {"calls": calls, "throttle": times.throttle}
        measured |= {"peak_mem_bytes": prepared.peak_mem_bytes}
        reason = _joined(prepared.remark, why)
        self._add(name, version, block, order, **measured, status=status, reason=reason)

    def block(self, block: int) -> dict[str, float]:
        """The time in us of each implementation in a block, the geometric mean of its processes."""
        found = defaultdict(list)
        for row in self.taken:
            if row["block"] == block and row.get("device_us"):
                found[row["impl"]].append(row["device_us"])
        return {impl: statistics.geometric_mean(times) for impl, times in found.items()}

    def energy(self, name: str, energy: Energy) -> None:
        """Put the energy of a call, measured once a cell, into the row of the last block."""
        of = [row for row in self.taken if (row["impl"], row["process"]) == process_of(name)]
        last = max(of, key=lambda row: row["block"])
        last |= {column: _rounded(vars(energy)[column]) for column in ENERGY}

    def beyond(self, l2_bytes: int) -> bool:
        """Return whether a call moves more than the L2 holds."""
        return self._work.bytes_read + self._work.bytes_written > l2_bytes

    def shared(self, program: str) -> None:
        """Another program was on the GPU: no time of this cell is that of the GPU alone."""
        for row in self.taken:
            if row["status"] == "ok":
                reason = _joined(row["reason"], f"shared with {program}")
                row.update(status="throttled", reason=reason)

    def mark_inaccurate(self, name: str, failure: Failure) -> None:
        """Mark the rows of an implementation whose timed calls gave a wrong result."""
        impl, _ = process_of(name)
        for row in self.taken:
            # Each of its processes may find the same fault.
            if row["impl"] == impl and failure.reason not in row["reason"]:
                reason = _joined(row["reason"], failure.reason)
                row.update(status=failure.status, reason=reason)

    def _add(self, name: str, version: str, block: int, order: int, **more: object) -> None:
        impl, process = process_of(name)
        place = {"impl": impl, "impl_version": version, "process": process}
        place |= {"block": block, "order": order}
        self.taken.append(self._common | place | more)


def work(op: Op, cell: Cell) -> Work:
    """Return what a call of a cell cannot avoid."""
    cost = op.cost(cell.case, cell.pass_, ITEMSIZE[cell.dtype])
    return Work(cost.bytes_read, cost.bytes_written, cost.flops, cell.dtype, cell.pass_)


def _joined(before: str, why: str) -> str:
    """Two reasons as one. That a row was timed by events stands first, whatever else befell it."""
    return nvml.SEPARATOR.join(filter(None, (before, why)))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

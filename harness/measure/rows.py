"""The rows of a cell, and the least time that the ceilings allow it."""

import statistics
from collections import defaultdict
from collections.abc import Mapping

from harness.calls.cell import Cell
from harness.machine import nvml
from harness.results import raw
from harness.workers.pool import process_of
from ops._spec import ITEMSIZE, Cost, Op

# Faster than this share of the floor is more than the uncertainty of the ceilings.
FLOOR_SHARE = 0.9
# Traffic, in sizes of the L2, from which on what stays in the cache no longer counts.
BEYOND_L2 = 4


def floor_us(
    cost: Cost, dtype: str, ceilings: Mapping[str, float], l2_bytes: int, direction: str = "forward"
) -> float:
    """The least time that the ceilings allow, in µs; 0 where they say nothing.

    ceilings: GB/s and TFLOP/s by quantity. Traffic that the L2 could hide sets no floor; so of
    "both" neither does what a backward pass may find there of the forward pass.
    """
    seconds = cost.flops / (ceilings[dtype] * 1e12) if dtype in ceilings else 0.0
    streams = _moved(cost) > BEYOND_L2 * l2_bytes
    if streams and {"read", "write"} <= set(ceilings):
        found = l2_bytes if direction == "both" else 0
        reading = max(0, cost.bytes_read - found) / (ceilings["read"] * 1e9)
        seconds = max(seconds, reading + cost.bytes_written / (ceilings["write"] * 1e9))
    return seconds * 1e6


class Rows:
    """The rows of one cell, in the order in which they were taken.

    name: that of a worker, which tells the implementation and its process.
    """

    def __init__(self, op: Op, family: str, cell: Cell, ceilings: Mapping[str, float]):
        self.taken: list[dict[str, object]] = []
        self._cell, self._ceilings = cell, ceilings
        self._cost = op.cost(cell.case, cell.direction, ITEMSIZE[cell.dtype])
        self._common = {
            "op": op.name,
            "family": family,
            "case": cell.case.name,
            "dtype": cell.dtype,
            "pass": cell.direction,
            "set": cell.set,
            "bytes_read": self._cost.bytes_read,
            "bytes_written": self._cost.bytes_written,
            "flops": self._cost.flops,
        }

    def failed(self, name: str, version: str, answer: Mapping, block: int, order: int) -> None:
        """A row without times, for a failure in this block; block 0 also if none had begun."""
        what = {"status": answer["status"], "reason": answer["reason"]}
        self._add(name, version, block, order, **what)

    def timed(
        self, name: str, version: str, prepared: Mapping, answer: Mapping, block: int, order: int
    ) -> None:
        """A row from what the worker said of the cell when it was prepared, and of this block."""
        throttle = answer.get("throttle") or ""
        cell, l2_bytes = self._cell, prepared["l2_bytes"]
        floor = floor_us(self._cost, cell.dtype, self._ceilings, l2_bytes, cell.direction)
        status, why = "ok", ""
        if nvml.slowed(throttle):
            status, why = "throttled", throttle
        if answer["device_us"] < FLOOR_SHARE * floor:
            status, why = "impossible", f"faster than the floor of {floor:.2f} us"
        measured = {name: _rounded(answer.get(name)) for name in (*raw.TIMES, *raw.READINGS)}
        measured |= {"calls": answer["calls"], "throttle": throttle}
        measured |= {"peak_mem_bytes": prepared["peak_mem_bytes"]}
        reason = _joined(prepared["reason"], why)
        self._add(name, version, block, order, **measured, status=status, reason=reason)

    def block(self, block: int) -> dict[str, float]:
        """The time in us of each implementation in a block, the geometric mean of its processes."""
        found = defaultdict(list)
        for row in self.taken:
            if row["block"] == block and row.get("device_us"):
                found[row["impl"]].append(row["device_us"])
        return {impl: statistics.geometric_mean(times) for impl, times in found.items()}

    def energy(self, name: str, answer: Mapping) -> None:
        """Puts the energy of a call, of which each cell has one, on the last block's row."""
        of = [row for row in self.taken if (row["impl"], row["process"]) == process_of(name)]
        last = max(of, key=lambda row: row["block"])
        last |= {name: _rounded(answer.get(name)) for name in ("energy_uj", "energy_pm_uj")}

    def beyond(self, l2_bytes: int) -> bool:
        """Whether a call moves more than the L2 holds."""
        return _moved(self._cost) > l2_bytes

    def shared(self, program: str) -> None:
        """Another program was on the GPU: no time of this cell is that of the GPU alone."""
        for row in self.taken:
            if row["status"] == "ok":
                reason = _joined(row["reason"], f"shared with {program}")
                row.update(status="throttled", reason=reason)

    def condemn(self, name: str, answer: Mapping) -> None:
        """The times of an implementation stand, with the reason why they count for nothing."""
        impl, _ = process_of(name)
        for row in self.taken:
            # Each of its processes may find the same fault.
            if row["impl"] == impl and answer["reason"] not in row["reason"]:
                reason = _joined(row["reason"], answer["reason"])
                row.update(status=answer["status"], reason=reason)

    def _add(self, name: str, version: str, block: int, order: int, **more: object) -> None:
        impl, process = process_of(name)
        place = {"impl": impl, "impl_version": version, "process": process}
        place |= {"block": block, "order": order}
        self.taken.append(self._common | place | more)


def _moved(cost: Cost) -> int:
    return cost.bytes_read + cost.bytes_written


def _joined(before: str, why: str) -> str:
    """Two reasons as one. That a row was timed by events stands first, whatever else befell it."""
    return nvml.SEPARATOR.join(filter(None, (before, why)))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

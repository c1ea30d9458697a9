"""From the timed blocks of a cell to its rows of summary.csv."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from harness import stats
from harness.project.implementations import OURS, TWIN
from harness.results import raw
from harness.results.columns import GRID
from harness.results.floor import Work, floor_us, impossible
from harness.stats import Estimate, Interval
from harness.summarize.inference import NOTHING_KNOWN, Offset, Offsets

# A row of the raw CSV as `harness.results.raw` reads it.
Row = Mapping[str, Any]
KEY = ("op", "case", "dtype", "pass")
SIZE = re.compile(r"([A-Z])(\d+)")
# How the reason of a row begins whose calls events timed, the host's part included.
EVENTS = "events:"
# The cells of all means over ops, and the calls that launch the same once more.
HEADLINE, TRAINING = "headline", "training"


class Spread(NamedTuple):
    """The variance between the processes of a cell, of the mean logarithm of their times.

    within: the share of it that the scatter of blocks explains. freedom: of the variance.
    """

    between: float
    within: float
    freedom: int


@dataclass
class Cell:
    """All rows of one (op, case, dtype, pass) and implementation, and its times by block."""

    rows: list[Row] = field(default_factory=list)

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def failure(self) -> Row | None:
        """The row that ended the cell, if one did: then no time counts, for the results of timed
        calls are checked after the last block.
        """
        return next((row for row in self.rows if row["status"] not in raw.TIMED), None)

    def counting(self, column: str) -> list[Row]:
        """The rows that have such a time: none after a failure, and without impossible ones unless
        there is no other.
        """
        timed = [] if self.failure else [row for row in self.rows if row[column] is not None]
        return [row for row in timed if row["status"] != "impossible"] or timed

    def times(self, column: str = "device_us") -> dict[int, float]:
        """The times in µs by block, of the rows that count.

        If several processes ran it, a block has the geometric mean of their times, and counts if
        all of them have one.
        """
        found: dict[int, list[float]] = {}
        real = self.counting(column)
        for row in real:
            found.setdefault(row["block"], []).append(row[column])
        every = len({row.get("process", 0) for row in real})
        whole = {block: times for block, times in found.items() if len(times) == every}
        return {block: _mean(times) for block, times in whole.items()}

    @property
    def processes(self) -> int:
        """How many processes ran it; a time of a block is the mean of theirs."""
        return len({row.get("process", 0) for row in self.counting("device_us")})

    def spread(self) -> Spread | None:
        """How far its processes differ; None of fewer than two, or of fewer than two blocks."""
        found: dict[int, list[float]] = {}
        blocks = self.times()
        for row in self.counting("device_us"):
            if row["block"] in blocks:
                found.setdefault(row.get("process", 0), []).append(math.log(row["device_us"]))
        logs = list(found.values())
        if len(logs) < 2 or len(blocks) < 2:
            return None
        within = float(np.mean([np.var(each, ddof=1) / len(each) for each in logs]))
        between = float(np.var([np.mean(each) for each in logs], ddof=1))
        return Spread(between, within, len(logs) - 1)

    @property
    def clock(self) -> str:
        """ "graph", or "events" where any block was timed so."""
        events = any((row["reason"] or "").startswith(EVENTS) for row in self.rows)
        return "events" if events else "graph"

    @property
    def set(self) -> str:
        """ "grid" for the tuned sweep, "drawn" for shapes drawn for this run."""
        return self.first.get("set") or GRID

    @property
    def work(self) -> Work:
        """The work of a call, for its floor."""
        counts = (self.number(column) for column in ("bytes_read", "bytes_written", "flops"))
        return Work(*counts, self.first["dtype"], self.first["pass"])

    def number(self, column: str) -> float:
        """The first value of a column that is the same in all rows; 0 where there is none."""
        return next((row[column] for row in self.rows if row[column] is not None), 0)

    def least(self, column: str) -> float | None:
        """The least time of any block and process; None where none counts."""
        return min((row[column] for row in self.counting(column)), default=None)

    def median(self, column: str) -> float | None:
        """The median of a reading over the blocks that have it; None where none has."""
        found = [row[column] for row in self.rows if row[column] is not None]
        return stats.median_interval(found).value if found else None


def group(rows: Iterable[Row]) -> dict[tuple[str, ...], dict[str, Cell]]:
    """Cells by (op, case, dtype, pass), then by implementation; ours first, then by name."""
    cells: dict[tuple[str, ...], dict[str, Cell]] = {}
    for row in rows:
        rivals = cells.setdefault(tuple(row[column] for column in KEY), {})
        rivals.setdefault(row["impl"], Cell()).rows.append(row)
    return {key: dict(sorted(found.items(), key=_by_name)) for key, found in cells.items()}


def board(rivals: Mapping[str, Cell]) -> str:
    """The board that timed a cell; "" where the rows of a former run name none."""
    return next(iter(rivals.values())).first.get("board", "")


def parts(keys: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """HEADLINE or TRAINING for each cell of a study, by the values of KEY.

    A call of the pass `both` launches what `forward` and `backward` launch. If an op has all
    three, a mean over the three weighs the op twice, so its `both` is TRAINING and stands in
    families of its own. An op that has no `backward`, as a loss, shows its gradients in `both`
    alone: there it is HEADLINE. A backward cell counts here whether it has a time or not.
    """
    keys = list(keys)
    backward = {key[0] for key in keys if key[3] == "backward"}
    return {key: TRAINING if key[3] == "both" and key[0] in backward else HEADLINE for key in keys}


def summary(
    rivals: Mapping[str, Cell], ceilings: Mapping[str, float], offsets: Offsets = NOTHING_KNOWN
) -> list[dict]:
    """One row of summary.csv for each implementation of a cell; absent values are left out.

    ceilings: GB/s of "read" and "write", TFLOP/s by dtype, of the run that timed these cells.
    offsets: how far processes differ, which is part of each interval.
    """
    fair = counted(rivals, ceilings)
    return [
        _row(cell, ceilings, offsets) | _speedups(impl, fair, offsets)
        for impl, cell in rivals.items()
    ]


def counted(rivals: Mapping[str, Cell], ceilings: Mapping[str, float]) -> dict[str, Cell]:
    """The implementations of a cell whose times count, that is, may be compared."""
    counting = ("ok", "throttled")
    return {
        impl: cell
        for impl, cell in rivals.items()
        if cell.times() and _status(cell, ceilings)[0] in counting
    }


def shared(rival: Cell, ours: Cell) -> tuple[list[float], list[float]]:
    """The times of both in the blocks that both have."""
    theirs, own = rival.times(), ours.times()
    blocks = [block for block in own if block in theirs]
    return [theirs[block] for block in blocks], [own[block] for block in blocks]


def time_us(cell: Cell, offsets: Offsets) -> Interval:
    """The time of a cell that has one, with the interval of one more process's median."""
    times = list(cell.times().values())
    value = float(np.median(times))
    found = _interval(value, stats.log_median(times), offsets.alone(value, cell.processes))
    return Interval(*map(float, found))


def ratio(rival: Cell, ours: Cell, offsets: Offsets) -> Interval:
    """The rival's time over ours, by the blocks that both have, for two other processes of both."""
    both = shared(rival, ours)
    value = stats.paired_ratio(*both).value
    length = float(np.median(list(ours.times().values())))
    offset = offsets.between(length, ours.processes, rival.processes)
    return Interval(*map(float, _interval(value, stats.log_ratio(*both), offset)))


def _mean(times: list[float]) -> float:
    """The geometric mean; of one time the time itself, to the last bit."""
    return times[0] if len(times) == 1 else float(np.exp(np.log(times).mean()))


def _interval(value: np.ndarray, log: Estimate, offset: Offset) -> Interval:
    whole = stats.plus(log, offset.variance, offset.freedom)
    return stats.around(value, whole)


def _row(cell: Cell, ceilings: Mapping[str, float], offsets: Offsets) -> dict:
    first, times = cell.first, cell.times()
    row = {name: first[name] for name in ("op", "family", *KEY[1:], "impl", "impl_version")}
    row |= _parts(first["case"]) | {"blocks": len(times), "set": cell.set}
    floor, bound = floor_us(cell.work, ceilings)
    if floor:
        row |= {"floor_us": floor, "bound": bound}
    row["status"], row["reason"] = _status(cell, ceilings)
    if not times:
        return row
    time = time_us(cell, offsets)
    row |= {
        "processes": cell.processes,
        "timed_by": cell.clock,
        "device_us": time.value,
        "ci_lo": time.lo,
        "ci_hi": time.hi,
    }
    if calls := cell.least("call_us"):
        # Other work on a host makes a call longer, never shorter: where others share its
        # cores, a median says which core a process got.
        row["call_us"] = calls
    if peak := cell.number("peak_mem_bytes"):
        row["peak_mem_bytes"] = peak
    row |= {name: value for name in raw.READINGS if (value := cell.median(name)) is not None}
    row["throttled"] = sum(row["status"] == "throttled" for row in cell.rows)
    moved = cell.number("bytes_read") + cell.number("bytes_written")
    row |= {"gbps": moved / time.value / 1e3, "tflops": cell.number("flops") / time.value / 1e6}
    if floor:
        row["pct_sol"] = 100 * floor / time.value
    return row


def _speedups(impl: str, fair: Mapping[str, Cell], offsets: Offsets) -> dict[str, float]:
    """The time of each other implementation over that of this row, those of the same blocks in one
    go: a study has tens of thousands of such pairs.
    """
    if impl not in fair:
        return {}
    own, together = fair[impl].times(), {}
    for rival, cell in fair.items():
        theirs = cell.times()
        blocks = tuple(block for block in own if block in theirs)
        if rival != impl and blocks:
            alike = together.setdefault((blocks, cell.processes), {})
            alike[rival] = [theirs[block] for block in blocks]
    length, found = float(np.median(list(own.values()))), {}
    for (blocks, processes), times in together.items():
        offset = offsets.between(length, fair[impl].processes, processes)
        both = list(times.values()), [own[block] for block in blocks]
        ratios = _interval(stats.paired_ratio(*both).value, stats.log_ratio(*both), offset)
        for end, values in zip(("", "_lo", "_hi"), ratios, strict=True):
            names = (f"speedup_vs_{rival}{end}" for rival in times)
            found |= dict(zip(names, values.tolist(), strict=True))
    return found


def _status(cell: Cell, ceilings: Mapping[str, float]) -> tuple[str, str]:
    """The status and reason of a cell: "ok" if one block is, unless a failure ended it."""
    others = [row for row in cell.rows if row["status"] != "ok"]
    if cell.failure or len(others) == len(cell.rows):
        row = cell.failure or next(iter(cell.counting("device_us")), cell.first)
        return row["status"], row["reason"]
    time = stats.median_interval(list(cell.times().values())).value
    if too_fast := impossible(time, cell.work, ceilings):
        return "impossible", f"{time:.1f} us, {too_fast}"
    told = Counter(row["status"] for row in others)
    remarks = [f"{count} of {len(cell.rows)} blocks {status}" for status, count in told.items()]
    floor, _ = floor_us(cell.work, ceilings)
    if floor > time:
        remarks.append(f"{100 * floor / time:.1f} % of the speed of light")
    return "ok", "; ".join(remarks)


def _parts(case: str) -> dict:
    """size_<letter> columns and flags of a case's name."""
    sizes, flags = {}, []
    for part in case.split("-"):
        if match := SIZE.fullmatch(part):
            sizes[f"size_{match[1]}"] = int(match[2])
        else:
            flags.append(part)
    return sizes | {"flags": "-".join(flags)}


def _by_name(item: tuple[str, Cell]) -> tuple[bool, bool, str]:
    return item[0] != OURS, item[0] != TWIN, item[0]

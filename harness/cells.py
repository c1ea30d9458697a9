"""From the timed blocks of one op to its rows of summary.csv and verdicts.csv."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness import statistics
from harness.load import OURS, TWIN

# A row of the raw CSV as `harness.raw` reads it.
Row = Mapping[str, Any]
KEY = ("op", "case", "dtype", "pass")
SIZE = re.compile(r"([A-Z])(\d+)")
# What a kernel wrote may still lie in the L2 cache when its time ends; no GPU here has a larger.
CACHE_BYTES = 128 << 20
# A dense-matmul ceiling is one shape's rate at one moment's clock; other shapes pass it a little.
FASTEST = 0.8


@dataclass
class Cell:
    """All rows of one (op, case, dtype, pass) and implementation, and its times by block."""

    rows: list[Row] = field(default_factory=list)

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def wrong(self) -> Row | None:
        """The row that found a wrong result, if one did: then no time of the cell counts."""
        return next((row for row in self.rows if row["status"] == "inaccurate"), None)

    def times(self, column: str = "device_us") -> dict[int, float]:
        """The times in µs by block."""
        if self.wrong:
            return {}
        return {row["block"]: row[column] for row in self.rows if row[column] is not None}

    def number(self, column: str) -> float:
        """The first value of a column that is the same in all rows; 0 where there is none."""
        return next((row[column] for row in self.rows if row[column] is not None), 0)


def group(rows: Iterable[Row]) -> dict[tuple[str, ...], dict[str, Cell]]:
    """Cells by (op, case, dtype, pass), then by implementation; ours first, then by name."""
    cells: dict[tuple[str, ...], dict[str, Cell]] = {}
    for row in rows:
        rivals = cells.setdefault(tuple(row[column] for column in KEY), {})
        rivals.setdefault(row["impl"], Cell()).rows.append(row)
    return {key: dict(sorted(found.items(), key=_by_name)) for key, found in cells.items()}


def summary(rivals: Mapping[str, Cell], ceilings: Mapping[str, float]) -> list[dict]:
    """One row of summary.csv for each implementation of a cell; absent values are left out.

    ceilings: GB/s of "read" and "write", TFLOP/s by dtype, of the run that timed these cells.
    """
    return [_row(cell, ceilings) | _speedups(impl, rivals) for impl, cell in rivals.items()]


def verdicts(rivals: Mapping[str, Cell]) -> list[dict]:
    """One row of verdicts.csv for each baseline that was timed together with ours."""
    ours, twin = rivals.get(OURS, Cell()), rivals.get(TWIN, Cell())
    floor = math.nan
    if shared := _shared(twin, ours):
        floor = statistics.noise(statistics.paired_ratio(*shared))
    rows = []
    for impl, cell in rivals.items():
        shared = _shared(cell, ours)
        if impl in (OURS, TWIN) or not shared:
            continue
        ratio = statistics.paired_ratio(*shared)
        found = {column: cell.first[column] for column in ("op", "family", *KEY[1:])}
        found |= {"baseline": impl, "ratio": ratio.value, "ci_lo": ratio.lo, "ci_hi": ratio.hi}
        found["noise"] = "" if math.isnan(floor) else floor
        found["verdict"] = statistics.verdict(ratio, floor, len(shared[0]))
        rows.append(found)
    return rows


def floor_us(cell: Cell, ceilings: Mapping[str, float], spared: int = 0) -> tuple[float, str]:
    """The least time that the ceilings allow, in µs, and what bounds it; 0.0 where unknown.

    spared: bytes written that need not reach memory within the time.
    """
    memory = compute = 0.0
    if "read" in ceilings and "write" in ceilings:
        written = max(0.0, cell.number("bytes_written") - spared)
        memory = cell.number("bytes_read") / ceilings["read"] + written / ceilings["write"]
    if cell.first["dtype"] in ceilings:
        compute = cell.number("flops") / ceilings[cell.first["dtype"]]
    # Bytes over GB/s are ns; FLOPs over TFLOP/s are ps.
    floor = max(memory / 1e3, compute / 1e6)
    return floor, ("compute" if compute / 1e6 > memory / 1e3 else "memory") if floor else ""


def _row(cell: Cell, ceilings: Mapping[str, float]) -> dict:
    first, times, calls = cell.first, cell.times(), cell.times("call_us")
    row = {name: first[name] for name in ("op", "family", *KEY[1:], "impl", "impl_version")}
    row |= _parts(first["case"]) | {"blocks": len(times)}
    floor, bound = floor_us(cell, ceilings)
    if floor:
        row |= {"floor_us": floor, "bound": bound}
    row["status"], row["reason"] = _status(cell)
    if not times:
        return row
    time = statistics.median_interval(list(times.values()))
    row |= {"device_us": time.value, "ci_lo": time.lo, "ci_hi": time.hi}
    if calls:
        row["call_us"] = statistics.median_interval(list(calls.values())).value
    if peak := cell.number("peak_mem_bytes"):
        row["peak_mem_bytes"] = peak
    moved = cell.number("bytes_read") + cell.number("bytes_written")
    row |= {"gbps": moved / time.value / 1e3, "tflops": cell.number("flops") / time.value / 1e6}
    if floor:
        row["pct_sol"] = 100 * floor / time.value
        least, _ = floor_us(cell, ceilings, spared=CACHE_BYTES)
        if time.value < FASTEST * least and row["status"] == "ok":
            row["status"] = "impossible"
            row["reason"] = f"{time.value:.1f} us, faster than the floor of {least:.1f} us"
    return row


def _speedups(impl: str, rivals: Mapping[str, Cell]) -> dict[str, float]:
    found = {}
    for rival, cell in rivals.items():
        shared = _shared(cell, rivals[impl])
        if rival != impl and shared:
            ratio = statistics.paired_ratio(*shared)
            names = (f"speedup_vs_{rival}{end}" for end in ("", "_lo", "_hi"))
            found |= dict(zip(names, ratio, strict=True))
    return found


def _shared(rival: Cell, ours: Cell) -> tuple[Sequence[float], Sequence[float]] | None:
    """The times of both in the blocks that both have; None where there is no such block."""
    theirs, own = rival.times(), ours.times()
    blocks = [block for block in own if block in theirs]
    if not blocks:
        return None
    return [theirs[block] for block in blocks], [own[block] for block in blocks]


def _status(cell: Cell) -> tuple[str, str]:
    """The status and reason of a cell: "ok" if one block is, unless a result was wrong."""
    others = [row for row in cell.rows if row["status"] != "ok"]
    if cell.wrong or len(others) == len(cell.rows):
        row = cell.wrong or cell.first
        return row["status"], row["reason"]
    if others:
        return "ok", f"{len(others)} of {len(cell.rows)} blocks {others[0]['status']}"
    return "ok", ""


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

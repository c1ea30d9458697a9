"""The ledger of fairness: what else each implementation's time contains, by op, pass and dtype.

The verification asks for entries after its cells are done, one call more of each pass in one case
of each dtype; `rows` sets them beside what the cells and the times say.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from kernels._contract import LAYOUTS, VALUES

SIZES = re.compile(r"\b[A-Z](\d+)")


def take(
    units: Mapping[int, list[dict]], declared: Mapping[str, object], ask: Callable[..., dict]
) -> list[dict]:
    """The entries of a report: `case, dtype, pass, status, reason`, what is declared and was seen.

    units: the finished cells by number of the unit, a case in a dtype. declared: what the file of
    the implementation says of each call. ask: the worker's answer for a unit; one that ends the
    worker is the last.
    """
    found = []
    for number in chosen(units):
        answer = ask(unit=number)
        for cell in units[number]:
            entry = {key: cell[key] for key in ("case", "dtype", "pass")}
            entry |= {**declared, "status": answer["status"]}
            entry["reason"] = answer.get("reason", "")
            found.append(entry | answer.get("entries", {}).get(cell["pass"], {}))
        if answer["status"] in ("crashed", "hung"):
            break
    return found


def chosen(units: Mapping[int, list[dict]]) -> list[int]:
    """For each dtype the unit to look at: the first of the sweep, or the largest of the edge cases;
    of those that are plain and right in all passes.
    """
    best: dict[str, tuple[tuple, int]] = {}
    for number, cells in units.items():
        if _plain_and_right(cells):
            cell = cells[0]
            swept = cell["kind"] == "sweep"
            rank = (swept, -number if swept else _elements(cell["case"]))
            best[cell["dtype"]] = max((rank, number), best.get(cell["dtype"], (rank, number)))
    return [number for _, number in best.values()]


def _plain_and_right(cells: list[dict]) -> bool:
    odd = {*LAYOUTS, *VALUES}
    return (
        bool(cells)
        and not odd & set(cells[0]["case"].split("-"))
        and all(cell["status"] == "ok" for cell in cells)
    )


def _elements(case: str) -> int:
    return math.prod(int(size) for size in SIZES.findall(case))


def rows(
    reports: Iterable[Mapping], families: Mapping[str, str], measured: Mapping[str, list[Mapping]]
) -> Iterator[dict]:
    """The rows of ledger.csv: a row for each op, implementation, pass and dtype with a right cell.

    measured: raw rows by op. `deterministic` is False where any repeat of a cell gave other bits;
    `timed_by` is `graph`, `events` (no CUDA graph could be captured), or both. A report from before
    there was a ledger leaves the rest empty.
    """
    clocks = _clocks(measured)
    for report in reports:
        entries = {(entry["pass"], entry["dtype"]): entry for entry in report.get("ledger", ())}
        same = {key: report[key] for key in ("op", "impl", "impl_version", "mode")}
        same["family"] = families.get(report["op"], "")
        repeats: dict[tuple[str, str], list[bool | None]] = {}
        for cell in report["cells"]:
            if cell["status"] == "ok":
                key = cell["pass"], cell["dtype"]
                repeats.setdefault(key, []).append(cell.get("deterministic"))
        for (direction, dtype), found in repeats.items():
            seen = [one for one in found if one is not None]
            entry = dict(entries.get((direction, dtype), {}))
            entry["kernels"] = "; ".join(
                f"{count} x {name}" for name, count in entry.get("kernels", {}).items()
            )
            entry |= {"pass": direction, "dtype": dtype}
            entry["deterministic"] = all(seen) if seen else None
            if report["mode"] == "gpu":
                key = report["op"], report["impl"], direction, dtype
                entry["timed_by"] = " and ".join(sorted(clocks.get(key, ())))
            yield same | entry


def _clocks(measured: Mapping[str, list[Mapping]]) -> dict[tuple, set[str]]:
    """Whether graphs or events timed the cells of an op, implementation, pass and dtype."""
    found: dict[tuple, set[str]] = {}
    for row in (row for rows in measured.values() for row in rows if row["device_us"] is not None):
        key = row["op"], row["impl"], row["pass"], row["dtype"]
        events = (row["reason"] or "").startswith("events:")
        found.setdefault(key, set()).add("events" if events else "graph")
    return found

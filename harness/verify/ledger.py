"""The ledger of fairness: what else each implementation's time contains, by op, pass and dtype.

The verification asks for entries after its cells are done, one call more of each pass in one case
of each dtype; `harness.summarize.ledger` sets them beside what the cells and the times say.
"""

import math
import re
from collections.abc import Callable, Mapping

from ops._spec import LAYOUTS, VALUES

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

"""The ledger of fairness: what else each implementation's time contains, by op, pass and dtype.

The verification asks for entries after its cells are done: one more call of each pass in one case
of each dtype. `harness.summarize.ledger` joins them with the cells and the times.
"""

import math
import re
from collections.abc import Callable, Mapping

from harness.verify.messages import CallProfiles, ProfileCalls
from harness.workers.messages import Failure
from ops._spec import LAYOUTS, VALUES

SIZES = re.compile(r"\b[A-Z](\d+)")


def take(
    units: Mapping[int, list[dict]],
    declared: Mapping[str, object],
    ask: Callable[[ProfileCalls], CallProfiles | Failure],
) -> list[dict]:
    """Return the entries of a report: `case, dtype, pass, status, reason`, declared and seen facts.

    - units: the finished cells by number of the unit, a case in a dtype.
    - declared: the facts that the file of the implementation declares for each call.
    - ask: sends a request to the worker.

    A failure that ends the worker ends the list.
    """
    found = []
    for number in chosen(units):
        answer = ask(ProfileCalls(number))
        failed = isinstance(answer, Failure)
        seen = {} if failed else answer.entries
        status, reason = (answer.status, answer.reason) if failed else ("ok", "")
        for cell in units[number]:
            entry = {key: cell[key] for key in ("case", "dtype", "pass")}
            entry |= {**declared, "status": status, "reason": reason}
            found.append(entry | seen.get(cell["pass"], {}))
        if status in ("crashed", "hung"):
            break
    return found


def chosen(units: Mapping[int, list[dict]]) -> list[int]:
    """Return for each dtype the unit to profile: first of the sweep, else the largest edge case.

    Only units that are plain and right in all passes count.
    """
    best: dict[str, tuple[tuple, int]] = {}
    for number, cells in sorted(units.items()):
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

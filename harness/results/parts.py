"""The parts of a measurement: cells of one op that were timed on several boards or days.

A machine may be lent for less time than an op takes. Each cell is then measured whole in one part,
with all its rivals on one GPU, and the parts are recorded one after the other. The sidecar of the
joined rows is that of the last part. Its `earlier` keeps what the other sidecars say of theirs, and
names their cells.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from harness.cli import UserError
from harness.project.implementations import OURS, TWIN
from harness.results import severity
from harness.status import TIMED

Cell = tuple[str, str, str]
Rows = Sequence[Mapping]
# These tell of the joined rows, or are the same in all parts.
OF_WHOLE = ("op", "mode", "rows", "csv_sha256", "unreached", "earlier")
# The reason of a cell that a verification leaves to that of another part.
ELSEWHERE = "another part of the measurement verifies it"
# The schedule may differ in these: the order of blocks, how cells ended, the cores of the machine.
FREE = ("seed", "stopped", "cores")


def of(sidecar: Mapping) -> list[Mapping]:
    """The sidecar of each part, the last one last, as if each were of a measurement of its own."""
    whole = {key: sidecar[key] for key in ("op", "mode") if key in sidecar}
    return [*(each | whole for each in sidecar.get("earlier", ())), sidecar]


def of_cell(sidecar: Mapping, cell: Cell) -> Mapping:
    """The sidecar of the part that timed a cell; the last one if none of the others names it."""
    wanted = name(cell)
    return next((each for each in of(sidecar)[:-1] if wanted in each["cells"]), sidecar)


def uuid(part: Mapping) -> str:
    """The board of a part; "" if it names none."""
    return (part["environment"].get("gpu") or {}).get("uuid", "")


def joined(
    old: tuple[Rows, Mapping],
    new: tuple[Rows, Mapping],
    reports: Mapping[str, tuple[Mapping | None, Mapping]],
) -> tuple[list[Mapping], dict, dict[str, Mapping]]:
    """The rows and the sidecar of two measurements of an op, which are parts of one.

    - old, new: rows and sidecar. A cell that both have reached is taken from the new one, be it
      that it failed there.
    - reports: by implementation its verification reports, beside the old times and the new ones.

    Returned beside them are the new reports that change. A cell that the new verification has not
    reached gets the old verdict, unless the new measurement has it.

    Raises UserError, which tells what differs, if they are not of the same code, tables, libraries,
    GPU model, schedule, shapes and implementations, or if a report refuses what was timed.
    """
    (old_rows, old_car), (new_rows, new_car) = old, new
    _refuse_other(old_car, new_car, reports)
    before, after = by_cell(old_rows), by_cell(new_rows)
    if set(before) != set(after):
        raise _other(new_car["op"], "shapes, dtypes or passes")
    if {row["impl"] for row in old_rows} != {row["impl"] for row in new_rows}:
        raise _other(new_car["op"], "implementations")
    lacking = _unreached(new_rows)
    taken = lacking - _unreached(old_rows)
    _refuse_unverified(new_car["op"], before, after, taken, reports)
    rows = [row for key, found in after.items() for row in (before[key] if key in taken else found)]
    earlier = _earlier(old_car, [name(key) for key in after if key in taken])
    told = {"earlier": earlier} if earlier else {}
    own = set(after) - lacking
    kept = {impl: _judged(*pair, own) for impl, pair in reports.items()}
    kept = {impl: report for impl, report in kept.items() if report is not reports[impl][1]}
    return rows, {**new_car, **told, "unreached": len(lacking - taken)}, kept


def by_cell(rows: Rows) -> dict[Cell, list[Mapping]]:
    """The rows of each case, dtype and pass, in the order of the rows."""
    found: dict[Cell, list[Mapping]] = {}
    for row in rows:
        found.setdefault(cell(row), []).append(row)
    return found


def cell(row: Mapping) -> Cell:
    """The case, dtype and pass of a row."""
    return row["case"], row["dtype"], row["pass"]


def name(cell: Cell) -> str:
    """A cell in one text."""
    return " ".join(cell)


def _unreached(rows: Rows) -> set[Cell]:
    return {cell(row) for row in rows if row["status"] == "unreached"}


def _earlier(old: Mapping, taken: Sequence[str]) -> list[Mapping]:
    """The words of the sidecars on the parts of which a joined measurement still has cells.

    taken: these cells, by name.
    """
    former = old.get("earlier", ())
    theirs = {each for part in former for each in part["cells"]}
    own = {key: value for key, value in old.items() if key not in OF_WHOLE}
    own["cells"] = [each for each in taken if each not in theirs]
    found = [part | {"cells": [c for c in part["cells"] if c in taken]} for part in former]
    return [part for part in [*found, own] if part["cells"]]


def _refuse_other(old: Mapping, new: Mapping, reports: Mapping) -> None:
    told: dict[str, Callable[[Mapping], object]] = {
        "GPU models": lambda car: (car["environment"].get("gpu") or {}).get("name"),
        "drivers": lambda car: (car["environment"].get("gpu") or {}).get("driver"),
        "versions of packages": lambda car: car["environment"].get("versions"),
        "files of packages": lambda car: car["environment"].get("hashes"),
        "harnesses": lambda car: car.get("harness_sha256"),
        "tuned tables": lambda car: car.get("tables_sha256"),
        "drawn shapes": lambda car: car.get("schedule", {}).get("drawn_seed"),
        "schedules": _schedule,
    }
    differ = [name for name, read in told.items() if read(old) != read(new)]
    for impl, (before, after) in reports.items():
        keys = ("code_sha256", "impl_version")
        if before is None or any(before[key] != after[key] for key in keys):
            differ.append(f"code of {impl}")
        elif before.get("guard") != after.get("guard"):
            differ.append(f"rules of the verification of {impl}")
    if differ:
        raise _other(new["op"], ", ".join(differ))


def _schedule(sidecar: Mapping) -> dict[str, object]:
    return {key: value for key, value in sidecar.get("schedule", {}).items() if key not in FREE}


def _refuse_unverified(
    op: str,
    before: Mapping[Cell, Rows],
    after: Mapping[Cell, Rows],
    taken: Iterable[Cell],
    reports: Mapping,
) -> None:
    """Raise UserError if a time would lack its verdict, or be lost because of one."""
    verdicts = {impl: tuple(map(_verdicts, pair)) for impl, pair in reports.items()}

    def status(impl: str, key: Cell, since: bool) -> str:
        return verdicts[OURS if impl == TWIN else impl][since].get(key, "absent")

    for key, found in after.items():
        # The verification may leave nothing of a cell to be timed.
        barred = not any(row["status"] in (*TIMED, "unreached") for row in found) and all(
            status(row["impl"], key, True) != "ok" for row in found
        )
        if key not in taken and not barred:
            continue
        for row in before[key]:
            now = status(row["impl"], key, True)
            stands = now == "unreached" and status(row["impl"], key, False) == "ok"
            if row["status"] in TIMED and now != "ok" and not stands:
                raise UserError(
                    f"{op}: the new verification does not pass {row['impl']} {name(key)}, which has"
                    f" a recorded time ({now}); measure the op whole, or verify it again"
                )


def _verdicts(report: Mapping) -> dict[Cell, str]:
    return {cell(each): each["status"] for each in report["cells"]}


def _judged(before: Mapping, after: Mapping, own: Collection[Cell]) -> Mapping:
    """A report with the former verdicts, of the same code, on cells that it has not reached.

    own: the cells of the new measurement, which stay as its own verification has them. A verdict
    that is taken over names the seed of its inputs.
    """
    seed = {"seed": before["seed"]} if "seed" in before else {}
    former = {
        cell(each): seed | each
        for each in before["cells"]
        if each["status"] != "unreached" and cell(each) not in own
    }
    cells = [
        former.get(cell(each), each) if each["status"] == "unreached" else each
        for each in after["cells"]
    ]
    if cells == after["cells"]:
        return after
    return {**after, "cells": cells, **_ledger(before, after), **severity.overall(cells)}


def _ledger(before: Mapping, after: Mapping) -> dict[str, list[Mapping]]:
    """The ledger of a joined report: the entries of the new one, and former ones that it lacks.

    A part may verify no cell of a dtype, or none that is timed. Its ledger then has no entry of the
    dtype, or one of an edge case. A former one of a cell that it has not reached is better.
    """
    kinds = {cell(each): each.get("kind") for each in after["cells"]}
    late = {key for key, status in _verdicts(after).items() if status == "unreached"}
    entries = {_group(each): each for each in after.get("ledger", ())}
    for each in before.get("ledger", ()):
        own = entries.get(_group(each))
        swept = kinds.get(cell(each)) == "sweep"
        better = own is None or (swept and kinds.get(cell(own)) != "sweep")
        if cell(each) in late and better:
            entries[_group(each)] = each
    return {"ledger": list(entries.values())} if entries else {}


def _group(entry: Mapping) -> tuple[str, str]:
    return entry["dtype"], entry["pass"]


def _other(op: str, what: str) -> UserError:
    return UserError(
        f"{op}: the recorded times and the new ones are no parts of one measurement: other {what}; "
        "measure it whole, or remove the recorded file to have the new one in its place"
    )

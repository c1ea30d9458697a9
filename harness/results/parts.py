"""The parts of a measurement: cells of one op that were timed on several boards or days.

A machine may be lent for less time than an op takes. Each cell is then measured whole in one part,
with all its rivals on one GPU, and the parts are recorded one after the other. The sidecar of the
joined rows is that of the last part. Its `earlier` keeps what the other sidecars say of theirs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from harness.cli import UserError
from harness.status import TIMED

Cell = tuple[str, str, str]
Rows = Sequence[Mapping]
# These tell of the joined rows, or are the same in all parts.
OF_WHOLE = ("op", "mode", "rows", "csv_sha256", "unreached", "earlier")
# The schedule may differ in these: the order of blocks, how cells ended, the cores of the machine.
FREE = ("seed", "stopped", "cores")


def of(sidecar: Mapping) -> list[Mapping]:
    """The sidecar of each part, the last one last, as if each were of a measurement of its own."""
    whole = {key: sidecar[key] for key in ("op", "mode") if key in sidecar}
    return [*(each | whole for each in sidecar.get("earlier", ())), sidecar]


def on_board(sidecar: Mapping, board: str) -> Mapping:
    """The last part on a board; the last of all if none is, as for rows that name no board."""
    if len(measured := of(sidecar)) == 1:
        return sidecar
    return next((each for each in reversed(measured) if uuid(each) == board), sidecar)


def uuid(part: Mapping) -> str:
    """The board of a part; "" if it names none."""
    return (part["environment"].get("gpu") or {}).get("uuid", "")


def joined(
    old: tuple[Rows, Mapping],
    new: tuple[Rows, Mapping],
    reports: Mapping[str, tuple[Mapping | None, Mapping]],
) -> tuple[list[Mapping], dict]:
    """The rows and the sidecar of two measurements of an op, which are parts of one.

    - old, new: rows and sidecar. A cell that both have is taken from the new one.
    - reports: by implementation its verification reports, beside the old times and the new ones.

    Raises UserError, which tells what differs, if they are not of the same code, libraries, GPU
    model, schedule and shapes, or if a report refuses what was timed.
    """
    (old_rows, old_car), (new_rows, new_car) = old, new
    _refuse_other(old_car, new_car, reports)
    before, after = by_cell(old_rows), by_cell(new_rows)
    if set(before) != set(after):
        raise _other(new_car["op"], "shapes, dtypes or passes")
    taken = {key for key in after if _timed(before[key]) and not _timed(after[key])}
    _refuse_unverified(new_car["op"], [before[key] for key in after if key in taken], reports)
    rows = [row for key, found in after.items() for row in (before[key] if key in taken else found)]
    part = {key: value for key, value in old_car.items() if key not in OF_WHOLE}
    lacking = sum(not (_timed(before[key]) or _timed(after[key])) for key in _unreached(new_rows))
    earlier = [*old_car.get("earlier", ()), part] if taken else []
    # A part without a cell is none.
    told = {"earlier": earlier} if earlier else {}
    return rows, {**new_car, **told, "unreached": lacking}


def by_cell(rows: Rows) -> dict[Cell, list[Mapping]]:
    """The rows of each case, dtype and pass, in the order of the rows."""
    found: dict[Cell, list[Mapping]] = {}
    for row in rows:
        found.setdefault(cell(row), []).append(row)
    return found


def cell(row: Mapping) -> Cell:
    """The case, dtype and pass of a row."""
    return row["case"], row["dtype"], row["pass"]


def _timed(rows: Rows) -> bool:
    return any(row["status"] in TIMED for row in rows)


def _unreached(rows: Rows) -> set[Cell]:
    return {cell(row) for row in rows if row["status"] == "unreached"}


def _refuse_other(old: Mapping, new: Mapping, reports: Mapping) -> None:
    told: dict[str, Callable[[Mapping], object]] = {
        "GPU models": lambda car: (car["environment"].get("gpu") or {}).get("name"),
        "drivers": lambda car: (car["environment"].get("gpu") or {}).get("driver"),
        "versions of packages": lambda car: car["environment"].get("versions"),
        "harnesses": lambda car: car.get("harness_sha256"),
        "drawn shapes": lambda car: car.get("schedule", {}).get("drawn_seed"),
        "schedules": _schedule,
    }
    differ = [name for name, read in told.items() if read(old) != read(new)]
    for impl, (before, after) in reports.items():
        keys = ("code_sha256", "impl_version")
        if before is None or any(before[key] != after[key] for key in keys):
            differ.append(f"code of {impl}")
    if differ:
        raise _other(new["op"], ", ".join(differ))


def _schedule(sidecar: Mapping) -> dict[str, object]:
    return {key: value for key, value in sidecar.get("schedule", {}).items() if key not in FREE}


def _refuse_unverified(op: str, cells: Iterable[Rows], reports: Mapping) -> None:
    refused = {
        (impl, *cell(verdict))
        for impl, (_, report) in reports.items()
        for verdict in report["cells"]
        if verdict["status"] not in ("ok", "unreached")
    }
    for rows in cells:
        for row in rows:
            where = row["impl"], *cell(row)
            if row["status"] in TIMED and where in refused:
                raise UserError(
                    f"{op}: the new verification refuses {' '.join(where)}, which has a recorded "
                    "time; measure the op whole, or verify it again"
                )


def _other(op: str, what: str) -> UserError:
    return UserError(
        f"{op}: the recorded times and the new ones are no parts of one measurement: other {what}; "
        "measure it whole, or remove the recorded file to have the new one in its place"
    )

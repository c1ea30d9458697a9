"""What each implementation can do, from what verification saw: rows of CSV files, and of the docs.

`python -m harness.capabilities --recorded results/recorded/h200 --out docs/capabilities.md
--readme README.md` renews the page and the part of the README between its markers.
"""

import argparse
import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from harness import reports
from harness.command import UserError, run, write_text
from harness.load import OURS
from harness.statuses import COLOUR
from kernels._contract import DTYPES, PASSES

# From the best to the worst; what a library declines is no fault of its other cases.
WORST = ("ok", "oom", "inaccurate", "hung", "crashed")
SIGNS = {
    "ok": "●",
    "partly": "◐",
    "unsupported": "○",
    "inaccurate": "✗",
    "unavailable": "absent",
    "": "·",
}
# Letters of a reason in which two must agree to be one, and that are shown.
ALIKE, SHOWN = 40, 140
MARKERS = "<!-- capabilities: begin -->", "<!-- capabilities: end -->"
HEAD = """# What each implementation can do

Written by `make capabilities` from the verification reports of the recorded run; nothing here is
kept by hand. Three signs stand for float32, float16 and bfloat16, edge cases included:

- ● right in every case
- ◐ right in every case that it offers; it declines others
- ○ declines every case
- ✗ wrong, or without a result, in some case (`inaccurate`, `oom`, `hung`, `crashed`)
- absent: not installed where the run was recorded
- ·: not verified: its file has no function for this op, or the op no such pass or dtype"""

GAPS_HEAD = """## Gaps

By implementation and status, with the number of cells. Reasons that differ in sizes alone, or far
behind, stand together; the one of most cells is given, in the words of the library."""


def rows(found: Iterable[Mapping], families: Mapping[str, str]) -> Iterator[dict]:
    """The rows of capabilities.csv: a row for each op, implementation, pass, dtype and mode.

    found: verification reports; what the time limit left out does not count. `status` is that of
    the worst cell, `unsupported` where all were declined; the reason is that of its first cell. A
    report without cells gives one row.
    """
    for report in found:
        common = _common(report, families)
        groups: dict[tuple[str, str], list[Mapping]] = {}
        for cell in report["cells"]:
            if cell["status"] != "unreached":
                groups.setdefault((cell["pass"], cell["dtype"]), []).append(cell)
        if not report["cells"]:
            zero = {"cells": 0, "passed": 0, "declined": 0}
            yield common | zero | {key: report[key] for key in ("status", "reason")}
        for (direction, dtype), cells in groups.items():
            worst = _worst(cells)
            yield common | {
                **{"pass": direction, "dtype": dtype},
                "cells": len(cells),
                "passed": sum(cell["status"] == "ok" for cell in cells),
                "declined": sum(cell["status"] == "unsupported" for cell in cells),
                **{key: worst[key] for key in ("status", "reason")},
                "case": "" if worst["status"] == "ok" else worst["case"],
            }


def gaps(found: Iterable[Mapping], families: Mapping[str, str]) -> Iterator[dict]:
    """The rows of gaps.csv: how many cells of a pass and dtype have this status for this reason."""
    for report in found:
        common = _common(report, families)
        if not report["cells"]:
            yield common | {key: report[key] for key in ("status", "reason")} | {"cells": 0}
        keys = ("pass", "dtype", "status", "reason")
        lacking = [cell for cell in report["cells"] if cell["status"] != "ok"]
        counts = Counter(tuple(cell[key] for key in keys) for cell in lacking)
        first = {tuple(cell[key] for key in keys): cell["case"] for cell in reversed(lacking)}
        for key, count in counts.items():
            yield common | dict(zip(keys, key, strict=True)) | {"cells": count, "case": first[key]}


def _common(report: Mapping, families: Mapping[str, str]) -> dict:
    same = {key: report[key] for key in ("op", "impl", "impl_version", "mode")}
    return same | {"family": families.get(report["op"], "")}


def _worst(cells: Sequence[Mapping]) -> Mapping:
    """The first cell of the worst status, or the first that was declined where no other is."""
    offered = [cell for cell in cells if cell["status"] != "unsupported"]
    return max(offered or cells[:1], key=lambda cell: _severity(cell["status"]))


def _severity(status: str) -> int:
    return WORST.index(status) if status in WORST else 0


def page(found: Sequence[Mapping], families: Mapping[str, str]) -> str:
    """The matrix as Markdown: a table for each family, then the gaps by implementation."""
    table = list(rows(found, families))
    parts = [HEAD]
    for family in sorted({row["family"] for row in table}):
        some = [row for row in table if row["family"] == family]
        passes = {(row["op"], row["pass"]) for row in some if row.get("pass")}
        columns = sorted(passes, key=lambda pair: (pair[0], PASSES.index(pair[1])))
        titles = [f"{op} {direction}" for op, direction in columns]
        lines = [
            [_named(impl, some), *(_signs(some, impl, *column) for column in columns)]
            for impl in _impls(some)
        ]
        parts.append(f"## {family}\n\n{_markdown(['implementation', *titles], lines)}")
    parts.append(f"{GAPS_HEAD}\n\n" + "\n".join(_gap_lines(gaps(found, families))))
    return "\n\n".join([*parts, ""])


def short(found: Sequence[Mapping], families: Mapping[str, str]) -> str:
    """The matrix by implementation and family."""
    table = list(rows(found, families))
    names = sorted({row["family"] for row in table})
    lines = [
        [_named(impl, table)]
        + [_sign([r for r in table if (r["impl"], r["family"]) == (impl, name)]) for name in names]
        for impl in _impls(table)
    ]
    return _markdown(["implementation", *names], lines)


def _signs(table: Sequence[Mapping], impl: str, op: str, direction: str) -> str:
    """A sign for each dtype, in their order; none where verification saw nothing of the op."""
    mine = [row for row in table if (row["impl"], row["op"]) == (impl, op)]
    if not any(row.get("pass") for row in mine):
        return _sign(mine)
    of = {row["dtype"]: row for row in mine if row["pass"] == direction}
    return "".join(_sign([of[name]] if name in of else []) for name in DTYPES)


def _sign(some: Sequence[Mapping]) -> str:
    states = {state(row) for row in some}
    for worst in ("inaccurate", "partly", "unsupported", "ok", "unavailable"):
        if worst in states:
            # What has one pass alone, or is right in some, is offered in part.
            mixed = worst == "unsupported" and len(states) > 1
            return SIGNS["partly" if mixed else worst]
    return SIGNS[""]


def state(row: Mapping) -> str:
    """A row in one word: ok, partly, unsupported, inaccurate (whatever went wrong), unavailable."""
    if row["status"] == "ok":
        return "partly" if row["declined"] else "ok"
    return row["status"] if row["status"] in SIGNS else "inaccurate"


def _impls(table: Iterable[Mapping]) -> list[str]:
    return sorted({row["impl"] for row in table}, key=lambda impl: (impl != OURS, impl))


def _named(impl: str, table: Iterable[Mapping]) -> str:
    versions = {row["impl_version"] for row in table if row["impl"] == impl} - {"", None}
    return " ".join([f"`{impl}`", *sorted(versions)])


def _gap_lines(lacking: Iterable[Mapping]) -> Iterator[str]:
    """A line for each implementation, status and kind of reason: the reason of most cells, and the
    ops with passes and dtypes."""
    places: dict[tuple[str, str, str], list[Mapping]] = {}
    for row in lacking:
        key = row["impl"], row["status"], _kind(row["reason"])
        places.setdefault(key, []).append(row)
    if not places:
        yield "None."
    for (impl, status, _), rows in sorted(places.items()):
        reasons: Counter[str] = Counter()
        ops: dict[str, list[Mapping]] = {}
        for row in rows:
            reasons[row["reason"]] += row["cells"]
            ops.setdefault(row["op"], []).append(row)
        listed = ", ".join(_place(op, some) for op, some in sorted(ops.items()))
        alike = " (and the like)" * (len(reasons) > 1)
        yield f"- `{impl}` {status}: {_plain(reasons.most_common(1)[0][0])}{alike}: {listed}"


def _kind(reason: str) -> str:
    """What reasons have in common that differ in sizes and dtypes alone, or far behind."""
    return re.sub(r"[\d.]+(?:e[+-]\d+)?", "#", reason)[:ALIKE]


def _place(op: str, rows: Sequence[Mapping]) -> str:
    """An op with its passes, those dtypes that are not all, and the number of cells."""
    found = {(row["pass"], row["dtype"]) for row in rows if row.get("pass")}
    passes = [name for name in PASSES if any(name == one for one, _ in found)]
    dtypes = [name for name in DTYPES if any(name == one for _, one in found)]
    names = [op, " and ".join(passes), "" if len(dtypes) == len(DTYPES) else " and ".join(dtypes)]
    cells = sum(row["cells"] for row in rows)
    return " ".join(filter(None, [*names, f"({cells})" if cells else ""]))


def _plain(text: str) -> str:
    """A library's words as Markdown shows them, without the colours of a terminal."""
    text = COLOUR.sub("", text)
    text = text if len(text) <= SHOWN else text[: SHOWN - 3].rstrip() + "..."
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", text)


def _markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *[":-:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


def main() -> None:
    parser = argparse.ArgumentParser(prog="harness.capabilities", description=__doc__)
    parser.add_argument("--recorded", type=Path, required=True, help="folder of the recorded run")
    parser.add_argument("--out", type=Path, required=True, help="the page, Markdown")
    parser.add_argument("--readme", type=Path, required=True, help="the file with the markers")
    arguments = parser.parse_args()
    found, families = recorded(arguments.recorded)
    write_text(arguments.out, page(found, families))
    text = arguments.readme.read_text(encoding="utf-8")
    write_text(arguments.readme, between(text, short(found, families), str(arguments.readme)))


def recorded(folder: Path) -> tuple[list[dict], dict[str, str]]:
    """The reports of a recorded run, and the family of each op as its times say."""
    paths = sorted((folder / "raw").glob("*.csv"))
    if not paths:
        raise UserError(f"{folder}/raw: no CSV file; name the folder of a recorded run")
    families = {}
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            families[path.stem] = next(csv.DictReader(file))["family"]
    return reports.verified([folder / "verify" / op for op in families]), families


def between(text: str, part: str, where: str) -> str:
    """The text with `part` between the markers; UserError where it has none."""
    begin, end = MARKERS
    if begin not in text or end not in text:
        raise UserError(f"{where}: lacks the lines {begin} and {end}; put them where it belongs")
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{part}\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    run(main)

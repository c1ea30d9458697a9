"""Show the capabilities of each implementation, as verified: rows of CSV files, and of the docs.

`python -m harness.summarize.capabilities --recorded results/recorded/hopper --out
docs/capabilities.md` renews the page.
"""

import argparse
import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from harness.cli import UserError, run
from harness.files import write_text
from harness.project.implementations import OURS
from harness.results import hostile, manifest, reports, severity
from harness.status import COLOUR
from ops._spec import DTYPES, PASSES

SIGNS = {
    "ok": "●",
    "partly": "◐",
    "unreached": "◔",
    "unsupported": "○",
    "wrong": "✗",
    "unavailable": "absent",
    "": "·",
}
# Statuses of a cell that nothing is known of.
UNKNOWN = ("unreached", "withdrawn")
# Letters of a reason in which two must agree to be one, and that are shown.
ALIKE, SHOWN = 40, 140
HEAD = """# What each implementation can do

Written by `make capabilities` from the verification reports of the recorded run; nothing here is
kept by hand. A case is *ordinary* or *hostile*. The hostile cases have one of these; all other
cases are ordinary, timed or not:

- values other than normal ones: a hundred times as large, denormal, infinite, one huge among small,
  all of a row equal
- rows or a first element that are not aligned as an allocation is; entries that share memory
- tensors of one element or of none
- integers drawn from a range wider than 2^62

## Ordinary cases

Three signs stand for float32, float16 and bfloat16:

- ● right in every ordinary case
- ◐ right in every ordinary case that it offers; it declines others, or runs out of memory
- ◔ right in the cases that were reached, with their share: a time limit left out the others, or
  their verdicts are withdrawn
- ○ declines every case
- ✗ wrong, crashed or hung in some ordinary case; the gaps below say in which
- absent: not installed where the run was recorded
- ·: not verified: its file has no function for this op, or the op no such pass or dtype"""

HOSTILE_HEAD = """## Hostile inputs

Cells that passed, over the cells that were reached and that the implementation offers. If not all
were reached, their share follows. Few programs meet such inputs, and a library may well choose not
to serve them, so no mark above rests on them. After a crash a new process goes on."""

GAPS_HEAD = """## Gaps

By implementation and status, with the number of cells. Reasons that differ only in sizes, or only
far behind, share a row. The reason with most cells is given in the words of the library.
`withdrawn` is a recorded verdict, for or against, that rests on a fault of this project, since
mended; the next record judges the cell again. Scripts that reproduce wrong results are in
[findings](findings/README.md)."""


def rows(found: Iterable[Mapping], families: Mapping[str, str]) -> Iterator[dict]:
    """The rows of capabilities.csv: a row for each op, implementation, pass, dtype and mode.

    found: verification reports. `of` is the number of ordinary cells, and `cells` the number of
    those that were reached. Status, reason and case are those of the worst of these: `unsupported`
    if all were declined, `unreached` if there is none. The four numbers of hostile cells follow the
    same rule. A report without cells gives one row.
    """
    for report in found:
        common = _common(report, families)
        groups: dict[tuple[str, str], list[Mapping]] = {}
        for cell in report["cells"]:
            groups.setdefault((cell["pass"], cell["dtype"]), []).append(cell)
        if not report["cells"]:
            nothing = _counts([], "of", "") | _counts([], "hostile_of", "hostile")
            yield common | nothing | {key: report[key] for key in ("status", "reason")}
        for (pass_, dtype), cells in groups.items():
            odd = [cell for cell in cells if hostile.cell(cell)]
            plain = [cell for cell in cells if cell not in odd]
            yield common | {
                **{"pass": pass_, "dtype": dtype},
                **_counts(plain, "of", ""),
                **_counts(odd, "hostile_of", "hostile"),
                **_speaks(plain),
            }


def _counts(cells: Sequence[Mapping], of: str, prefix: str) -> dict[str, int]:
    seen = [cell["status"] for cell in cells if cell["status"] not in UNKNOWN]
    names = [
        prefix or "cells",
        *(f"{prefix}_{name}".lstrip("_") for name in ("passed", "declined")),
    ]
    numbers = len(seen), seen.count("ok"), seen.count("unsupported")
    return {of: len(cells), **dict(zip(names, numbers, strict=True))}


def _speaks(plain: Sequence[Mapping]) -> dict[str, str]:
    """Status, reason and case of the worst ordinary cell that was reached."""
    reached = [cell for cell in plain if cell["status"] not in UNKNOWN]
    if not reached:
        return {"status": "unreached", "reason": "no ordinary case was reached", "case": ""}
    worst = severity.worst(reached)
    case = "" if worst["status"] == "ok" else worst["case"]
    return {"status": worst["status"], "reason": worst["reason"], "case": case}


def gaps(found: Iterable[Mapping], families: Mapping[str, str]) -> Iterator[dict]:
    """The rows of gaps.csv: how many cells of a pass and dtype have this status for this reason.

    Ordinary and hostile cells are counted apart.
    """
    for report in found:
        common = _common(report, families)
        if not report["cells"]:
            none = {"hostile": False, "cells": 0}
            yield common | {key: report[key] for key in ("status", "reason")} | none
        keys = ("pass", "dtype", "hostile", "status", "reason")
        lacking = [
            {**cell, "hostile": hostile.cell(cell)}
            for cell in report["cells"]
            if cell["status"] != "ok"
        ]
        counts = Counter(tuple(cell[key] for key in keys) for cell in lacking)
        first = {tuple(cell[key] for key in keys): cell["case"] for cell in reversed(lacking)}
        for key, count in counts.items():
            yield common | dict(zip(keys, key, strict=True)) | {"cells": count, "case": first[key]}


def _common(report: Mapping, families: Mapping[str, str]) -> dict:
    same = {key: report[key] for key in ("op", "impl", "impl_version", "mode")}
    return same | {"family": families.get(report["op"], "")}


def page(found: Sequence[Mapping], families: Mapping[str, str]) -> str:
    """The matrix as Markdown: a table for each family, hostile inputs, then the gaps of each."""
    table = list(rows(found, families))
    parts = [HEAD]
    for family in sorted({row["family"] for row in table}):
        some = [row for row in table if row["family"] == family]
        passes = {(row["op"], row["pass"]) for row in some if row.get("pass")}
        columns = sorted(passes, key=lambda pair: (pair[0], PASSES.index(pair[1])))
        titles = [f"{op} {pass_}" for op, pass_ in columns]
        lines = [
            [_named(impl, some), *(_signs(some, impl, *column) for column in columns)]
            for impl in _impls(some)
        ]
        parts.append(f"### {family}\n\n{_markdown(['implementation', *titles], lines)}")
    lacking = list(gaps(found, families))
    parts += [HOSTILE_HEAD, _by_family(table), GAPS_HEAD]
    for title, odd in (("ordinary cases", False), ("hostile inputs", True)):
        parts.append(f"### Gaps in {title}")
        parts.append(_gap_table(row for row in lacking if row["hostile"] == odd))
    return "\n\n".join([*parts, ""])


def _by_family(table: Sequence[Mapping]) -> str:
    """The matrix of hostile inputs by implementation and family."""
    names = sorted({row["family"] for row in table})
    lines = [
        [_named(impl, table)]
        + [_score([r for r in table if (r["impl"], r["family"]) == (impl, name)]) for name in names]
        for impl in _impls(table)
    ]
    return _markdown(["implementation", *names], lines)


def _score(some: Sequence[Mapping]) -> str:
    """Hostile cells passed of those reached and offered, and the share reached if not all."""
    of, reached, passed, declined = (
        sum(row[key] for row in some)
        for key in ("hostile_of", "hostile", "hostile_passed", "hostile_declined")
    )
    if not of:
        return SIGNS[""] if any(row.get("pass") for row in some) else _sign(some)
    if not reached:
        return f"{SIGNS['unreached']} 0 %"
    score = f"{passed}/{reached - declined}" if reached > declined else SIGNS["unsupported"]
    return score if reached == of else f"{score} ({share(reached, of)})"


def share(reached: int, of: int) -> str:
    """A share in per cent; neither 0 nor 100 unless it is."""
    percent = round(100 * reached / of)
    return f"{min(99, max(1, percent)) if 0 < reached < of else percent} %"


def _signs(table: Sequence[Mapping], impl: str, op: str, pass_: str) -> str:
    """A sign for each dtype, in their order, and the share that was reached if not all were; none
    where verification saw nothing of the op."""
    mine = [row for row in table if (row["impl"], row["op"]) == (impl, op)]
    if not any(row.get("pass") for row in mine):
        return _sign(mine)
    of = {row["dtype"]: row for row in mine if row["pass"] == pass_}
    signs = "".join(SIGNS[state(of[name])] if name in of else SIGNS[""] for name in DTYPES)
    return signs + _reached(of.values())


def _sign(some: Sequence[Mapping]) -> str:
    """The sign of reports without cells: absent, or what became of the library."""
    states = {state(row) for row in some}
    return SIGNS[next((w for w in ("wrong", "unsupported", "unavailable") if w in states), "")]


def _reached(some: Iterable[Mapping]) -> str:
    """The share of ordinary cells that were reached, after a blank; "" if all were."""
    numbers = [(row["cells"], row["of"]) for row in some]
    cells, of = (sum(column) for column in zip(*numbers, strict=True)) if numbers else (0, 0)
    return f" {share(cells, of)}" if cells < of else ""


def state(row: Mapping) -> str:
    """A row in one word: ok, partly, unreached, unsupported, wrong or unavailable."""
    if row["status"] in ("inaccurate", "hung", "crashed"):
        return "wrong"
    if row["status"] == "unavailable" or not row.get("pass"):
        return row["status"]
    if row["cells"] < row["of"] or not row["of"]:
        return "unreached"
    if row["status"] == "unsupported":
        return "unsupported"
    return "ok" if row["passed"] == row["of"] else "partly"


def _impls(table: Iterable[Mapping]) -> list[str]:
    return sorted({row["impl"] for row in table}, key=lambda impl: (impl != OURS, impl))


def _named(impl: str, table: Iterable[Mapping]) -> str:
    versions = {row["impl_version"] for row in table if row["impl"] == impl} - {"", None}
    return " ".join([f"`{impl}`", *sorted(versions)])


def _gap_table(lacking: Iterable[Mapping]) -> str:
    """A row for each implementation, status and kind of reason: the reason of most cells, and the
    ops with passes and dtypes."""
    places: dict[tuple[str, str, str], list[Mapping]] = {}
    for row in lacking:
        key = row["impl"], row["status"], _kind(row["reason"])
        places.setdefault(key, []).append(row)
    lines = []
    for (impl, status, _), rows in sorted(places.items()):
        reasons: Counter[str] = Counter()
        ops: dict[str, list[Mapping]] = {}
        for row in rows:
            reasons[row["reason"]] += row["cells"]
            ops.setdefault(row["op"], []).append(row)
        listed = ", ".join(_place(op, some) for op, some in sorted(ops.items()))
        alike = " (and the like)" * (len(reasons) > 1)
        lines.append([f"`{impl}`", status, _plain(reasons.most_common(1)[0][0]) + alike, listed])
    if not lines:
        return "None."
    head = ["implementation", "status", "reason", "ops, passes and dtypes (cells)"]
    return _markdown(head, lines, ":--")


def _kind(reason: str) -> str:
    """The part of a reason that is the same in reasons that differ in sizes, or only far behind."""
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


def _markdown(head: Sequence[str], lines: Iterable[Sequence[str]], rest: str = ":-:") -> str:
    """A table; `rest` is the rule of all columns but the first."""
    rule = ["---", *[rest] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


def main() -> None:
    parser = argparse.ArgumentParser(prog="harness.summarize.capabilities", description=__doc__)
    parser.add_argument("--recorded", type=Path, required=True, help="folder of the recorded run")
    parser.add_argument("--out", type=Path, required=True, help="the page, Markdown")
    arguments = parser.parse_args()
    found, families = recorded(arguments.recorded)
    write_text(arguments.out, page(found, families))


def recorded(folder: Path) -> tuple[list[dict], dict[str, str]]:
    """The reports of a recorded run, and the family of each op as its times say.

    Raises UserError where one is not as the manifest lists it.
    """
    paths = sorted((folder / "raw").glob("*.csv"))
    if not paths:
        raise UserError(f"{folder}/raw: no CSV file; name the folder of a recorded run")
    families = {}
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            families[path.stem] = next(csv.DictReader(file))["family"]
    manifest.check(folder, families)
    return reports.verified([folder / "verify" / op for op in families]), families


if __name__ == "__main__":
    run(main)

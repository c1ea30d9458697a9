"""Set the page that `harness.compare` prints: what changed most, within the width of the terminal.

Output that is no terminal has 80 columns. The tables are those of Rich, without colours. An entry
takes two or three lines, so that the old value stands above the new one.
"""

import io
import math
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

CELLS_SHOWN, CLAIMS_SHOWN = 8, 5
NARROW, WIDE = 80, 120
WHEN = ("old", "new")
CLAIMS = {"best": "against the best rival", "each": "against each baseline"}
# In the order in which they are listed. Other verdicts are counted only, unless all is asked for.
LISTED = ("lost", "slower", "lower", "faster", "higher", "gained", "undecided")
COUNTED = ("missing", "new", "untimed", "same")
OUTCOMES = ("not reproduced", "undecided", "not testable", "reproduced")


def page(
    cells: Sequence[Mapping], means: Sequence[Mapping], claims: Sequence[Mapping], every: bool
) -> list[str]:
    """Return the lines; the rows are those of `harness.compare.changes`.

    every: show all rows, not only the first of those whose verdict is in LISTED.
    """
    lines = [*_cells(cells, every), ""]
    if means:
        lines += [*_means(means, every), ""]
    return lines + _claims(claims, every)


def _cells(cells: Sequence[Mapping], every: bool) -> list[str]:
    order = (*LISTED, *COUNTED)
    counts = Counter(row["verdict"] for row in cells)
    lines = ["Cells: " + ", ".join(f"{counts[word]} {word}" for word in order if counts[word])]
    for word in ("missing", "new"):
        ops = Counter(row["op"] for row in cells if row["verdict"] == word)
        if ops:
            lines.append(f"  {word}: " + ", ".join(f"{count} of {op}" for op, count in ops.items()))
    listed = [row for row in cells if every or row["verdict"] in LISTED]
    listed.sort(key=lambda row: (order.index(row["verdict"]), -_size(row)))
    shown = listed if every else listed[:CELLS_SHOWN]
    lines += [line for row in shown if "ratio" not in row for line in _status(row)]
    against = any(row["baseline"] for row in cells)
    unit = "ratio" if against else "us"
    head = ["cell", unit, "% SOL", "new/old" if against else "old/new", "noise, p", "verdict"]
    lines += _table(head, [_cell(row) for row in shown if "ratio" in row])
    return lines + _more(len(cells) - len(shown))


def _name(row: Mapping) -> list[str]:
    """The op, pass, case, dtype and baseline of a cell, in lines."""
    lines = [f"{row['op']} {row['pass']}", f"{row['case']} {row['dtype']}"]
    return [*lines, f"against {row['baseline']}"] if row["baseline"] else lines


def _cell(row: Mapping) -> list[list[str]]:
    """The entries of a cell with a time in both runs, each as lines."""
    return [
        _name(row),
        [_number(row["old"]), _number(row["new"])],
        [_number(row["old_pct_sol"]), _number(row["new_pct_sol"])],
        [f"{row['ratio']:.3f}", _interval(row)],
        [_percent(row["noise"]), _p(row["p_holm"])],
        [row["verdict"]],
    ]


def _status(row: Mapping) -> list[str]:
    """The lines on a cell that lacks a time in one of the runs."""
    old, new = (f"{row[f'{when}_status']} {row[f'{when}_reason']}".rstrip() for when in WHEN)
    text = f"{' '.join(_name(row))}: {row['verdict']}: {old}, now {new}"
    return textwrap.wrap(text, _width(), initial_indent="  ", subsequent_indent="    ")


def _means(means: Sequence[Mapping], every: bool) -> list[str]:
    shown = [row for row in means if every or row["verdict"] in LISTED[:-1]]
    lines = ["Geometric means over the cells of an op and pass, old time over new"]
    head = ["op and pass", "cells", "ratio", "95 % interval", "p", "verdict"]
    lines += _table(head, [_mean(row) for row in shown])
    return lines + _more(len(means) - len(shown))


def _mean(row: Mapping) -> list[list[str]]:
    numbers = [str(row["cells"]), f"{row['ratio']:.3f}", _interval(row), _p(row["p_holm"])]
    return [[text] for text in (f"{row['op']} {row['pass']}", *numbers, row["verdict"])]


def _claims(claims: Sequence[Mapping], every: bool) -> list[str]:
    lines = []
    for against, words in CLAIMS.items():
        counts = Counter(row["outcome"] for row in claims if row["against"] == against)
        told = ", ".join(f"{counts[word]} {word}" for word in OUTCOMES if counts[word])
        lines.append(f"Claims of the first {words} in the second: {told or 'none'}")

    def place(row: Mapping) -> tuple:
        unsure = row["old_verdict"] == "undecided"
        return unsure, OUTCOMES.index(row["outcome"]), row["against"] != "best"

    ordered = sorted(claims, key=place)
    shown = ordered if every else ordered[:CLAIMS_SHOWN]
    lines += _table(["claim", "cells", "old", "new", "outcome"], [_claim(row) for row in shown])
    return lines + _more(len(claims) - len(shown))


def _claim(row: Mapping) -> list[list[str]]:
    """The entries of a claim, each as lines: ratio, interval and verdict of both runs."""
    both = [
        [_number(row[f"{when}_ratio"]), _interval(row, f"{when}_"), row[f"{when}_verdict"]]
        for when in WHEN
    ]
    name = [f"{row['op']} {row['pass']}", f"against {rival(row)}"]
    return [name, [f"{row['cells']}/{row['of']}"], *both, [row["outcome"]]]


def rival(row: Mapping) -> str:
    """Return the baseline of a claim; if it is the best rival, the closest in the first run."""
    best = row.get("against") == "best"
    return f"the best ({row['baseline']})" if best else row["baseline"]


def _table(head: Sequence[str], rows: Iterable[Sequence[Sequence[str]]]) -> list[str]:
    """The lines of a table whose entries have lines; nothing without rows."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in head:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*(Text("\n".join(entry)) for entry in row))
    if not table.row_count:
        return []
    file = io.StringIO()
    Console(file=file, width=_width() - 2, color_system=None).print(table)
    return [f"  {line}".rstrip() for line in file.getvalue().splitlines()]


def _width() -> int:
    """The columns of the terminal within limits, and the lower limit if there is none."""
    return min(WIDE, max(NARROW, shutil.get_terminal_size((NARROW, 24)).columns))


def _more(count: int) -> list[str]:
    return [f"  {count} more; --all shows them"] if count else []


def _size(row: Mapping) -> float:
    return abs(math.log(row["ratio"])) if "ratio" in row else 0.0


def _number(value: float | str | None) -> str:
    return "" if value in (None, "") else f"{value:.4g}"


def _interval(row: Mapping, when: str = "") -> str:
    lo, hi = row[f"{when}ci_lo"], row[f"{when}ci_hi"]
    return "" if "" in (lo, hi) else f"{lo:.3f}..{hi:.3f}"


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:.1f} %"


def _p(value: float) -> str:
    return "" if math.isnan(value) else "<0.001" if value < 0.001 else f"{value:.3f}"

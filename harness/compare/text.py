"""The page that `harness.compare` prints: what changed most, aligned, at most a screenful."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

CELLS_SHOWN, CLAIMS_SHOWN = 14, 8
CLAIMS = {"best": "against the best rival", "each": "against each baseline"}
# In the order in which they are listed; what is not there is counted only, unless all is asked for.
LISTED = ("lost", "slower", "lower", "faster", "higher", "gained", "undecided")
COUNTED = ("missing", "new", "untimed", "same")
OUTCOMES = ("not reproduced", "undecided", "not testable", "reproduced")


def page(
    cells: Sequence[Mapping], means: Sequence[Mapping], claims: Sequence[Mapping], every: bool
) -> list[str]:
    """The lines; the rows are those of `harness.compare.changes`."""
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
    against = any(row["baseline"] for row in cells)
    unit = "ratio" if against else "us"
    head = ["op", "case", "dtype", "pass", "baseline", f"old {unit}", f"new {unit}"]
    head += ["new/old" if against else "old/new", "95 % interval", "noise", "p"]
    head += ["old % SOL", "new % SOL", "verdict"]
    lines += _table(head, [_cell(row, unit) for row in shown])
    return lines + _more(len(cells) - len(shown))


def _cell(row: Mapping, unit: str) -> list[str]:
    line = [row[name] for name in ("op", "case", "dtype", "pass", "baseline")]
    line += [_number(row[when]) if row["unit"] == unit else "" for when in ("old", "new")]
    verdict = row["verdict"]
    if "ratio" in row:
        line += [f"{row['ratio']:.3f}", _interval(row), _percent(row["noise"]), _p(row["p_holm"])]
    else:
        line += [""] * 4
        reason = row["new_reason"] or row["old_reason"]
        verdict += f": {row['old_status']}, now {row['new_status']} {reason}".rstrip()
    return [*line, _number(row["old_pct_sol"]), _number(row["new_pct_sol"]), verdict]


def _means(means: Sequence[Mapping], every: bool) -> list[str]:
    shown = [row for row in means if every or row["verdict"] in LISTED[:-1]]
    lines = ["Geometric means over the cells of an op and pass, old time over new"]
    lines += _table(
        ["op", "pass", "cells", "ratio", "95 % interval", "p", "verdict"],
        [_mean(row) for row in shown],
    )
    return lines + _more(len(means) - len(shown))


def _mean(row: Mapping) -> list[str]:
    numbers = [str(row["cells"]), f"{row['ratio']:.3f}", _interval(row), _p(row["p_holm"])]
    return [row["op"], row["pass"], *numbers, row["verdict"]]


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
    head = ["op", "pass", "baseline", "cells"]
    head += [f"{when}{part}" for when in ("old", "new") for part in ("", " 95 %", " verdict")]
    lines += _table([*head, "outcome"], [_claim(row) for row in shown])
    return lines + _more(len(claims) - len(shown))


def _claim(row: Mapping) -> list[str]:
    line = [row["op"], row["pass"], rival(row), f"{row['cells']} of {row['of']}"]
    for when in ("old", "new"):
        line += [_number(row[f"{when}_ratio"]), _interval(row, f"{when}_"), row[f"{when}_verdict"]]
    return [*line, row["outcome"]]


def rival(row: Mapping) -> str:
    """Whom a claim compares with; of the best rival the name of the closest in the first run."""
    best = row.get("against") == "best"
    return f"the best ({row['baseline']})" if best else row["baseline"]


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest entry, without those that are empty; nothing without rows."""
    lines = list(lines)
    places = [i for i in range(len(head)) if any(line[i] for line in lines)]
    widths = {i: max(len(line[i]) for line in (head, *lines)) for i in places}
    return [
        "  " + "  ".join(line[i].ljust(widths[i]) for i in places).rstrip()
        for line in (head, *lines)
        if lines
    ]


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

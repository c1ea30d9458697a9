"""List the cells that implementations decline or get wrong: how many, and the reason they gave.

Ordinary cases come first; hostile inputs have a part of their own.
"""

import _table
from _data import OURS, natural, run
from _missing import missing_results

CAPTION = (
    "Gaps of the matrix (\\cref{fig:capabilities}): verified cells without a right result, by "
    "implementation and status. Of several reasons the one of most cells stands here. A dash: the "
    "library or its hardware was absent, and no cell was tried. Withdrawn: the recorded verdict "
    "rests on a fault of this project that is mended since."
)
LENGTH = 110
# Rows take several lines, so that fewer fit on a page than of other tables.
FLOAT_ROWS = 18


def main(arguments):
    found = missing_results(arguments.run)
    if found.empty:
        _table.save(arguments.out, "Every verified cell of every implementation is right.\n")
        return
    table = _lines(found[~found["hostile"]])
    if found["hostile"].any():
        table += [*_table.heading(6, "Hostile inputs"), *_lines(found[found["hostile"]])]
    head = ["implementation & status & op & where & {cells} & reason"]
    columns = (
        r"ll>{\raggedright\arraybackslash}p{0.24\linewidth}"
        r">{\raggedright\arraybackslash}p{0.14\linewidth}r"
        r">{\raggedright\arraybackslash}p{0.28\linewidth}"
    )
    text = _table.captioned(columns, head, table, CAPTION, "tab:gaps", FLOAT_ROWS, _table.SMALL)
    _table.save(arguments.out, text)


def _lines(found):
    """A row for each implementation, status and reason, with the ops that have it."""
    lines: dict[tuple, list] = {}
    for (impl, op, status), rows in found.groupby(["impl", "op", "status"]):
        reason = rows.groupby("reason")["cells"].sum().idxmax()
        lines.setdefault((impl, status, reason), []).append((op, rows))
    return _table.by_implementation(
        (impl, [status, *_where(lines[impl, status, reason]), _table.reason(reason, LENGTH)])
        for impl, status, reason in sorted(lines, key=lambda key: (key[0] != OURS, key))
    )


def _where(places):
    """Ops, passes with dtypes, and cells of all that one line says."""
    ops = ", ".join(_table.code(op) for op, _ in places)
    some = {(one[0], one[1]) for _, rows in places for one in rows[["pass", "dtype"]].to_numpy()}
    passes = sorted({pass_ for pass_, _ in some if pass_}, key=natural)
    dtypes: dict[str, list[str]] = {}
    for pass_ in passes:
        named = " ".join(text for name, text in _table.SHORT.items() if (pass_, name) in some)
        dtypes.setdefault(named, []).append(pass_)
    parts = (f"{', '.join(names)} {named}" for named, names in dtypes.items())
    cells = sum(rows["cells"].sum() for _, rows in places)
    return ops, "; ".join(parts), str(cells) if cells else "--"


if __name__ == "__main__":
    run(main, __doc__)

"""Cells without a time that counts: how many, their status and the reason."""

import _table
from _data import natural, rank, run
from _missing import missing_times
from _status import STATUSES

CAPTION = "Cells without a time that counts, by implementation and reason; the figures mark them."
LENGTH = 130
FLOAT_ROWS = 24


def main(arguments):
    rows = missing_times(arguments.run)
    if rows.empty:
        _table.save(arguments.out, "Every cell of every implementation has a time.\n")
        return
    place = rank(arguments.run)
    lines = [
        (impl, [status, _ops(cells, place), str(len(cells)), _table.reason(reason, LENGTH)])
        for (impl, status, reason), cells in rows.groupby(["impl", "status", "reason"])
    ]
    head = ["implementation & status & op & {cells} & reason"]
    columns = (
        r"ll>{\raggedright\arraybackslash}p{0.34\linewidth}r"
        r">{\raggedright\arraybackslash}p{0.33\linewidth}"
    )
    words = [
        rf"\emph{{{name.capitalize()}}}: {status.meaning}."
        for name, status in STATUSES.items()
        if status.meaning and (rows["status"] == name).any()
    ]
    caption = " ".join([CAPTION, *words])
    lines, label = _table.by_implementation(lines), "tab:missing_times"
    table = _table.captioned(columns, head, lines, caption, label, FLOAT_ROWS, _table.SMALL)
    _table.save(arguments.out, table)


def _ops(cells, place):
    """The ops with the passes in which these cells lie, in the order of the paper."""
    found = cells.groupby(["family", "op"])["pass"].agg(
        lambda names: sorted(set(names), key=natural)
    )
    ordered = sorted(found.items(), key=lambda item: (place[item[0][0]], item[0][1]))
    return ", ".join(f"{_table.code(op)} ({', '.join(passes)})" for (_, op), passes in ordered)


if __name__ == "__main__":
    run(main, __doc__)

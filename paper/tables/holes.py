"""Cells without a time that counts: how many, their status and the reason."""

import _table
from _data import run, summary

CAPTION = "Cells without a time that counts, by reason. They are marked in the figures."
LENGTH = 110


def main(arguments):
    rows = summary(arguments.run)
    holes = rows[rows["status"] != "ok"]
    if holes.empty:
        _table.save(arguments.out, "Every cell of every implementation has a time.\n")
        return
    lines = [
        [
            _table.code(op),
            _table.code(impl),
            status,
            str(len(cells)),
            _table.escape(_table.cut(reason, LENGTH)),
        ]
        for (op, impl, status, reason), cells in holes.groupby(["op", "impl", "status", "reason"])
    ]
    head = ["op & implementation & status & {cells} & reason"]
    columns = r"lllS[table-format=3.0]>{\raggedright\arraybackslash}p{0.42\linewidth}"
    _table.save(arguments.out, _table.captioned(columns, head, lines, CAPTION, "tab:holes"))


if __name__ == "__main__":
    run(main, __doc__)

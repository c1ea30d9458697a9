"""Ours against the fastest baseline of each cell: mean, verdicts, the cell furthest behind."""

import _table
import numpy as np
from _data import natural, rank, read, run

VERDICTS = ("better", "no difference", "worse", "undecided")
CELL = ["op", "case", "dtype", "pass"]


def main(arguments):
    verdicts = read(arguments.run, "verdicts")
    fastest = verdicts.sort_values("ratio").drop_duplicates(CELL)
    place = rank(arguments.run)
    groups = sorted(
        fastest.groupby(["family", "op", "pass"]),
        key=lambda group: (place[group[0][0]], group[0][1], natural(group[0][2])),
    )
    rows = [_row(*key[1:], cells) for key, cells in groups]
    head = [
        r"& & & & \multicolumn{4}{c}{verdicts} & \multicolumn{2}{c}{cell furthest behind}",
        r"\cmidrule(lr){5-8}\cmidrule(l){9-10}",
        r"op & pass & {cells} & {mean} & {better} & {same} & {worse} & {open}"
        r" & {ratio} & case, baseline",
    ]
    columns = (
        "llS[table-format=3.0]S[table-format=2.2]*{4}{S[table-format=3.0]}S[table-format=2.2]l"
    )
    _table.save(arguments.out, _table.tabular(columns, head, rows))


def _row(op, direction, cells):
    mean = np.exp(np.log(cells["ratio"]).mean())
    counts = [str((cells["verdict"] == verdict).sum()) for verdict in VERDICTS]
    worst = cells.iloc[0]
    where = rf"{_table.code(worst['case'])} {worst['dtype']}, {_table.code(worst['baseline'])}"
    numbers = [_table.number(value) for value in (mean, worst["ratio"])]
    return [_table.code(op), direction, str(len(cells)), numbers[0], *counts, numbers[1], where]


if __name__ == "__main__":
    run(main, __doc__)

"""Speedups of ours: geometric mean and range by op, pass and baseline, and the verdicts."""

import _table
import numpy as np
from _data import natural, rank, read, run

VERDICTS = ("better", "no difference", "worse", "undecided")
CAPTION = (
    "Time of a baseline over the time of ours: geometric mean and range over the cells in which "
    "both have a time, and the verdicts on the single cells. Above one, ours takes less time."
)


def main(arguments):
    verdicts = read(arguments.run, "verdicts")
    rows, last = [], None
    place = rank(arguments.run)
    groups = sorted(
        verdicts.groupby(["family", "op", "pass", "baseline"]),
        key=lambda group: (place[group[0][0]], group[0][1], natural(group[0][2]), group[0][3]),
    )
    for key, cells in groups:
        _, op, direction, baseline = key
        if last is not None and last != (op, direction):
            rows.append([r"\addlinespace[2pt]"])
        name = ["", ""] if last == (op, direction) else [_table.code(op), direction]
        ratio = cells["ratio"]
        mean = np.exp(np.log(ratio).mean())
        numbers = [_table.number(value) for value in (mean, ratio.min(), ratio.max())]
        counts = [str((cells["verdict"] == verdict).sum()) for verdict in VERDICTS]
        rows.append([*name, _table.code(baseline), str(len(cells)), *numbers, *counts])
        last = (op, direction)
    head = [
        r"& & & & \multicolumn{3}{c}{ratio of times} & \multicolumn{4}{c}{verdicts}",
        r"\cmidrule(lr){5-7}\cmidrule(l){8-11}",
        r"op & pass & baseline & {cells} & {mean} & {least} & {most} & {better} & {same} & {worse}"
        r" & {open}",
    ]
    columns = "lllS[table-format=3.0]*{3}{S[table-format=3.2]}*{4}{S[table-format=3.0]}"
    _table.save(arguments.out, _table.captioned(columns, head, rows, CAPTION, "tab:speedup"))


if __name__ == "__main__":
    run(main, __doc__)

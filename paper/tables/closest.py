r"""Ours against the fastest baseline of each cell: `\closestsentence` in words, `\closesttable`."""

import _table
import numpy as np
from _data import natural, rank, read, run

MARGIN = 1.01
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
    means = {key[1:]: np.exp(np.log(cells["ratio"]).mean()) for key, cells in groups}
    rows = [_row(*key[1:], means[key[1:]], cells) for key, cells in groups]
    head = [
        r"& & & & \multicolumn{4}{c}{verdicts} & \multicolumn{2}{c}{cell furthest behind}",
        r"\cmidrule(lr){5-8}\cmidrule(l){9-10}",
        r"op & pass & {cells} & {mean} & {better} & {same} & {worse} & {open}"
        r" & {ratio} & case, baseline",
    ]
    columns = (
        "llS[table-format=3.0]S[table-format=2.2]*{4}{S[table-format=3.0]}S[table-format=2.2]l"
    )
    table = _table.tabular(columns, head, rows).rstrip()
    text = [
        rf"\newcommand{{\closestsentence}}{{{_sentence(means)}}}",
        rf"\newcommand{{\closesttable}}{{{table}}}",
        "",
    ]
    _table.save(arguments.out, "\n".join(text))


def _row(op, direction, mean, cells):
    counts = [str((cells["verdict"] == verdict).sum()) for verdict in VERDICTS]
    worst = cells.iloc[0]
    where = rf"{_table.code(worst['case'])} {worst['dtype']}, {_table.code(worst['baseline'])}"
    numbers = [_table.number(value) for value in (mean, worst["ratio"])]
    return [_table.code(op), direction, str(len(cells)), numbers[0], *counts, numbers[1], where]


def _sentence(means):
    """Which ops are ahead of, behind and level with the fastest baseline, furthest off first."""
    both = {op for op, direction in means if direction == "backward"}
    order = sorted(means, key=lambda key: -abs(np.log(means[key])))
    sides = {
        "ahead of it in": [key for key in order if means[key] > MARGIN],
        "behind it in": [key for key in order if means[key] < 1 / MARGIN],
        "within one percent of it in": [key for key in order if 1 / MARGIN <= means[key] <= MARGIN],
    }
    parts = [f"{side} {_listed(keys, means, both)}" for side, keys in sides.items() if keys]
    return f"ours is {'; '.join(parts)}" if parts else "there is nothing to compare"


def _listed(keys, means, both):
    names = [
        _table.code(op)
        + (f" {direction}" if op in both else "")
        + rf"~({means[op, direction]:.2f})"
        for op, direction in keys
    ]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


if __name__ == "__main__":
    run(main, __doc__)

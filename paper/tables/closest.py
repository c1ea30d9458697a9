"""Ours against the fastest baseline of each cell: mean, verdicts, the cell furthest behind.

The sums weigh each op once: what `both` adds to an op's two passes has a line of its own.
"""

import _table
from _data import (
    HEADLINE,
    LARGE_MIB,
    TRAINING,
    VERDICTS,
    fastest,
    mean_ratio,
    natural,
    rank,
    run,
)

HEAD = (
    r"& & & & \multicolumn{4}{c}{verdicts} & \multicolumn{3}{c}{cell furthest behind}",
    r"\cmidrule(lr){5-8}\cmidrule(l){9-11}",
    r"op & pass & {cells} & {mean} & {better} & {same} & {worse} & {open}"
    r" & {ratio} & case & baseline",
)
COLUMNS = "llS[table-format=3.0]S[table-format=2.3]*{4}{S[table-format=3.0]}S[table-format=1.3]ll"


def main(arguments):
    every = fastest(arguments.run, every=True)
    place = rank(arguments.run)
    groups = sorted(
        every.groupby(["family", "op", "pass"]),
        key=lambda group: (place[group[0][0]], group[0][1], natural(group[0][2])),
    )
    rows, last = [], None
    for (_, op, pass_), cells in groups:
        rows.append(["" if op == last else _table.code(op), pass_, *_figures(cells)])
        last = op
    found, training = (every[every["part"] == part] for part in (HEADLINE, TRAINING))
    memory = found[found["bound"] == "memory"]
    large = memory[memory["mib"] >= LARGE_MIB]
    sums = {"all": found, "bound by memory": memory, f"of these, {LARGE_MIB} MiB or more": large}
    sums |= {"training, in none of these": training}
    rows.append([r"\midrule"])
    for title, cells in sums.items():
        if len(cells):
            rows.append([rf"\multicolumn{{2}}{{l}}{{{title}}}", *_figures(cells, named=True)])
    _table.save(arguments.out, _table.tabular(COLUMNS, HEAD, rows))


def _figures(cells, named=False):
    """named: whether the cell that is furthest behind needs the name of its op."""
    mean = mean_ratio(cells)
    counts = [str((cells["verdict"] == verdict).sum()) for verdict in VERDICTS]
    worst = cells.iloc[0]
    where = " ".join([*[worst["op"]] * named, worst["case"]])
    where = f"{_table.code(where)} {_table.SHORT.get(worst['dtype'], worst['dtype'])}"
    numbers = [_table.number(value, 3) for value in (mean, worst["ratio"])]
    return [str(len(cells)), numbers[0], *counts, numbers[1], where, _table.code(worst["baseline"])]


if __name__ == "__main__":
    run(main, __doc__)

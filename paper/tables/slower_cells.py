"""The large cells that memory bounds in which a baseline is clearly faster, one a line."""

import _table
from _data import LARGE_MIB, TRAINING, changed, fastest, natural, rank, run

BEHIND = 0.95
CAPTION = (
    f"Cells that memory bounds and that move {LARGE_MIB}\\,MiB or more in which the fastest "
    f"baseline takes less than {BEHIND} of the time of ours: the ratio of times with its "
    r"\SI{95}{\percent} interval, and the verdict."
)
TOGETHER = (
    " Cells of both passes in one call stand here too; the text counts them only where the "
    "operation has no backward pass of its own."
)


def main(arguments):
    cells = fastest(arguments.run, every=True)
    large = (cells["bound"] == "memory") & (cells["mib"] >= LARGE_MIB)
    found = cells[large & (cells["ratio"] < BEHIND)]
    if found.empty:
        _table.save(arguments.out, f"No such cell has a ratio under {BEHIND}.\n")
        return
    place = rank(arguments.run)
    ordered = sorted(
        found.to_dict("records"),
        key=lambda row: (place[row["family"]], row["op"], natural(row["pass"]), row["ratio"]),
    )
    lines, last, since = [], None, changed(arguments.run)
    for row in ordered:
        about = row["op"], row["pass"]
        mark = _table.DAGGER * (row["op"] in since)
        names = ["", ""] if about == last else [_table.code(row["op"]) + mark, row["pass"]]
        where = f"{_table.code(row['case'])} {_table.SHORT.get(row['dtype'], row['dtype'])}"
        numbers = [f"{row['mib']:.0f}", _table.number(row["ratio"], 3)]
        interval = f"{row['ci_lo']:.3f}--{row['ci_hi']:.3f}"
        end = [interval, row["verdict"], _table.code(row["baseline"])]
        lines.append([*names, where, *numbers, *end])
        last = about
    head = ["op & pass & cell & {MiB} & {ratio} & interval & verdict & baseline"]
    columns = "lllrS[table-format=1.3]lll"
    caption = CAPTION + _table.DAGGER_NOTE * any(row["op"] in since for row in ordered)
    caption += TOGETHER * any(row["part"] == TRAINING for row in ordered)
    table = _table.captioned(columns, head, lines, caption, "tab:slower_cells", size=_table.SMALL)
    _table.save(arguments.out, f"\\Cref{{tab:slower_cells}} lists those.\n{table}")


if __name__ == "__main__":
    run(main, __doc__)

"""The tuned grid beside shapes that were drawn for this run: ours against the fastest baseline.

Kernels are tuned on the grid, by people who saw it. Nobody saw what is drawn.
"""

import _table
import pandas as pd
from _data import VERDICTS, fastest, mean_ratio, natural, rank, run

CAPTION = (
    "Ours against the fastest baseline of each cell, on the grid that the kernels were tuned on "
    "and on shapes drawn for this run: geometric mean of the ratio of times, its cells, and the "
    "verdicts on them, better, the same, worse, undecided. Only passes with drawn shapes stand "
    "here; each side has families of its own."
)
NOTHING = "This run has no drawn shapes beside the grid.\n"
HEAD = (
    r"& & \multicolumn{3}{c}{tuned grid} & \multicolumn{3}{c}{drawn shapes}",
    r"\cmidrule(lr){3-5}\cmidrule(l){6-8}",
    r"op & pass & {cells} & {mean} & verdicts & {cells} & {mean} & verdicts",
)
COLUMNS = "ll" + "rS[table-format=2.3]l" * 2


def main(arguments):
    sides = [fastest(arguments.run, set=shapes) for shapes in ("grid", "drawn")]
    grid, drawn = (dict(list(side.groupby(["family", "op", "pass"]))) for side in sides)
    if not drawn:
        _table.save(arguments.out, NOTHING)
        return
    place = rank(arguments.run)
    keys = sorted(drawn, key=lambda key: (place[key[0]], key[1], natural(key[2])))
    lines, last = [], None
    for key in keys:
        op = "" if key[1] == last else _table.code(key[1])
        lines.append([op, key[2], *_side(grid.get(key)), *_side(drawn[key])])
        last = key[1]
    both = [key for key in keys if key in grid]
    if both:
        whole = [_joined(side, both) for side in (grid, drawn)]
        lines += [[r"\midrule"], ["all of these", "", *_side(whole[0]), *_side(whole[1])]]
    table = _table.captioned(COLUMNS, HEAD, lines, CAPTION, "tab:drawn", size=_table.SMALL)
    _table.save(arguments.out, (_sentence(*whole) if both else "") + table)


def _joined(side, keys):
    return pd.concat([side[key] for key in keys])


def _side(cells):
    if cells is None:
        return ["--", "{--}", "--"]
    counts = "/".join(str((cells["verdict"] == name).sum()) for name in VERDICTS)
    return [str(len(cells)), _table.number(mean_ratio(cells), 3), counts]


def _sentence(grid, drawn):
    return (
        f"On {len(drawn)}~cells of shapes that were drawn for this run the mean is "
        f"{mean_ratio(drawn):.3f}; in the same operations and passes it is {mean_ratio(grid):.3f} "
        f"on the {len(grid)}~cells of the tuned grid (\\cref{{tab:drawn}}).\n"
    )


if __name__ == "__main__":
    run(main, __doc__)

r"""Name the source of the numbers: `\provenance` for the first page, `\measuredon` for the date.

A sentence says whether the times were measured for this document; a table has a row for each run,
and for each GPU of a run on several. `\sidebyside` says whether times were taken side by side.
"""

import _table
from _data import read, run

HOW = {
    "measured": "The times were measured for this document, on this machine.",
    "replayed": "The times were not measured for this document: they are replayed from a recorded "
    "run.",
}
MIXED = "Some times were measured for this document; the others are replayed from a recorded run."
CHANGED = (
    " A dagger: the code of the operation, its kernel, the launch or what they import, has changed "
    "since; the text describes what it is now."
)
UNHASHED = " A dash: the record holds no digest of the harness that took the times."
ALONE = (
    "No run of this document has times of several. The guide to measuring tells of a trial on four "
    "GPUs of one host, and how far the times of an operation lie apart on two of them."
)
DIRTY = ", with uncommitted changes"
# Letters of a digest that tell it from others.
DIGEST = 8


def main(arguments):
    runs = read(arguments.run, "runs")
    modes = list(dict.fromkeys(runs["mode"]))
    mixed = len(modes) > 1
    head = ["operations", "run", "board", "harness", *["times"] * mixed]
    rows = [_row(row, len(runs) == 1, mixed) for row in runs.itertuples()]
    columns = r">{\raggedright\arraybackslash}p{66mm}" + "l" * (len(head) - 1)
    table = _table.tabular(columns, [" & ".join(head)], rows)
    gpus = _table.listed(_table.escape(name or "no GPU") for name in dict.fromkeys(runs["gpu"]))
    text = MIXED if mixed else HOW[modes[0]]
    text += rf" GPU: {gpus}; \cref{{tab:environment}} describes the machines."
    text += CHANGED * any(runs["changed_ops"] != "")
    text += UNHASHED * any(runs["harness_sha256"] == "")
    dates = sorted(runs["date"].str[:10].unique())
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    boards = runs.groupby("run_id", sort=False)["board"].nunique()
    lines = [
        rf"\newcommand{{\sidebyside}}{{{_side_by_side(boards[boards > 1])}}}",
        r"\newcommand{\provenance}{%",
        text,
        r"\par\smallskip{" + _table.SMALL + "%",
        table.rstrip() + "}}",
        rf"\newcommand{{\measuredon}}{{Measured {_table.escape(span)}}}",
        "",
    ]
    _table.save(arguments.out, "\n".join(lines))


def _side_by_side(boards):
    if boards.empty:
        return ALONE
    runs = (f"{count} GPUs in run {_table.code(run_id)}" for run_id, count in boards.items())
    return f"Times of a run were taken on several: on {_table.listed(runs)}."


def _row(row, single: bool, mixed: bool) -> list[str]:
    changed = row.changed_ops.split()
    names = row.ops.split()
    if single and not changed:
        ops = f"all {len(names)}"
    else:
        ops = ", ".join(_table.code(op) + _table.DAGGER * (op in changed) for op in names)
    dirty = DIRTY * (str(row.dirty) == "True")
    harness = _table.code(row.harness_sha256[:DIGEST]) if row.harness_sha256 else "--"
    board = _table.board(row.board)
    return [ops, _table.code(row.run_id) + dirty, board, harness, *[row.mode] * mixed]


if __name__ == "__main__":
    run(main, __doc__)

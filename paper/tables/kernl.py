"""Kernl's features, and what verification saw of an equal among ours."""

from pathlib import Path

import _table
from _data import read, run

STATES = {"present": "verified", "partly": "in part", "not yet": "not yet present"}
CAPTURED = "captured"


def main(arguments):
    rows = [
        [
            _table.escape(row.feature),
            rf"\href{{{row.source}}}{{{_table.code(Path(row.kernl).name)}}}",
            _ours(row),
            f"{row.passed}/{row.cells}" if row.cells else "--",
            STATES[row.status],
        ]
        for row in read(arguments.run, "kernl").itertuples()
    ]
    head = [r"feature of Kernl & published in & ours & {cells} & equal"]
    _table.save(arguments.out, _table.tabular("lllrl", head, rows))


def _ours(row):
    if row.ours == CAPTURED:
        return "every op, timed as a graph"
    # A part that is a pattern says nothing to a reader.
    part = f", {_table.code(row.part)}" if row.part.replace("_", "").isalpha() else ""
    return _table.code(row.ours) + part if row.ours else "--"


if __name__ == "__main__":
    run(main, __doc__)

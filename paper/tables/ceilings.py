"""The ceilings that the speed of light is computed from, for each run shown."""

import _table
from _data import read, run


def main(arguments):
    rows = read(arguments.run, "shown_ceilings")
    if rows.empty:
        _table.save(arguments.out, "The runs shown come without ceilings.\n")
        return
    lines = [
        [
            _table.escape(row.quantity),
            f"{float(row.value):.4g}",
            _table.escape(row.unit),
            _table.escape(row.source),
            _table.code(row.run_id),
        ]
        for row in rows.itertuples()
    ]
    head = ["quantity & {value} & unit & source & run"]
    _table.save(arguments.out, _table.tabular("lS[table-format=4.2]lll", head, lines))


if __name__ == "__main__":
    run(main, __doc__)

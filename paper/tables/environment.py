"""The machines: for each fact its values, and which of the runs shown have each.

The machine that made this document is one of them. A column for each run would not fit on a page.
"""

import _table
from _data import read, run

LENGTH = 60
CAPTION = (
    "Machines and software. Ratios and rates come from the measured or replayed runs. If this "
    "document was made on another machine, verification without a GPU is from that one. The last "
    "column numbers the runs that have a value; the first lines say which they are."
)
ALL = "all"


def main(arguments):
    rows = read(arguments.run, "environment")
    runs = read(arguments.run, "runs").drop_duplicates("run_id").set_index("run_id")
    table = rows.pivot_table(index="key", columns="run_id", values="value", aggfunc="first")
    table = table.reindex(index=rows["key"].drop_duplicates(), columns=_order(rows, runs))
    lines = [[r"run\_id", _title(run_id, runs), str(n)] for n, run_id in enumerate(table, 1)]
    for key, row in table.fillna("").iterrows():
        if key != "run_id" and (row.any() or key.startswith("versions.")):
            lines += _lines(key, list(row))
    head = ["& value & runs"]
    columns = r"l>{\raggedright\arraybackslash}p{0.52\linewidth}l"
    table = _table.captioned(columns, head, lines, CAPTION, "tab:environment", size=_table.SMALL)
    _table.save(arguments.out, table)


def _order(rows, runs):
    every = list(rows["run_id"].drop_duplicates())
    return sorted(every, key=lambda run_id: (run_id not in runs.index, run_id))


def _title(run_id, runs):
    role = f"{runs.loc[run_id, 'mode']}" if run_id in runs.index else "this machine"
    return f"{_table.code(run_id)}, {role}"


def _lines(key, values):
    """A line for each value of a key, with the numbers of its runs; the key stands once."""
    if not key.startswith("versions."):
        values = [value or None for value in values]
    lines = []
    for value in dict.fromkeys(value for value in values if value is not None):
        having = [n for n, other in enumerate(values, 1) if other == value]
        which = ALL if len(having) == len(values) else _ranges(having)
        lines.append(["" if lines else _table.code(key), _value(value), which])
    return lines


def _ranges(numbers):
    """Ascending numbers as text, three or more in a row as their ends: 1, 2, 4--7."""
    rows = []
    for number in numbers:
        if rows and rows[-1][-1] == number - 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    parts = ([f"{row[0]}--{row[-1]}"] if len(row) > 2 else map(str, row) for row in rows)
    return ", ".join(part for row in parts for part in row)


def _value(value):
    return _table.code(_short(value)) if value else "absent"


def _short(value):
    """Hashes are told apart by their first digits."""
    is_hash = len(value) >= 40 and set(value) <= set("0123456789abcdef")
    return value[:12] if is_hash else _table.cut(value, LENGTH)


if __name__ == "__main__":
    run(main, __doc__)

"""The machines: one column for each run shown, and one for the machine that made this document."""

import _table
from _data import read, run

LENGTH = 60


def main(arguments):
    rows = read(arguments.run, "environment")
    runs = read(arguments.run, "runs").drop_duplicates("run_id").set_index("run_id")
    table = rows.pivot_table(index="key", columns="run_id", values="value", aggfunc="first")
    table = table.reindex(index=rows["key"].drop_duplicates(), columns=_order(rows, runs))
    lines = [
        [_table.code(key), *(_value(key, value) for value in row)]
        for key, row in zip(table.index, table.fillna("").to_numpy(), strict=True)
        if key != "run_id" and (row.any() or key.startswith("versions."))
    ]
    titles = [_title(run_id, runs) for run_id in table.columns]
    share = 0.67 / len(titles)
    columns = "l" + rf">{{\raggedright\arraybackslash}}p{{{share:.3f}\linewidth}}" * len(titles)
    _table.save(arguments.out, _table.tabular(columns, [" & ".join(["", *titles])], lines))


def _order(rows, runs):
    every = list(rows["run_id"].drop_duplicates())
    return sorted(every, key=lambda run_id: (run_id not in runs.index, run_id))


def _title(run_id, runs):
    role = f"{runs.loc[run_id, 'mode']} run" if run_id in runs.index else "this machine"
    return f"{role} {_table.code(run_id)}"


def _value(key, value):
    return _table.code(_short(value)) if value else "absent" * key.startswith("versions.")


def _short(value):
    """Hashes are told apart by their first digits."""
    is_hash = len(value) >= 40 and set(value) <= set("0123456789abcdef")
    return value[:12] if is_hash else _table.cut(value, LENGTH)


if __name__ == "__main__":
    run(main, __doc__)

r"""Where the numbers come from: `\provenance` for the first page, `\measuredon` for the date."""

import _table
from _data import read, run


def main(arguments):
    runs = read(arguments.run, "runs")
    single = len(runs) == 1
    sentences = [_sentence(row, single) for row in runs.itertuples()]
    if not single:
        sentences.append("The ops of this document come from more than one run.")
    if (runs["changed_ops"] != "").any():
        sentences.append(
            "The code of an op is its kernel, the launch and what they import; where it has "
            "changed, the text describes what it is now."
        )
    dates = sorted(runs["date"].str[:10].unique())
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    text = [
        r"\newcommand{\provenance}{%",
        "\n".join(sentences) + "}",
        rf"\newcommand{{\measuredon}}{{Measured {_table.escape(span)}}}",
        "",
    ]
    _table.save(arguments.out, "\n".join(text))


def _sentence(row, single: bool) -> str:
    how = {
        "measured": "were measured for this document, on this machine",
        "replayed": "were not measured for this document: they are replayed from a recorded run",
    }[row.mode]
    gpu = _table.escape(row.gpu or "no GPU")
    commit = _table.code(row.commit[:12])
    state = " (with uncommitted changes)" if str(row.dirty) == "True" else ""
    ops = "all ops" if single else ", ".join(_table.code(op) for op in row.ops.split())
    return (
        rf"The times of {ops} {how}. Run {_table.code(row.run_id)}; machine "
        rf"{_table.code(row.machine)}, {gpu}; {_table.escape(row.date[:10])}; "
        rf"commit {commit}{state}.{_since(row)}"
    )


def _since(row) -> str:
    """Which of a run's ops are no longer what it timed."""
    changed = row.changed_ops.split()
    if not changed:
        return ""
    every = len(changed) > 1 and changed == row.ops.split()
    names = "all of them" if every else _table.listed(map(_table.code, changed))
    return f" The code of {names} has changed since."


if __name__ == "__main__":
    run(main, __doc__)

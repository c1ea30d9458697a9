"""Renews the part of the README between its markers: what the recorded run shows, in numbers."""

import _data

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
# The verdicts that the README counts.
WORDS = {
    "better": "better",
    "no difference": "the same within 1 %",
    "undecided": "undecided",
    "worse": "worse",
}
CLAIMS = (
    ("the best rival", "best", _data.HEADLINE),
    ("each baseline", "each", _data.HEADLINE),
    ("the best rival, in training", "best", _data.TRAINING),
)
FAR = 1.25


def main(arguments) -> None:
    text = arguments.out.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise _data.PaperError(f"{arguments.out}: lacks the lines {BEGIN} and {END}; put them back")
    head, _, rest = text.partition(BEGIN)
    part = block(arguments.run)
    _data.write(arguments.out, f"{head}{BEGIN}\n{part}\n{END}{rest.partition(END)[2]}")


def block(folder) -> str:
    """The lines between the markers, from the CSV files of a run."""
    found = _data.fastest(folder)
    training = _data.fastest(folder, part=_data.TRAINING)
    memory = found[found["bound"] == "memory"]
    alone = found[found["outside"] == 0]
    means = alone.groupby("op")[["ratio"]].apply(_data.mean_ratio)
    far = means[means >= FAR].sort_values(ascending=False)
    rest = found[~found["op"].isin(far.index)]
    sets = {
        "all cells": found,
        "bound by memory": memory,
        "matrix product": found[found["op"] == "matmul"],
        "attention": found[found["op"] == "attention"],
        "without the operations that only PyTorch and the tutorials have": found.drop(alone.index),
        f"without {_listed(far.index)}, of these the furthest ahead": rest,
        "training: both passes in one call, in none of the above": training,
    }
    models = dict.fromkeys(_data.read(folder, "runs")["gpu"].dropna())
    lines = [
        "Time of the fastest baseline of each cell over the time of ours, as recorded on "
        f"{_listed(models)}:",
        "",
        "| cells | number | geometric mean | median |",
        "| --- | --: | --: | --: |",
    ]
    for name, cells in sets.items():
        if len(cells):
            mean, median = _data.mean_ratio(cells), cells["ratio"].median()
            lines.append(f"| {name} | {len(cells)} | {mean:.3f} | {median:.3f} |")
    lines += [
        "",
        "Claims, each over the cells of an operation and pass, corrected for their number:",
    ]
    lines += ["", f"| ours against | claims | {' | '.join(WORDS.values())} |"]
    lines.append("| --- |" + " --: |" * (1 + len(WORDS)))
    for name, against, part in CLAIMS:
        rows = _data.claims(folder, against)
        rows = rows[(rows["timed_by"] == _data.GRAPH) & (rows["part"] == part)]
        if rows.empty and part == _data.TRAINING:
            continue
        counts = " | ".join(str((rows["verdict"] == word).sum()) for word in WORDS)
        lines.append(f"| {name} | {len(rows)} | {counts} |")
    events = (_data.read(folder, "verdicts")["timed_by"] == _data.EVENTS).sum()
    if events:
        lines += [
            "",
            f"{events} comparisons rest on times that hold work of the host, because no CUDA graph"
            " could be captured. They are marked in the paper and stand in none of these numbers.",
        ]
    return "\n".join(lines)


def _listed(names) -> str:
    """`a`, `b` and `c`, as Markdown."""
    names = [f"`{name}`" for name in names]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


if __name__ == "__main__":
    _data.run(main, __doc__)

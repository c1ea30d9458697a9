"""Cells without a time that counts: how many, their status and the reason."""

import re

import _table
from _data import natural, rank, run, summary

CAPTION = "Cells without a time that counts, by implementation and reason; the figures mark them."
# What a word says, for those that occur.
MEANING = {
    "impossible": (
        "faster than memory and arithmetic units allow for the work that is counted, so other work "
        "was done; PyTorch's gradient of a transpose, for one, is a view of the gradient that it "
        "is given and moves no byte"
    ),
    "hung": "no answer within the time limit",
    "unsupported": "the library declines the case",
    "unavailable": "library or hardware absent",
    "inaccurate": "refused by the gate",
    "oom": "out of memory",
    "throttled": "timed while something slowed the GPU, so the time stands in tables alone",
}
LENGTH = 130
FLOAT_ROWS = 24
# How much was left is another figure in each cell.
MEMORY = re.compile(r"(?<=CUDA out of memory)\. Tried to allocate .*", re.DOTALL)
FLOOR = re.compile(r"^(?:[\d.]+ us, )?faster than the floor of [\d.]+ us$")


def main(arguments):
    rows = summary(arguments.run)
    holes = rows[rows["status"] != "ok"].copy()
    if holes.empty:
        _table.save(arguments.out, "Every cell of every implementation has a time.\n")
        return
    place = rank(arguments.run)
    holes["reason"] = holes["reason"].str.replace(FLOOR, "faster than the floor", regex=True)
    holes["reason"] = holes["reason"].str.replace(MEMORY, "", regex=True)
    lines, last = [], None
    for (impl, status, reason), cells in holes.groupby(["impl", "status", "reason"]):
        if last not in (None, impl):
            lines.append([r"\addlinespace[2pt]"])
        line = ["" if impl == last else _table.code(impl), status, _ops(cells, place)]
        lines.append([*line, str(len(cells)), _table.prose(_table.cut(reason, LENGTH))])
        last = impl
    head = ["implementation & status & op & {cells} & reason"]
    columns = (
        r"ll>{\raggedright\arraybackslash}p{0.34\linewidth}r"
        r">{\raggedright\arraybackslash}p{0.33\linewidth}"
    )
    words = [
        rf"\emph{{{word.capitalize()}}}: {MEANING[word]}."
        for word in MEANING
        if (holes["status"] == word).any()
    ]
    caption = " ".join([CAPTION, *words])
    table = _table.captioned(columns, head, lines, caption, "tab:holes", FLOAT_ROWS, _table.SMALL)
    _table.save(arguments.out, table)


def _ops(cells, place):
    """The ops with the passes in which these cells lie, in the order of the paper."""
    found = cells.groupby(["family", "op"])["pass"].agg(
        lambda names: sorted(set(names), key=natural)
    )
    ordered = sorted(found.items(), key=lambda item: (place[item[0][0]], item[0][1]))
    return ", ".join(f"{_table.code(op)} ({', '.join(passes)})" for (_, op), passes in ordered)


if __name__ == "__main__":
    run(main, __doc__)

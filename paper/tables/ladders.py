"""The forms of a kernel as commands of LaTeX: a table for each op, and whether the run has it.

A row has the rate of a form, over that of the row above and over that of the first, with the clock
and the power of the board meanwhile.
"""

import _table
from _data import OURS, natural, read, run

OPS = {"matmul": "the matrix product", "attention": "attention"}
HEAD = ("technique", "TFLOP/s", r"$\times$ above", r"$\times$ first", "MHz", "W")
CAPTION = (
    "The forms of {what}, from the simplest to the shipped one: the median over blocks in which "
    "all forms and baselines take turns. ``In its place'' and ``and'' speak of the row above. Each "
    "form gave the results of the shipped one before it was timed. Clock and power are those of "
    "the board meanwhile. {taken}"
)


def main(arguments):
    lines = []
    for op, what in OPS.items():
        rows = read(arguments.run, f"{op}_ladder")
        has = bool((rows["status"] == "ok").any())
        lines.append(rf"\newcommand{{\when{op}ladder}}[1]{{{'#1' if has else ''}}}")
        caption = CAPTION.format(what=what, taken=_taken(rows))
        table = _shown(rows, caption, f"tab:{op}ladder") if has else ""
        lines.append(rf"\newcommand{{\{op}laddertable}}{{{table}}}")
    _table.save(arguments.out, "\n".join([*lines, ""]))


def _shown(rows, caption, label):
    lines = []
    cells = sorted(set(zip(rows["pass"], rows["case"], rows["dtype"], strict=True)),
                   key=lambda cell: list(map(natural, cell)))  # fmt: skip
    for pass_, case, dtype in cells:
        found = rows[(rows["pass"] == pass_) & (rows["case"] == case) & (rows["dtype"] == dtype)]
        lines += _table.heading(len(HEAD), _table.escape(f"{case}, {dtype}, {pass_}"))
        lines += _forms(found[found["impl"] == OURS])
        for impl, rival in found[found["impl"] != OURS].groupby("impl"):
            lines.append([_table.code(impl), *_measured(rival, None, None)])
    return _table.captioned("@{}lrrrrr@{}", [" & ".join(HEAD)], lines, caption, label)


def _taken(rows):
    """Say on which GPUs and of which commits the rows were taken, as far as they tell."""
    found = rows[rows["gpu"].fillna("") != ""][["gpu", "commit"]].drop_duplicates()
    where = (f"{gpu} at commit {_short(commit)}" for gpu, commit in found.itertuples(index=False))
    return f"Taken on {_table.escape(', '.join(where))}." if len(found) else ""


def _short(commit):
    """Return the first digits of a commit, and that files differed from it."""
    digits, dirty, _ = commit.partition("-dirty")
    return digits[:7] + dirty


def _forms(ours):
    lines, first, last = [], None, None
    for _, form in ours.groupby("rung"):
        lines.append([_table.escape(form["adds"].iloc[0]), *_measured(form, first, last)])
        if (rate := _rate(form)) is not None:
            first, last = first or rate, rate
    return lines


def _rate(rows):
    timed = rows[rows["status"] == "ok"]
    return (timed["flops"] / timed["device_us"]).median() / 1e6 if len(timed) else None


def _measured(rows, first, last):
    """The fields of a row; first, last: rates of the first form and of the row above, if any."""
    rate = _rate(rows)
    if rate is None:
        failed = rows.iloc[0]
        why = f"{failed['status']}: {_table.reason(failed['reason'], 48)}"
        return [rf"\multicolumn{{{len(HEAD) - 1}}}{{l}}{{{why}}}"]
    over = ["" if other is None else f"{rate / other:.2f}" for other in (last, first)]
    state = [_whole(rows[name].median()) for name in ("sm_mhz", "power_w")]
    return [f"{rate:.0f}", *over, *state]


def _whole(value):
    return f"{value:.0f}" if value == value else "--"


if __name__ == "__main__":
    run(main, __doc__)

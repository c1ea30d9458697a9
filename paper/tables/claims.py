r"""List the claims on each op: against the best rival, `\bestsentence` in words and `\besttable`;
against each baseline, `\claimstable`.
"""

import _table
from _data import EVENTS, TRAINING, VERDICTS, claims, natural, rank, read, run

LEAST_P = 0.001
CAPTION = (
    "The claims of this study, by operation, pass and baseline: the baseline's time over the time "
    r"of ours, as geometric mean over the cells in which both have one, its \SI{95}{\percent} "
    "interval, the noise floor, $p$ after Holm's correction over all claims, and the verdict; "
    "beside it the range over the single cells, and the verdicts on them. Above one, ours takes "
    "less time."
)
EVENT_NOTE = (
    r" A double dagger: a call of the baseline cannot be captured as a graph, so events timed it, "
    r"with what the host does meanwhile; such a claim is counted apart."
)
DOUBLE = r"$^\ddagger$"
BEST = (
    "The claims against the best rival of each operation and pass, whichever it is: ours is better "
    "if it is better than every rival, worse if it is worse than one. Rivals: how many have times "
    "by graphs. The ratio is that to the rival with the least, named here, over the cells that "
    r"both have; the \SI{95}{\percent} interval covers the least of the true ratios; $p$ is after "
    "Holm's correction over all rows."
)
# Both captions say so where there are such rows.
APART = (
    " Claims on both passes in one call, of an operation that has them apart as well, are a family "
    "of their own in this correction."
)
STAR = (
    " A star marks a ratio that is beyond ten to either side, which calls for a look at whether "
    "both do the same work."
)
HEAD = (
    r"& & & & & & & \multicolumn{2}{c}{single cells} & \multicolumn{4}{c}{verdicts on them}",
    r"\cmidrule(lr){8-9}\cmidrule(l){10-13}",
    r"baseline & {cells} & {ratio} & interval & {noise, \%} & $p$ & verdict & {least} & {most}"
    r" & {better} & {same} & {worse} & {open}",
)


def main(arguments):
    verdicts = read(arguments.run, "verdicts")
    verdicts = verdicts[verdicts["set"] == "grid"]
    cells = dict(list(verdicts.groupby(["op", "pass", "baseline", "timed_by"])))
    place = rank(arguments.run)
    rows, best = (
        sorted(
            claims(arguments.run, against).to_dict("records"),
            key=lambda row: (
                place[row["family"]],
                row["op"],
                natural(row["pass"]),
                row["baseline"],
            ),
        )
        for against in ("each", "best")
    )
    lines, last = [], None
    for row in rows:
        about = row["op"], row["pass"]
        if last != about:
            lines += _table.heading(len(HEAD[-1].split("&")), f"{_table.code(about[0])} {about[1]}")
        lines.append(_line(row, cells[*about, row["baseline"], row["timed_by"]]))
        last = about
    starred = any(row["note"] for row in rows)
    star = ",table-space-text-post={$^*$}" if starred else ""
    columns = f"lrS[table-format=3.3{star}]cS[table-format=2.2]ll"
    columns += "*{2}{S[table-format=3.2]}rrrr"
    caption = CAPTION + STAR * starred
    caption += APART * _apart(rows)
    caption += EVENT_NOTE * any(row["timed_by"] == EVENTS for row in rows)
    table = _table.captioned(
        columns, HEAD, lines, caption, "tab:claims", size=_table.SMALL
    ).rstrip()
    text = [
        rf"\newcommand{{\bestsentence}}{{{_sentence(best)}}}",
        rf"\newcommand{{\besttable}}{{{_best(best)}}}",
        rf"\newcommand{{\claimstable}}{{{table}}}",
        "",
    ]
    _table.save(arguments.out, "\n".join(text))


def _best(rows):
    """The table of the claims against the best rival."""
    lines, last = [], None
    for row in rows:
        op = "" if row["op"] == last else _table.code(row["op"])
        end = [_interval(row), _p(row), row["verdict"]]
        ratio = _table.number(row["ratio"], 3)
        about = [str(row["rivals"]), _table.code(row["baseline"]), f"{row['cells']} of {row['of']}"]
        lines.append([op, row["pass"], *about, ratio, *end])
        last = row["op"]
    head = ["op & pass & {rivals} & closest & {cells} & {ratio} & interval & $p$ & verdict"]
    columns = "llrlrS[table-format=2.3]cll"
    caption = BEST + APART * _apart(rows)
    return _table.captioned(columns, head, lines, caption, "tab:best", size=_table.SMALL).rstrip()


def _apart(rows):
    return any(row["part"] == TRAINING for row in rows)


def _line(row, cells):
    ratio = _table.number(row["ratio"], 3) + ("$^*$" if row["note"] else "")
    noise = _table.number(100 * row["noise"])
    compared = f"{row['cells']} of {row['of']}"
    ends = [_table.number(end) for end in (cells["ratio"].min(), cells["ratio"].max())]
    counts = [str((cells["verdict"] == verdict).sum()) for verdict in VERDICTS]
    verdict = [compared, ratio, _interval(row), noise, _p(row), row["verdict"]]
    name = _table.code(row["baseline"]) + DOUBLE * (row["timed_by"] == EVENTS)
    return [name, *verdict, *ends, *counts]


def _interval(row):
    return f"{row['ci_lo']:.3f}--{row['ci_hi']:.3f}"


def _p(row):
    p = row["p_holm"]
    return "--" if p != p else rf"$<{LEAST_P}$" if p < LEAST_P else f"{p:.3f}"


def _sentence(rows):
    """The pairs of op and pass in which the best rival takes less time, by name, with it."""
    several = {row["op"] for row in rows if row["pass"] != "forward"}
    behind = []
    for row in rows:
        if row["verdict"] == "worse":
            name = _table.code(row["op"]) + (f" {row['pass']}" if row["op"] in several else "")
            behind.append(f"{name} ({_table.code(row['baseline'])})")
    if not rows:
        return "There is nothing to compare."
    if not behind:
        return "In no operation and pass is a rival shown to take less time."
    return f"A rival takes less time in {_table.listed(behind)}."


if __name__ == "__main__":
    run(main, __doc__)

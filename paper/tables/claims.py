r"""What is claimed of each op against each baseline: `\claimsentence` in words, `\claimstable`."""

import _table
from _data import natural, rank, read, run

LEAST_P = 0.001
VERDICTS = ("better", "no difference", "worse", "undecided")
CAPTION = (
    "The claims of this study, by operation, pass and baseline: the baseline's time over the time "
    r"of ours, as geometric mean over the cells in which both have one, its \SI{95}{\percent} "
    "interval, the noise floor, $p$ after Holm's correction over all claims, and the verdict; "
    "beside it the range over the single cells, and the verdicts on them. Above one, ours takes "
    "less time."
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
    cells = dict(list(verdicts.groupby(["op", "pass", "baseline"])))
    place = rank(arguments.run)
    rows = sorted(
        read(arguments.run, "claims").to_dict("records"),
        key=lambda row: (place[row["family"]], row["op"], natural(row["pass"]), row["baseline"]),
    )
    lines, last = [], None
    for row in rows:
        about = row["op"], row["pass"]
        if last != about:
            lines += _table.heading(len(HEAD[-1].split("&")), f"{_table.code(about[0])} {about[1]}")
        lines.append(_line(row, cells[*about, row["baseline"]]))
        last = about
    starred = any(row["note"] for row in rows)
    star = ",table-space-text-post={$^*$}" if starred else ""
    columns = f"lrS[table-format=3.3{star}]cS[table-format=2.2]ll"
    columns += "*{2}{S[table-format=3.2]}rrrr"
    caption = CAPTION + STAR * starred
    table = _table.captioned(
        columns, HEAD, lines, caption, "tab:claims", size=_table.SMALL
    ).rstrip()
    text = [
        rf"\newcommand{{\claimsentence}}{{{_sentence(rows)}}}",
        rf"\newcommand{{\claimstable}}{{{table}}}",
        "",
    ]
    _table.save(arguments.out, "\n".join(text))


def _line(row, cells):
    ratio = _table.number(row["ratio"], 3) + ("$^*$" if row["note"] else "")
    interval = f"{row['ci_lo']:.3f}--{row['ci_hi']:.3f}"
    noise = _table.number(100 * row["noise"])
    compared = f"{row['cells']} of {row['of']}"
    p = row["p_holm"]
    shown = "--" if p != p else rf"$<{LEAST_P}$" if p < LEAST_P else f"{p:.3f}"
    ends = [_table.number(end) for end in (cells["ratio"].min(), cells["ratio"].max())]
    counts = [str((cells["verdict"] == verdict).sum()) for verdict in VERDICTS]
    verdict = [compared, ratio, interval, noise, shown, row["verdict"]]
    return [_table.code(row["baseline"]), *verdict, *ends, *counts]


def _sentence(rows):
    """How many pairs of op and pass stand where, by what their claims say together; those in
    which a baseline takes less time are named, with it."""
    found = {}
    for row in rows:
        found.setdefault((row["op"], row["pass"]), []).append(row)
    if not found:
        return "there is nothing to compare"
    several = {op for op, direction in found if direction != "forward"}
    less, behind = 0, []
    for (op, direction), claims in found.items():
        less += all(row["verdict"] == "better" for row in claims)
        ahead = [row["baseline"] for row in claims if row["verdict"] == "worse"]
        if ahead:
            name = _table.code(op) + (f" {direction}" if op in several else "")
            behind.append(f"{name} ({_table.listed(map(_table.code, ahead))})")
    neither = len(found) - less - len(behind)
    parts = [
        f"of {len(found)}~pairs of operation and pass, ours takes less time than every baseline in "
        f"{less}",
        f"more than at least one in {len(behind)}",
        f"and in {neither} neither is shown",
    ]
    sentence = ", ".join(parts)
    less = f". A baseline takes less time in {_table.listed(behind)}"
    return sentence + less * bool(behind)


if __name__ == "__main__":
    run(main, __doc__)

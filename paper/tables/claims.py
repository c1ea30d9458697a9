r"""What is claimed of each op against each baseline: `\claimsentence` in words, `\claimstable`."""

import _table
from _data import natural, rank, read, run

LEAST_P = 0.001
CAPTION = (
    "The claims of this study: geometric mean over cells of a baseline's time over the time of "
    r"ours, its \SI{95}{\percent} interval, the noise floor, $p$ after Holm's correction over all "
    "claims, and the verdict. Above one, ours takes less time. A star marks a ratio that is beyond "
    "ten to either side, which calls for a look at whether both do the same work."
)


def main(arguments):
    rows = read(arguments.run, "claims")
    place = rank(arguments.run)
    rows = sorted(
        rows.to_dict("records"),
        key=lambda row: (place[row["family"]], row["op"], natural(row["pass"]), row["baseline"]),
    )
    lines, last = [], None
    for row in rows:
        about = row["op"], row["pass"]
        if last not in (None, about):
            lines.append([r"\addlinespace[2pt]"])
        name = ["", ""] if last == about else [_table.code(row["op"]), row["pass"]]
        lines.append([*name, *_line(row)])
        last = about
    head = [r"op & pass & baseline & cells & {ratio} & interval & {noise, \%} & $p$ & verdict"]
    star = ",table-space-text-post={$^*$}" if any(row["note"] for row in rows) else ""
    columns = f"lllcS[table-format=3.3{star}]cS[table-format=2.2]ll"
    table = _table.captioned(columns, head, lines, CAPTION, "tab:claims").rstrip()
    text = [
        rf"\newcommand{{\claimsentence}}{{{_sentence(rows)}}}",
        rf"\newcommand{{\claimstable}}{{{table}}}",
        "",
    ]
    _table.save(arguments.out, "\n".join(text))


def _line(row):
    ratio = _table.number(row["ratio"], 3) + ("$^*$" if row["note"] else "")
    interval = f"{row['ci_lo']:.3f}--{row['ci_hi']:.3f}"
    noise = _table.number(100 * row["noise"])
    cells = f"{row['cells']} of {row['of']}"
    p = row["p_holm"]
    shown = "--" if p != p else rf"$<{LEAST_P}$" if p < LEAST_P else f"{p:.3f}"
    return [_table.code(row["baseline"]), cells, ratio, interval, noise, shown, row["verdict"]]


def _sentence(rows):
    """Each op and pass once, by what its claims say together."""
    found = {}
    for row in rows:
        found.setdefault((row["op"], row["pass"]), []).append(row)
    several = {op for op, direction in found if direction != "forward"}
    sides = {
        "ours takes less time than every baseline in": [],
        "it takes more than at least one in": [],
        "neither is shown in": [],
    }
    less, more, neither = sides.values()
    for (op, direction), claims in found.items():
        verdicts = {row["verdict"] for row in claims}
        name = _table.code(op) + (f" {direction}" if op in several else "")
        if verdicts == {"better"}:
            less.append(name)
        elif "worse" in verdicts:
            ahead = [row["baseline"] for row in claims if row["verdict"] == "worse"]
            more.append(f"{name} ({_listed(map(_table.code, ahead))})")
        else:
            neither.append(name)
    parts = [f"{side} {_listed(names)}" for side, names in sides.items() if names]
    return "; ".join(parts) or "there is nothing to compare"


def _listed(names):
    names = list(names)
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


if __name__ == "__main__":
    run(main, __doc__)

"""The result sections: that of each family in the run, or a plain one where it has none.

Behind the text of a family stands what was measured of it, by pass, and then its figure.
"""

from pathlib import Path

import _table
from _data import (
    CELL,
    EVENTS,
    OURS,
    changed,
    compared,
    mean_ratio,
    natural,
    rank,
    read,
    run,
    summary,
)

PAPER = Path(__file__).parents[1]
# Up to this much to either side of one, a mean is called level.
LEVEL = 0.01
RINGS = " A ring marks a time by events, in which the host has a part."
PASSES = {"forward": "Forward", "backward": "Backward", "both": "Forward and backward in one call"}
VERDICTS = {"less time": "better", "more": "worse", "the same": "no difference"}


def main(arguments):
    drawn = {path.stem for path in (PAPER / "figures").glob("[!_]*.py")}
    # Whole networks have a section of their own.
    networks = set(read(arguments.run, "network")["op"])
    rows = summary(arguments.run)
    apart = set(rows.loc[rows["op"].isin(networks), "family"])
    families = [family for family in rank(arguments.run) if family not in apart]
    first = next((family for family in families if family in drawn), "others")
    verdicts, own = compared(arguments.run, every=True), summary(arguments.run)
    rings = RINGS if (own["timed_by"] == EVENTS).any() else ""
    own = own[(own["impl"] == OURS) & (own["status"] == "ok") & (own["set"] == "grid")]
    lines, since = [], changed(arguments.run)
    for family in families:
        figure = family if family in drawn else "others"
        title = _table.escape(family.replace("_", " ")).capitalize()
        plain = (
            rf"\subsection{{{title}}}",
            rf"The cells of this family are drawn in \cref{{fig:{figure}}}.",
        )
        lines += [
            rf"\InputIfFileExists{{sections/family_{family}}}{{}}{{%",
            *plain,
            "}",
            r"\remembertitle",
        ]
        against, timed = (rows[rows["family"] == family] for rows in (verdicts, own))
        if len(timed):
            passes = sorted(timed["pass"].unique(), key=natural)
            lines.append(r"\paragraph{Measured.}")
            lines += [_measured(name, against, timed[timed["pass"] == name]) for name in passes]
            lines += _since(sorted(since & set(timed["op"])), timed["op"].nunique())
        if figure != "others":
            lines.append(_float(figure, r"\familytitle", first, rings))
    if any(family not in drawn for family in families):
        lines.append(_float("others", "Further families", first, rings))
    _table.save(arguments.out, "\n".join([*lines, ""]))


def _measured(pass_, against, timed):
    """Tell how ours stands to the fastest baselines, eager PyTorch and the floor in a pass."""
    against = against[against["pass"] == pass_].sort_values("ratio")
    fastest = against.drop_duplicates(CELL)
    title, light = PASSES[pass_], timed["pct_sol"]
    reached = (
        rf"Speed of light: \SI{{{light.median():.0f}}}{{\percent}} in the median cell, "
        rf"\SI{{{light.max():.0f}}}{{\percent}} in the best."
    )
    if fastest.empty:
        return f"{title} ({len(timed)}~cells), no baseline has a time that counts. {reached}"
    mean, ratios = mean_ratio(fastest), fastest["ratio"]
    found = fastest["verdict"].value_counts()
    counts = (f"{word} in {found.get(name, 0)}" for word, name in VERDICTS.items())
    worst = fastest.iloc[0]
    where = [worst["op"]] * (timed["op"].nunique() > 1) + [worst["case"]]
    named = " ".join(map(_table.code, where))
    parts = [
        f"{title} ({len(fastest)}~cells), {_side(mean, found)}: the ratio of times is {mean:.2f} "
        f"in the geometric mean, {ratios.min():.2f} to {ratios.max():.2f} in single cells. "
        f"Ours takes {', '.join(counts)}; it stands worst "
        f"against {_table.code(worst['baseline'])} in {named} {worst['dtype']}.",
        _by_baseline(against),
    ]
    return " ".join(filter(None, [*parts, reached]))


def _since(ops, number):
    """Which ops of a family of so many are no longer what was timed, in no sentence or one."""
    names = "" if len(ops) == number else f" of {_table.listed(map(_table.code, ops))}"
    return [f"The code{names} has changed since these times were taken."] * bool(ops)


def _by_baseline(against):
    """The mean against each baseline, over the cells that both have, the fastest first."""
    means = {name: mean_ratio(cells) for name, cells in against.groupby("baseline")}
    if len(means) < 2:
        return ""
    listed = _table.listed(
        f"{means[name]:.2f} ({_table.code(name)})" for name in sorted(means, key=means.get)
    )
    return f"By baseline, over the cells that both have, the mean is {listed}."


def _side(mean, found):
    """Tell which is ahead: the mean and the number of cells with that verdict have to agree."""
    lead = found.get("better", 0) - found.get("worse", 0)
    if abs(mean - 1) <= LEVEL:
        return "ours is level with the fastest baseline of each cell on the whole"
    if (mean - 1) * lead > 0:
        word = "ahead of" if lead > 0 else "behind"
        return f"ours is {word} the fastest baseline of each cell"
    return "ours and the fastest baseline of each cell lead by turns"


def _float(figure: str, title: str, first: str, rings: str) -> str:
    """The figure with its caption; that of the first explains the marks of all."""
    how = (
        r"Dashes and upright strokes mark the speed of light, bands \SI{95}{\percent} intervals, "
        "which may be narrower than the lines. Cells on no curve stand below, one a line. Crosses "
        "and other small signs at the edge mark cells without a time." + rings
        if figure == first
        else rf"Marks as in \cref{{fig:{first}}}."
    )
    caption = f"{title}: rate of each implementation by size. {how}"
    return "\n".join(
        (
            r"\begin{figure}[!htbp]\centering",
            # Below a higher figure its caption would not fit on the page.
            rf"\includegraphics[width=\linewidth,height=0.85\textheight,keepaspectratio]"
            rf"{{figures/{figure}}}",
            rf"\caption{{{caption}}}\label{{fig:{figure}}}",
            r"\end{figure}",
        )
    )


if __name__ == "__main__":
    run(main, __doc__)

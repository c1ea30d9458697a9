"""The result sections: that of each family in the run, or a plain one where it has none."""

from pathlib import Path

import _table
from _data import rank, run


def main(arguments):
    drawn = {path.stem for path in (Path(__file__).parents[1] / "figures").glob("[!_]*.py")}
    families = list(rank(arguments.run))
    first = next((family for family in families if family in drawn), "others")
    lines = []
    for family in families:
        figure = family if family in drawn else "others"
        name = _table.escape(family.replace("_", " "))
        plain = (
            rf"\subsection{{{name.capitalize()}}}",
            rf"The cells of this family are drawn in \cref{{fig:{figure}}}; "
            r"\cref{tab:speedup} compares them with the baselines.",
        )
        lines += [
            rf"\InputIfFileExists{{sections/family_{family}}}{{}}{{%",
            *plain,
            "}",
        ]
        if figure != "others":
            lines.append(_float(figure, name.capitalize(), first))
    if any(family not in drawn for family in families):
        lines.append(_float("others", "Further families", first))
    _table.save(arguments.out, "\n".join([*lines, ""]))


def _float(figure: str, title: str, first: str) -> str:
    """The figure with its caption; that of the first explains the marks of all."""
    how = (
        r"Dashes and upright strokes mark the speed of light, bands \SI{95}{\percent} intervals, "
        "which may be narrower than the lines. Cells on no curve stand below, one a line. Crosses "
        "mark cells without a time."
        if figure == first
        else rf"Marks as in \cref{{fig:{first}}}."
    )
    caption = f"{title}: rate of each implementation by size. {how}"
    return "\n".join(
        (
            r"\begin{figure}[!htbp]\centering",
            rf"\includegraphics[width=\linewidth]{{figures/{figure}}}",
            rf"\caption{{{caption}}}\label{{fig:{figure}}}",
            r"\end{figure}",
        )
    )


if __name__ == "__main__":
    run(main, __doc__)

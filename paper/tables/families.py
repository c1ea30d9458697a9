"""The result sections: that of each family in the run, or a plain one where it has none."""

from pathlib import Path

import _table
from _data import rank, run


def main(arguments):
    drawn = {path.stem for path in (Path(__file__).parents[1] / "figures").glob("[!_]*.py")}
    families = list(rank(arguments.run))
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
            lines.append(_float(figure, f"The family {name}"))
    if any(family not in drawn for family in families):
        lines.append(_float("others", "Families without a figure of their own"))
    _table.save(arguments.out, "\n".join([*lines, ""]))


def _float(figure: str, title: str) -> str:
    caption = (
        rf"{title}: rate by implementation. Bands are \SI{{95}}{{\percent}} intervals, dashes the "
        "speed of light, crosses and strokes cells without a time. Cases that lie on no curve are "
        "listed one a line."
    )
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

"""Draw the capabilities of each implementation: a field for each op, pass and dtype.

The colours are of ordinary cases. Two columns say how many of these were reached, and how many
hostile inputs passed.
"""

import _figure
import pandas as pd
import seaborn as sns
from _data import natural, rank, read, run, settled
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

DTYPES = ("float32", "float16", "bfloat16")
PASSES = ("forward", "backward", "both")
# The colour of each look, and a sign where colours alone are too near to each other.
LOOKS = {
    "right in every ordinary case": ("#2c6e8f", ""),
    "right, other cases declined": ("#c3dbe6", ""),
    "right as far as it was reached": ("#7fb0c8", ""),
    "wrong in an ordinary case": ("#c8102e", "\u00d7"),
    "every case declined": ("#d5d5d5", "\u2013"),
    "library or GPU absent": ("#ffffff", "\u25cb"),
}
OK, PARTLY, REACHED, WRONG, DECLINED, ABSENT = LOOKS
# For ordinary cases and for hostile ones: cells in all, reached, passed and declined.
ORDINARY = ("of", "cells", "passed", "declined")
HOSTILE = ("hostile_of", "hostile", "hostile_passed", "hostile_declined")
# In inches; the legend needs the least width.
ROW, COLUMN, LEFT, LEAST = 0.235, 0.235, 2.6, 5.2
# The ends of the two columns at the right, in points behind the last op.
RIGHT = (28, 66)


def main(arguments):
    table = settled(read(arguments.run, "capabilities"))
    # A stack with one part of ours can what the two can that it comes from.
    table = table[~table["impl"].str.contains("_with_")]
    families = rank(arguments.run)
    ops = sorted(table["op"].unique(), key=lambda op: _place(table, op, families))
    impls = _figure.in_order(table["impl"])
    fields = _fields(table)
    lines = 1 + fields.index.get_level_values("line").max()
    rows = pd.MultiIndex.from_product([impls, range(lines)])
    columns = pd.MultiIndex.from_product([ops, range(len(DTYPES))])
    looks = fields.unstack(["op", "dtype"]).reindex(index=rows, columns=columns)
    codes = looks.map(list(LOOKS).index, na_action="ignore").astype(float)
    signs = looks.map(lambda look: LOOKS.get(look, ("", ""))[1])
    size = (min(_figure.WIDTH, max(LEAST, LEFT + COLUMN * len(ops))), ROW * len(impls) + 1.5)
    figure, axes = plt.subplots(figsize=size)
    colours = ListedColormap([colour for colour, _ in LOOKS.values()])
    sns.heatmap(
        codes, cmap=colours, vmin=-0.5, vmax=len(LOOKS) - 0.5, cbar=False, annot=signs, fmt="",
        annot_kws={"fontsize": 4.5}, linewidths=0.3, linecolor="white", ax=axes,
    )  # fmt: skip
    for row in range(0, len(impls), 2):
        axes.axhspan(lines * row, lines * (row + 1), color="#f6f6f6", linewidth=0, zorder=0)
    axes.grid(visible=False)
    # Wider gaps between ops and between implementations.
    axes.hlines(range(0, lines * len(impls) + 1, lines), *axes.get_xlim(), "white", linewidth=3)
    axes.vlines(range(0, len(columns) + 1, len(DTYPES)), *axes.get_ylim(), "white", linewidth=1.5)
    axes.xaxis.tick_top()
    axes.set_xticks([(i + 0.5) * len(DTYPES) for i in range(len(ops))], ops, rotation=90)
    middles = [(i + 0.5) * lines for i in range(len(impls))]
    axes.set_yticks(middles, [_title(table, impl) for impl in impls], rotation=0)
    axes.set(xlabel="", ylabel="")
    axes.tick_params(length=0)
    for place, title in zip(RIGHT, ("reached", "hostile passed"), strict=True):
        _beside(axes, -0.12 * lines, place, title, rotation=90, va="bottom")
    for middle, impl in zip(middles, impls, strict=True):
        for place, text in zip(RIGHT, _numbers(table[table["impl"] == impl]), strict=True):
            _beside(axes, middle, place, text, va="center")
    handles = [
        Patch(facecolor=colour, edgecolor="#9a9a9a", linewidth=0.4, label=f"{look} {sign}")
        for look, (colour, sign) in LOOKS.items()
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=2, handlelength=1, handleheight=1
    )
    _figure.save(figure, arguments.out)


def _beside(axes, row, place, text, **style):
    axes.annotate(
        text,
        (1, row),
        xycoords=("axes fraction", "data"),
        xytext=(place, 0),
        textcoords="offset points",
        ha="right",
        fontsize="x-small",
        annotation_clip=False,
        **style,
    )


def _fields(table):
    """The look by implementation, line of its row, op and dtype: the passes of an op are lines."""
    found = {}
    for op, rows in table.groupby("op"):
        passes = sorted(set(rows["pass"]) - {""}, key=PASSES.index) or [""]
        for row in rows.to_dict("records"):
            # A report without cells says the same of all that the op has.
            for line, name in enumerate(passes):
                if row["pass"] in ("", name):
                    for dtype in [row["dtype"]] if row["pass"] else DTYPES:
                        found[row["impl"], line, op, DTYPES.index(dtype)] = _look(row)
    names = ["impl", "line", "op", "dtype"]
    return pd.Series(found.values(), pd.MultiIndex.from_tuples(found, names=names))


def _look(row):
    if row["status"] in ("inaccurate", "crashed", "hung"):
        return WRONG
    if row["status"] == "unavailable":
        return ABSENT
    if not row["pass"]:
        # A report without cells: the library was absent, fell at its import, or offers nothing.
        return DECLINED
    if row["cells"] < row["of"] or not row["of"]:
        return REACHED
    if row["status"] == "unsupported":
        return DECLINED
    return OK if row["passed"] == row["of"] else PARTLY


def _numbers(rows):
    """The share of ordinary cells that were reached; hostile cells passed of those offered."""
    of, reached, _, _ = rows[list(ORDINARY)].sum()
    _, tried, passed, declined = rows[list(HOSTILE)].sum()
    share = f"{_percent(reached, of)} %" if of else "--"
    return share, f"{passed:.0f}/{tried - declined:.0f}" if tried > declined else "--"


def _percent(part, whole):
    """Neither 0 nor 100 unless it is."""
    percent = round(100 * part / whole)
    return min(99, max(1, percent)) if 0 < part < whole else percent


def _place(table, op, families):
    family = table.loc[table["op"] == op, "family"].iloc[0]
    return families.get(family, len(families)), family, natural(op)


def _title(table, impl):
    versions = table.loc[table["impl"] == impl, "impl_version"]
    return " ".join([impl, *sorted(set(versions) - {""})])


if __name__ == "__main__":
    run(main, __doc__)

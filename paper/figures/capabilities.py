"""What each implementation can do: a mark for each op, pass and dtype, as verification saw it.

The marks are of ordinary cases. Two columns say how many of these were reached, and how many
hostile inputs passed.
"""

import _figure
from _data import natural, rank, read, run, settled
from matplotlib import pyplot as plt

DTYPES = ("float32", "float16", "bfloat16")
PASSES = ("forward", "backward", "both")
# How far the marks of a cell lie apart, in widths and heights of the cell.
ACROSS, DOWN = 0.28, 0.27
GOOD, BAD, SOFT = "#2c6e8f", "#c8102e", "#9a9a9a"
HALF = {"fillstyle": "bottom", "markerfacecoloralt": "white"}
LOOKS = {
    "right in every ordinary case": {"marker": "s", "color": GOOD},
    "right, other cases declined": {"marker": "s", "markerfacecolor": "white", "color": GOOD},
    "right as far as it was reached": {"marker": "s", "color": GOOD, **HALF},
    "wrong in an ordinary case": {"marker": "X", "color": BAD, "markeredgewidth": 0},
    "every case declined": {"marker": "_", "color": SOFT},
    "library or GPU absent": {"marker": "o", "markerfacecolor": "white", "color": SOFT},
}
OK, PARTLY, REACHED, WRONG, DECLINED, ABSENT = LOOKS
# Of ordinary cases and of hostile ones: cells in all, reached, passed and declined.
ORDINARY = ("of", "cells", "passed", "declined")
HOSTILE = ("hostile_of", "hostile", "hostile_passed", "hostile_declined")
# In inches; the legend needs the least width.
ROW, COLUMN, LEFT, LEAST = 0.235, 0.235, 2.6, 5.2
# Where the two columns at the right end, in points behind the last op.
RIGHT = (28, 66)


def main(arguments):
    table = settled(read(arguments.run, "capabilities"))
    families = rank(arguments.run)
    ops = sorted(table["op"].unique(), key=lambda op: _place(table, op, families))
    impls = _figure.in_order(table["impl"])
    titles = [_title(table, impl) for impl in impls]
    width = max(LEAST, LEFT + COLUMN * len(ops))
    with plt.rc_context(
        _figure.STYLE | {"axes.grid": False, "lines.markersize": 2.4, "lines.markeredgewidth": 0.5}
    ):
        size = (min(_figure.WIDTH, width), ROW * len(impls) + 1.5)
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        for row in range(0, len(impls), 2):
            axes.axhspan(row - 0.5, row + 0.5, color="#f3f3f3", linewidth=0, zorder=0)
        for (op, impl), rows in table.groupby(["op", "impl"]):
            _cell(axes, ops.index(op), impls.index(impl), rows)
        for look, style in LOOKS.items():
            axes.plot([], [], linestyle="", label=look, **style)
        for place, title in zip(RIGHT, ("reached", "hostile passed"), strict=True):
            _beside(axes, -0.62, place, title, rotation=90, va="bottom")
        for row, impl in enumerate(impls):
            for place, text in zip(RIGHT, _numbers(table[table["impl"] == impl]), strict=True):
                _beside(axes, row, place, text, va="center")
        axes.set_xticks(range(len(ops)), ops, rotation=90)
        axes.set_yticks(range(len(impls)), titles)
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlim(-0.5, len(ops) - 0.5)
        axes.set_ylim(len(impls) - 0.5, -0.5)
        figure.legend(loc="outside lower center", ncols=2, handletextpad=0.2, columnspacing=1)
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


def _cell(axes, column, row, rows):
    """The marks of one op and implementation: dtypes side by side, passes one below the other."""
    if not rows["pass"].any():
        # A report without cells: the library was absent, fell at its import, or offers nothing.
        statuses = set(rows["status"])
        fell = statuses & {"crashed", "hung"}
        look = WRONG if fell else ABSENT if statuses == {"unavailable"} else DECLINED
        axes.plot(column, row, linestyle="", **LOOKS[look])
        return
    passes = sorted(rows["pass"].unique(), key=PASSES.index)
    for one in rows.itertuples():
        # "pass" is a word of Python, so the tuple has it by its place.
        direction = one[rows.columns.get_loc("pass") + 1]
        x = column + ACROSS * (DTYPES.index(one.dtype) - 1)
        y = row + DOWN * (passes.index(direction) - (len(passes) - 1) / 2)
        axes.plot(x, y, linestyle="", **LOOKS[_look(one)])


def _look(row):
    if row.status in ("inaccurate", "crashed", "hung"):
        return WRONG
    if row.status == "unavailable":
        return ABSENT
    if row.cells < row.of or not row.of:
        return REACHED
    if row.status == "unsupported":
        return DECLINED
    return OK if row.passed == row.of else PARTLY


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

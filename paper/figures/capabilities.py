"""What each implementation can do: a mark for each op, pass and dtype, as verification saw it."""

import _figure
from _data import natural, rank, read, run, settled
from matplotlib import pyplot as plt

DTYPES = ("float32", "float16", "bfloat16")
PASSES = ("forward", "backward", "both")
# How far the marks of a cell lie apart, in widths and heights of the cell.
ACROSS, DOWN = 0.28, 0.27
GOOD, BAD, SOFT = "#2c6e8f", "#c8102e", "#9a9a9a"
LOOKS = {
    "right in every case": {"marker": "s", "color": GOOD},
    "right, other cases declined": {"marker": "s", "markerfacecolor": "white", "color": GOOD},
    "wrong or no result in a case": {"marker": "X", "color": BAD, "markeredgewidth": 0},
    "every case declined": {"marker": "_", "color": SOFT},
    "library or GPU absent": {"marker": "o", "markerfacecolor": "white", "color": SOFT},
}
OK, PARTLY, WRONG, DECLINED, ABSENT = LOOKS
# In inches; the legend needs the least width.
ROW, COLUMN, LEFT, LEAST = 0.235, 0.235, 1.45, 4.5


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
        axes.set_xticks(range(len(ops)), ops, rotation=90)
        axes.set_yticks(range(len(impls)), titles)
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlim(-0.5, len(ops) - 0.5)
        axes.set_ylim(len(impls) - 0.5, -0.5)
        figure.legend(loc="outside lower center", ncols=2, handletextpad=0.2, columnspacing=1)
        _figure.save(figure, arguments.out)


def _cell(axes, column, row, rows):
    """The marks of one op and implementation: dtypes side by side, passes one below the other."""
    if not rows["pass"].any():
        look = ABSENT if (rows["status"] == "unavailable").all() else DECLINED
        axes.plot(column, row, linestyle="", **LOOKS[look])
        return
    passes = sorted(rows["pass"].unique(), key=PASSES.index)
    for one in rows.itertuples():
        # "pass" is a word of Python, so the tuple has it by its place.
        direction = one[rows.columns.get_loc("pass") + 1]
        x = column + ACROSS * (DTYPES.index(one.dtype) - 1)
        y = row + DOWN * (passes.index(direction) - (len(passes) - 1) / 2)
        axes.plot(x, y, linestyle="", **LOOKS[_look(one.status, one.declined)])


def _look(status, declined):
    if status == "ok":
        return PARTLY if declined else OK
    return {"unsupported": DECLINED, "unavailable": ABSENT}.get(status, WRONG)


def _place(table, op, families):
    family = table.loc[table["op"] == op, "family"].iloc[0]
    return families.get(family, len(families)), family, natural(op)


def _title(table, impl):
    versions = table.loc[table["impl"] == impl, "impl_version"]
    return " ".join([impl, *sorted(set(versions) - {""})])


if __name__ == "__main__":
    run(main, __doc__)

"""Draw the forms of a kernel as rates, a column for each problem, with rivals as upright lines."""

import _figure
import pandas as pd
from _data import OURS, natural, read

ROW_INCHES, HEAD_INCHES = 0.24, 0.85
# Behind a number, so that an upright line does not cross it.
PLATE = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}
ABSENT = {"unsupported": "does not fit", "inaccurate": "wrong", "oom": "out of memory"}


def draw(arguments, name):
    """Draw a file of forms, `name`.csv of the run."""
    rows = read(arguments.run, name)
    if rows.empty:
        _figure.nothing(arguments.out, "This run has no forms of a kernel.")
        return
    rows = rows.assign(tflops=rows["flops"] / rows["device_us"] / 1e6)
    styles = _figure.looks(rows["impl"])
    passes = sorted(set(rows["pass"]), reverse=True)
    cases = {
        each: sorted(set(rows.loc[rows["pass"] == each, "case"]), key=natural) for each in passes
    }
    rungs = [rows.loc[rows["pass"] == each, "rung"].nunique() for each in passes]
    figure, grid = _figure.plt.subplots(
        len(passes), max(map(len, cases.values())), squeeze=False, sharey="row",
        figsize=(_figure.WIDTH, sum(HEAD_INCHES + ROW_INCHES * count for count in rungs)),
        height_ratios=rungs,
    )  # fmt: skip
    for line, pass_ in zip(grid, passes, strict=True):
        for axes in line[len(cases[pass_]) :]:
            axes.set_axis_off()
        for axes, case in zip(line, cases[pass_], strict=False):
            found = rows[(rows["pass"] == pass_) & (rows["case"] == case)]
            _panel(axes, found, styles)
            axes.set_title(f"{case}\n{pass_}")
        line[0].invert_yaxis()
    for axes in grid[-1]:
        axes.set_xlabel("TFLOP/s")
    lines = [
        _figure.Line2D([], [], color=styles[impl]["color"], linestyle="--", label=impl)
        for impl in sorted(set(rows["impl"]) - {OURS})
    ]
    if lines:
        figure.legend(handles=lines, loc="outside lower center", ncols=5)
    _figure.save(figure, arguments.out)


def _panel(axes, rows, styles):
    ours, rivals = rows[rows["impl"] == OURS], rows[rows["impl"] != OURS]
    names = ours.drop_duplicates("rung").set_index("rung")["adds"].sort_index()
    timed = ours[ours["status"] == "ok"]
    found = timed.groupby("rung")["tflops"].agg(["median", "min", "max"]).reindex(names.index)
    places = pd.Series(range(len(names)), names.index)
    axes.barh(places, found["median"].fillna(0), height=0.6, color=_figure.OURS_COLOUR, alpha=0.75)
    axes.hlines(places, found["min"], found["max"], color=_figure.DARK, linewidth=1)
    for rung, place in places.items():
        rate = found.loc[rung, "median"]
        said = f"{rate:.0f}" if rate == rate else _why(ours[ours["rung"] == rung])
        axes.annotate(said, (0 if rate != rate else rate, place), xytext=(3, 0), bbox=PLATE,
                      textcoords="offset points", va="center", fontsize="small")  # fmt: skip
    for impl, rate in rivals[rivals["status"] == "ok"].groupby("impl")["tflops"].median().items():
        axes.axvline(rate, color=styles[impl]["color"], linestyle="--", linewidth=1)
    axes.set_yticks(places, names)
    axes.margins(x=0.15)


def _why(rows):
    status = rows["status"].iloc[0]
    return ABSENT.get(status, status)

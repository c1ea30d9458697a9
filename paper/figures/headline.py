"""How many times as long each baseline takes, by op and pass: geometric mean and range of cells."""

import _figure
import numpy as np
from _data import natural, rank, read, run, summary
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator


def main(arguments):
    verdicts = read(arguments.run, "verdicts")
    if verdicts.empty:
        _figure.nothing(arguments.out, "This run compares ours with no baseline.")
        return
    styles = _figure.looks(summary(arguments.run)["impl"])
    baselines = _figure.in_order(verdicts["baseline"])
    place = rank(arguments.run)
    groups = sorted(
        verdicts.groupby(["family", "op", "pass"]),
        key=lambda group: (place[group[0][0]], group[0][1], natural(group[0][2])),
    )
    lines = sum(rows["baseline"].nunique() + 1 for _, rows in groups)
    with plt.rc_context(_figure.STYLE):
        size = (_figure.WIDTH, 0.11 * lines + 0.8)
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        line, ticks = 0, {}
        for key, rows in groups:
            present = [name for name in baselines if (rows["baseline"] == name).any()]
            ticks[line + (len(present) - 1) / 2] = _name(*key)
            for name in present:
                ratios = rows.loc[rows["baseline"] == name, "ratio"]
                colour = styles[name]["color"]
                axes.hlines(line, ratios.min(), ratios.max(), color=colour, alpha=0.5)
                axes.plot(np.exp(np.log(ratios).mean()), line, ms=4, **_point(styles, name))
                line += 1
            axes.axhline(line, color="#eeeeee", linewidth=0.6)
            line += 1
        axes.axvline(1, color=_figure.OURS_COLOUR, linewidth=1)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_yticks(list(ticks), list(ticks.values()))
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(line - 1, -1)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("time of the baseline / time of ours (right of the line: ours is faster)")
        handles = [plt.Line2D([], [], label=name, **_point(styles, name)) for name in baselines]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))
        _figure.save(figure, arguments.out)


def _point(styles, name):
    return styles[name] | {"linestyle": "none"}


def _name(family, op, direction):
    return op if direction == "forward" else f"{op} {direction}"


if __name__ == "__main__":
    run(main, __doc__)

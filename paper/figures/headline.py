"""How many times as long each baseline takes, by op and pass: mean, range and single cells."""

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
        size = (_figure.WIDTH, 0.12 * lines + 0.8)
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        line, ticks = 0, {}
        for (_, op, direction), rows in groups:
            present = [name for name in baselines if (rows["baseline"] == name).any()]
            ticks[line + (len(present) - 1) / 2] = f"{op} {direction}"
            for name in present:
                _line(axes, line, rows.loc[rows["baseline"] == name, "ratio"], styles[name])
                line += 1
            axes.axhline(line, color="#dddddd", linewidth=0.6)
            line += 1
        axes.axvline(1, color=_figure.OURS_COLOUR, linewidth=1, zorder=2)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_yticks(list(ticks), list(ticks.values()))
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(line - 1, -1)
        axes.grid(visible=False, axis="y")
        top = axes.get_xaxis_transform()
        axes.text(0.97, 1.01, "\u2190 ours slower", ha="right", transform=top)
        axes.text(1.03, 1.01, "ours faster \u2192", transform=top)
        axes.text(1.01, 1.01, "mean", transform=axes.transAxes)
        axes.set_xlabel("time of the baseline / time of ours")
        handles = [
            plt.Line2D([], [], label=name, linestyle="none", **styles[name]) for name in baselines
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5))
        _figure.save(figure, arguments.out)


def _line(axes, line, ratios, style):
    """The cells as strokes on their range, the geometric mean as a marker and in figures."""
    mean = np.exp(np.log(ratios).mean())
    colour = style["color"]
    axes.hlines(line, ratios.min(), ratios.max(), color=colour, linewidth=0.8, alpha=0.6)
    strokes = {"marker": "|", "markersize": 4, "markeredgewidth": 0.6, "linestyle": "none"}
    axes.plot(ratios, [line] * len(ratios), color=colour, alpha=0.6, **strokes)
    axes.plot(mean, line, **(style | {"markersize": 4.5}))
    edge = axes.get_yaxis_transform()
    axes.text(1.01, line, f"{mean:.2f}", va="center", transform=edge)


if __name__ == "__main__":
    run(main, __doc__)

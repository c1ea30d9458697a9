"""Ours against the fastest baseline of each cell, a line for each op: mean, range, single cells."""

import _figure
import numpy as np
import pandas as pd
import seaborn.objects as so
from _data import TRAINING, fastest, rank, run
from matplotlib import pyplot as plt

FORWARD, BACKWARD, TOGETHER = "forward", "backward, or both in one call", "forward and backward"
ALL = "all cells"
RANGE, CELLS = "#8a8a8a", "#555555"
LINE = 0.165
TICKS = [part * 10**power for power in range(-3, 4) for part in (1, 1.5, 2, 3, 5, 7)]


def main(arguments):
    found = fastest(arguments.run, every=True)
    if found.empty:
        _figure.nothing(arguments.out, "This run compares ours with no baseline.")
        return
    place = rank(arguments.run)
    ops = found.drop_duplicates("op").sort_values(
        ["family", "op"], key=lambda names: names.map(lambda name: (place.get(name, 0), name))
    )
    cells = pd.concat([found.assign(op=ALL), found], ignore_index=True)
    cells = cells.assign(panel=_titles(cells))
    means = np.exp(np.log(cells["ratio"]).groupby([cells["panel"], cells["op"]]).mean())
    panels = [title for title in (FORWARD, BACKWARD, TOGETHER) if title in means.index]
    least, most = found["ratio"].min() / 1.05, found["ratio"].max() * 1.05
    ticks = [tick for tick in TICKS if least <= tick <= most]
    plot = (
        so.Plot(cells, x="ratio", y="op")
        .facet("panel", order=panels)
        .scale(x=so.Continuous(trans="log").tick(at=ticks).label(like="{x:g}"))
        .scale(y=so.Nominal(order=[ALL, *ops["op"]]))
        .limit(x=(least, most))
        .label(x="", y="")
        .add(so.Range(color=RANGE, linewidth=0.7))
        .add(so.Dash(color=CELLS, alpha=0.7, linewidth=0.5, width=0.4))
    )
    rows = means.reset_index()
    for marker, some in (("o", rows["op"] != ALL), ("D", rows["op"] == ALL)):
        dot = so.Dot({"zorder": 4}, color=_figure.OURS_COLOUR, pointsize=4.2, marker=marker)
        plot = plot.add(dot, data=rows[some], x="ratio", y="op", col="panel")
    figure = plt.figure(figsize=(_figure.WIDTH, LINE * (len(ops) + 1) + 0.75))
    plot.on(figure).plot()
    for axes, title in zip(figure.axes, panels, strict=True):
        for line in _borders(ops["family"]):
            axes.axhline(line, color="#dddddd", linewidth=0.6, zorder=0.9)
        _dress(axes, title)
        edge = axes.get_yaxis_transform()
        for op, mean in means[title].items():
            axes.text(1.02, op, f"{mean:.2f}", va="center", fontsize=7, transform=edge)
    figure.supxlabel("time of the fastest baseline / time of ours")
    _figure.save(figure, arguments.out)


def _titles(cells):
    """The panel of each cell. An op whose gradients may be computed on the way forward has no
    backward pass of its own: both in one call stand in its place."""
    second = np.where(cells["part"] == TRAINING, TOGETHER, BACKWARD)
    return np.where(cells["pass"] == "forward", FORWARD, second)


def _borders(families):
    """Place a line between one family and the next; the first line is that of all cells."""
    names = ["", *families]
    return [line - 0.5 for line in range(1, len(names)) if names[line] != names[line - 1]]


def _dress(axes, title):
    axes.axvline(1, color="#222222", linewidth=0.9, zorder=0.9)
    axes.minorticks_off()
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_title(title, fontweight="bold", pad=13)
    top = axes.get_xaxis_transform()
    axes.text(0.97, 1.01, "\u2190 slower", ha="right", fontsize=7, transform=top)
    axes.text(1.03, 1.01, "ours faster \u2192", fontsize=7, transform=top)
    axes.text(1.02, 1.01, "mean", fontsize=7, transform=axes.transAxes)


if __name__ == "__main__":
    run(main, __doc__)

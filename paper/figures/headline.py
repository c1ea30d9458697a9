"""Ours against the fastest baseline of each cell, a line for each op: mean, range, single cells."""

import _figure
import numpy as np
from _data import fastest, rank, run
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

FORWARD, BACKWARD, TRAINING = "forward", "backward, or both in one call", "forward and backward"
ALL = "all cells"
RANGE, CELLS = "#8a8a8a", "#555555"
LINE = 0.165


def main(arguments):
    found = fastest(arguments.run)
    if found.empty:
        _figure.nothing(arguments.out, "This run compares ours with no baseline.")
        return
    place = rank(arguments.run)
    ops = found.drop_duplicates("op").sort_values(
        ["family", "op"], key=lambda names: names.map(lambda name: (place.get(name, 0), name))
    )
    titles = _titles(found)
    present = {title: found[titles == title] for title in (FORWARD, BACKWARD, TRAINING)}
    shown = {title: cells for title, cells in present.items() if len(cells)}
    with plt.rc_context(_figure.STYLE):
        size = (_figure.WIDTH, LINE * (len(ops) + 1) + 0.75)
        figure, panels = plt.subplots(
            1, len(shown), figsize=size, layout="constrained", sharey=True, squeeze=False
        )
        for axes, (title, cells) in zip(panels[0], shown.items(), strict=True):
            _line(axes, 0, cells)
            for line, op in enumerate(ops["op"], 1):
                _line(axes, line, cells[cells["op"] == op])
            for line in _borders(ops["family"]):
                axes.axhline(line, color="#dddddd", linewidth=0.6)
            _dress(axes, title)
        panels[0][0].set_xlim(found["ratio"].min() / 1.05, found["ratio"].max() * 1.05)
        for axes in panels[0][1:]:
            axes.sharex(panels[0][0])
        panels[0][0].set_yticks(range(len(ops) + 1), [ALL, *ops["op"]])
        panels[0][0].set_ylim(len(ops) + 0.5, -0.6)
        figure.supxlabel("time of the fastest baseline / time of ours", fontsize=7.5)
        _figure.save(figure, arguments.out)


def _titles(cells):
    """The panel of each cell. An op whose gradients may be computed on the way forward has no
    backward pass of its own: both in one call stand in its place."""
    backward = set(cells.loc[cells["pass"] == "backward", "op"])
    second = np.where(cells["op"].isin(backward) & (cells["pass"] == "both"), TRAINING, BACKWARD)
    return np.where(cells["pass"] == "forward", FORWARD, second)


def _borders(families):
    """Where one family ends and the next begins; the first line is that of all cells."""
    names = ["", *families]
    return [line - 0.5 for line in range(1, len(names)) if names[line] != names[line - 1]]


def _line(axes, line, cells):
    """The cells as strokes on their range, the geometric mean as a marker and in figures."""
    if cells.empty:
        return
    ratios = cells["ratio"]
    mean = np.exp(np.log(ratios).mean())
    axes.hlines(line, ratios.min(), ratios.max(), color=RANGE, linewidth=0.7)
    strokes = {"marker": "|", "markersize": 4.5, "markeredgewidth": 0.5, "linestyle": "none"}
    axes.plot(ratios, [line] * len(ratios), color=CELLS, alpha=0.7, **strokes)
    look = {"color": _figure.OURS_COLOUR, "marker": "D" if line == 0 else _figure.OURS_MARKER}
    axes.plot(mean, line, markersize=4.2, zorder=4, **look)
    edge = axes.get_yaxis_transform()
    axes.text(1.02, line, f"{mean:.2f}", va="center", fontsize=7, transform=edge)


def _dress(axes, title):
    axes.axvline(1, color="#222222", linewidth=0.9, zorder=2)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.set_title(title, fontweight="bold", pad=13)
    top = axes.get_xaxis_transform()
    axes.text(0.97, 1.01, "\u2190 slower", ha="right", fontsize=7, transform=top)
    axes.text(1.03, 1.01, "ours faster \u2192", fontsize=7, transform=top)
    axes.text(1.02, 1.01, "mean", fontsize=7, transform=axes.transAxes)


if __name__ == "__main__":
    run(main, __doc__)

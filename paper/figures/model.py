"""Networks: wall and GPU time of each stack over those of ours, for each call and preset."""

import _figure
import _network
import numpy as np
from _data import OURS, read, run
from _status import STATUSES

OPS = {
    "model_forward": "forward",
    "model_train_step": "training step",
    "model_decode": "prompt and decoding",
}
# The times, and what the axis below their panels says.
TIMES = {
    "call_us": "wall time of the stack over that of ours",
    "device_us": "GPU time of the stack over that of ours",
}
# Ticks of the ratios, as far as the ratios reach.
TICKS = (0.125, 0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6)


# A ratio above this one stands at the right edge, with its number.
FAR = 6


def main(arguments):
    rows = read(arguments.run, "network")
    rows = rows[rows["stack"].isin(_network.whole(rows["stack"]))]
    key = ["op", "case", "dtype"]
    ours = rows[rows["stack"] == OURS].set_index(key)[list(TIMES)].add_suffix("_ours")
    rows = rows.join(ours, on=key)
    for time in TIMES:
        rows[_ratio(time)] = rows[time] / rows[f"{time}_ours"]
    # A cell that the measurement did not reach says nothing of a stack.
    rows = rows[
        (rows["status"] != "unreached").groupby([rows[each] for each in key]).transform("any")
    ]
    if rows.empty:
        _figure.nothing(arguments.out, "This run has no times of a network.")
        return
    ops = [op for op in OPS if (rows["op"] == op).any()]
    lines = {op: list(dict.fromkeys(map(_line, _records(rows[rows["op"] == op])))) for op in ops}
    heights = [0.3 + 0.36 * len(lines[op]) for op in ops]
    figure, panels = _figure.plt.subplots(
        len(ops), len(TIMES), squeeze=False, sharex="col", sharey="row", height_ratios=heights,
        figsize=(_figure.WIDTH, sum(heights) + 0.75),
    )  # fmt: skip
    styles = _figure.looks(rows["stack"])
    for op, across in zip(ops, panels, strict=True):
        for time, axes in zip(TIMES, across, strict=True):
            _panel(axes, rows[rows["op"] == op], lines[op], styles, time)
            axes.set_title(OPS[op])
    for time, axes in zip(TIMES, panels[-1], strict=True):
        _scale(axes, rows[_ratio(time)], TIMES[time])
    _legend(figure, rows, styles)
    _figure.save(figure, arguments.out)


def _ratio(time):
    return f"{time}_ratio"


def _scale(axes, ratios, label):
    """A logarithmic axis with plain numbers, from a little below the least ratio to the most."""
    axes.set_xlabel(label)
    known = ratios[ratios > 0]
    if known.empty:
        axes.set_xticks([])
        return
    low, high = min(0.9, known.min() / 1.25), max(1.1, min(known.max(), FAR) * 1.15)
    ticks = [tick for tick in TICKS if low <= tick <= high]
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)


def _records(rows):
    return rows.to_dict("records")


def _line(row):
    return f"{row['preset']}\n{row['batch']} x {row['length']}"


def _panel(axes, rows, lines, styles, time):
    axes.axvline(1, **_figure.LIGHT)
    for row in _records(rows):
        stacks = _network.whole(rows["stack"])
        # Stacks of a line stand one below the other, so that equal speeds stay apart.
        shift = 0.6 * (stacks.index(row["stack"]) / max(1, len(stacks) - 1) - 0.5)
        place, look = lines.index(_line(row)) + shift, styles[row["stack"]]
        if row["status"] == "ok" and row[_ratio(time)] > 0:
            ratio = row[_ratio(time)]
            axes.plot(min(ratio, FAR), place, linestyle="none", markersize=4.5,
                      **{key: look[key] for key in ("color", "marker")})  # fmt: skip
            if ratio > FAR:
                axes.annotate(f"{ratio:.0f}", (FAR, place), xytext=(-5, 0), ha="right", va="center",
                              textcoords="offset points", fontsize="small")  # fmt: skip
        elif row["status"] != "ok":
            mark = {"marker": STATUSES[row["status"]].mark, "color": look["color"]}
            axes.plot(0.012, place, transform=axes.get_yaxis_transform(), markersize=5,
                      markeredgewidth=1.1, linestyle="none", clip_on=False, **mark)  # fmt: skip
    axes.set_yticks(np.arange(len(lines)), lines)
    axes.set_ylim(len(lines) - 0.5, -0.5)


def _legend(figure, rows, styles):
    entries = {
        name: {key: styles[name][key] for key in ("color", "marker")} | {"linestyle": "none"}
        for name in _network.whole(rows["stack"])
    }
    for status in sorted(set(rows["status"]) - {"ok"}):
        entries[status] = {"marker": STATUSES[status].mark, "color": _figure.DARK,
                           "linestyle": "none"}  # fmt: skip
    handles = [_figure.Line2D([], [], label=name, **look) for name, look in entries.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)


if __name__ == "__main__":
    run(main, __doc__)

"""Networks: the time of each stack over that of ours, for each call and preset."""

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


def main(arguments):
    rows = read(arguments.run, "network")
    rows = rows[rows["stack"].isin(_network.whole(rows["stack"]))]
    key = ["op", "case", "dtype"]
    ours = rows[rows["stack"] == OURS].set_index(key)["device_us"].rename("ours_us")
    rows = rows.join(ours, on=key)
    rows = rows.assign(ratio=rows["device_us"] / rows["ours_us"])
    # A cell that the measurement did not reach says nothing of a stack.
    rows = rows[
        (rows["status"] != "unreached").groupby([rows[each] for each in key]).transform("any")
    ]
    if rows.empty:
        _figure.nothing(arguments.out, "This run has no times of a network.")
        return
    ops = [op for op in OPS if (rows["op"] == op).any()]
    lines = {op: list(dict.fromkeys(map(_line, _records(rows[rows["op"] == op])))) for op in ops}
    heights = [0.3 + 0.28 * len(lines[op]) for op in ops]
    figure, panels = _figure.plt.subplots(
        len(ops), 1, squeeze=False, sharex=True, height_ratios=heights,
        figsize=(_figure.WIDTH, sum(heights) + 0.75),
    )  # fmt: skip
    styles = _figure.looks(rows["stack"])
    for op, axes in zip(ops, panels[:, 0], strict=True):
        _panel(axes, rows[rows["op"] == op], lines[op], styles)
        axes.set_title(OPS[op])
    panels[-1, 0].set_xlabel("time of the stack over that of ours")
    _legend(figure, rows, styles)
    _figure.save(figure, arguments.out)


def _records(rows):
    return rows.to_dict("records")


def _line(row):
    return f"{row['preset']}\n{row['batch']} x {row['length']}"


def _panel(axes, rows, lines, styles):
    axes.axvline(1, **_figure.LIGHT)
    for row in _records(rows):
        stacks = _network.whole(rows["stack"])
        # Stacks of a line stand one below the other, so that equal speeds stay apart.
        shift = 0.6 * (stacks.index(row["stack"]) / max(1, len(stacks) - 1) - 0.5)
        place, look = lines.index(_line(row)) + shift, styles[row["stack"]]
        if row["status"] == "ok" and row["ratio"] > 0:
            axes.plot(row["ratio"], place, linestyle="none", markersize=4.5,
                      **{key: look[key] for key in ("color", "marker")})  # fmt: skip
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

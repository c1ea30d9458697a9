"""Peak memory of a training step over the length of its sequence, until memory runs out."""

import _figure
import _network
from _data import read, run
from _status import STATUSES


def main(arguments):
    rows = read(arguments.run, "step_memory")
    if not (rows["peak_mem_bytes"] > 0).any():
        _figure.nothing(arguments.out, "This run has no memory of a step.")
        return
    figure, axes = _figure.plt.subplots(figsize=(_figure.WIDTH, 2.4))
    styles = _figure.looks(rows["stack"])
    stacks = _network.whole(rows["stack"])
    for stack in stacks[::-1]:
        look = {key: styles[stack][key] for key in ("color", "marker")}
        cells = rows[(rows["stack"] == stack) & (rows["status"] == "ok")].sort_values("length")
        axes.plot(cells["length"], cells["peak_mem_bytes"] / 2**30, label=stack, **look)
    failed = rows[rows["status"] != "ok"]
    without = _network.whole(failed["stack"])
    for row in failed.to_dict("records"):
        mark = {"marker": STATUSES[row["status"]].mark, "color": styles[row["stack"]]["color"]}
        # One below the other at the upper edge: several may fail at one length.
        place = 0.96 - 0.06 * without.index(row["stack"])
        axes.plot(row["length"], place, transform=axes.get_xaxis_transform(), linestyle="none",
                  markersize=6, markeredgewidth=1.2, **mark)  # fmt: skip
    lengths = sorted(set(rows["length"]))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:g}" for length in lengths])
    axes.set(
        xlabel="tokens of the sequence",
        ylabel="GiB at the peak",
        ylim=(0, 1.25 * rows["peak_mem_bytes"].max() / 2**30),
    )
    axes.set_title(f"{rows.iloc[0]['preset']}, 1 sequence, {rows.iloc[0]['dtype']}")
    handles, labels = axes.get_legend_handles_labels()
    handles += [
        _figure.Line2D([], [], color=_figure.DARK, linestyle="none", marker=STATUSES[name].mark)
        for name in sorted(set(failed["status"]))
    ]
    labels += sorted(set(failed["status"]))
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    _figure.save(figure, arguments.out)


if __name__ == "__main__":
    run(main, __doc__)

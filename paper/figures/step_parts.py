"""The time of each part of a training step, a bar for each stack."""

import _figure
import _network
from _data import read, run


def main(arguments):
    rows = read(arguments.run, "step_parts")
    rows = rows[rows["status"] == "ok"]
    if rows.empty:
        _figure.nothing(arguments.out, "This run has no profile of a step.")
        return
    stacks = _network.whole(rows["stack"])[::-1]
    parts = _network.parts_in_order(rows["part"])
    figure, axes = _figure.plt.subplots(figsize=(_figure.WIDTH, 0.85 + 0.36 * len(stacks)))
    ends = dict.fromkeys(stacks, 0.0)
    for part in parts:
        for way, edge in (("forward", None), ("backward", "//////")):
            found = rows[(rows["part"] == part) & (rows["pass"] == way)]
            for stack, us in zip(found["stack"], found["us"], strict=True):
                axes.barh(stacks.index(stack), us / 1e3, left=ends[stack], height=0.62,
                          color=_network.colour(part), hatch=edge, edgecolor="white",
                          linewidth=0.3)  # fmt: skip
                ends[stack] += us / 1e3
    for number, stack in enumerate(stacks):
        whole = rows.loc[rows["stack"] == stack, "step_us"].iloc[0] / 1e3
        axes.plot([whole] * 2, [number - 0.38, number + 0.38], marker="",
                  color=_figure.DARK, linewidth=1.4)  # fmt: skip
    axes.set_yticks(range(len(stacks)), stacks)
    axes.set(xlabel="ms", xlim=(0, None), title=_network.about_times(rows))
    handles = [
        _figure.plt.Rectangle((0, 0), 1, 1, color=_network.colour(part), label=part)
        for part in parts
    ]
    hatched = {"facecolor": "#bbbbbb", "hatch": "//////", "edgecolor": "white"}
    handles.append(_figure.plt.Rectangle((0, 0), 1, 1, label="backward", **hatched))
    handles.append(
        _figure.Line2D([], [], marker="", color=_figure.DARK, label="step, without profiler")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    _figure.save(figure, arguments.out)


if __name__ == "__main__":
    run(main, __doc__)

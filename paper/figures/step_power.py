"""Steps one after the other from a rest on: the time of each, and the power of the board."""

import _figure
import _network
import pandas as pd
from _data import read, run

# Training steps in a window of power, and the period of the board's counter.
WINDOW, COUNTER_S = 8, 0.1


def main(arguments):
    rows = read(arguments.run, "step_power")
    rows = rows[rows["status"] == "ok"]
    if rows.empty:
        _figure.nothing(arguments.out, "This run has no steps from a rest on.")
        return
    figure, (left, right) = _figure.plt.subplots(
        1, 2, sharex=True, figsize=(_figure.WIDTH, 2.2), layout="constrained"
    )
    styles = _figure.looks(rows["stack"])
    stacks = _network.whole(rows["stack"])
    for number, stack in enumerate(stacks):
        steps = rows[rows["stack"] == stack].sort_values("call")
        look = {"color": styles[stack]["color"], "label": stack, "marker": ".", "markersize": 3}
        left.plot(steps["at_s"], steps["us"] / 1e3, **look)
        found = power(steps)
        # Points of one window stand side by side, so that their bars stay apart.
        place = (number + 1) / (len(stacks) + 1)
        middle = found["begin_s"] + place * (found["end_s"] - found["begin_s"])
        right.errorbar(middle, found["watts"], found["off"], linestyle="none", elinewidth=1, **look)
    left.set(xlabel="s since the first step began", ylabel="ms for a step")
    right.set(xlabel="s since the first step began", ylabel="W")
    size = _figure.mpl.rcParams["axes.titlesize"]
    figure.suptitle(_network.about_times(rows), fontsize=size)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    _figure.save(figure, arguments.out)


def power(steps):
    """Return begin, end, W and the error in W of each window, one behind the other.

    A reading of the counter is up to one period old. The last reading is left out: no step runs
    meanwhile, so it comes earlier than the others.
    """
    known = steps.dropna(subset="energy_j").iloc[:-1]
    ends = known.iloc[::WINDOW]
    spans = ends[["at_s", "energy_j"]].diff()
    watts = spans["energy_j"] / spans["at_s"]
    found = {"begin_s": ends["at_s"] - spans["at_s"], "end_s": ends["at_s"], "watts": watts}
    return pd.DataFrame(found | {"off": watts * COUNTER_S / spans["at_s"]}).iloc[1:]


if __name__ == "__main__":
    run(main, __doc__)

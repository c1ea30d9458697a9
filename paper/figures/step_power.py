"""Steps one after the other from a rest on: the time of each, and the power of the board."""

import _figure
import _network
from _data import read, run

# Steps over which the power is taken; the counter of the energy moves in steps of its own.
WINDOW = 4


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
    for stack in _network.whole(rows["stack"])[::-1]:
        steps = rows[rows["stack"] == stack].sort_values("call")
        look = {"color": styles[stack]["color"], "label": stack, "marker": ".", "markersize": 3}
        left.plot(steps["at_s"], steps["us"] / 1e3, **look)
        watts = power(steps)
        right.plot(watts.index, watts, **look)
    left.set(xlabel="s since the first step began", ylabel="ms for a step")
    right.set(xlabel="s since the first step began", ylabel="W")
    figure.suptitle(_network.about_times(rows))
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    _figure.save(figure, arguments.out)


def power(steps):
    """Return the power in W over windows of steps, by the second at which each window ends."""
    steps = steps.set_index("at_s")["energy_j"].dropna()
    joules, seconds = steps.diff(WINDOW), steps.index.to_series().diff(WINDOW)
    return (joules / seconds).dropna()


if __name__ == "__main__":
    run(main, __doc__)

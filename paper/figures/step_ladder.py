"""Parts of ours put in one after the other: the time of a step, and what their own times predict.

The prediction is Amdahl's: each part takes its share of the step with PyTorch's parts, over the
factor by which ours is faster alone.
"""

import _figure
import _network
import numpy as np
from _data import OURS, read, run

EAGER = "torch_eager"


def main(arguments):
    rows = read(arguments.run, "step_ladder")
    rows = rows[(rows["status"] == "ok") & (rows["over"] == EAGER)]
    if rows.empty:
        _figure.nothing(arguments.out, "This run has no ladder of parts.")
        return
    measured = rows.groupby("rung")["us"].agg(["median", "min", "max"]) / 1e3
    names = rows.drop_duplicates("rung").set_index("rung")["part"].reindex(measured.index)
    labels = ["all of PyTorch", *(f"+ {part}" for part in names.iloc[1:])]
    figure, axes = _figure.plt.subplots(figsize=(_figure.WIDTH, 0.7 + 0.24 * len(measured)))
    places = range(len(measured))
    axes.barh(places, measured["median"], height=0.6, color=_figure.OURS_COLOUR, alpha=0.75,
              label="measured")  # fmt: skip
    axes.hlines(places, measured["min"], measured["max"], color=_figure.DARK, linewidth=1)
    predicted = prediction(
        measured["median"], names, read(arguments.run, "step_parts"),
        read(arguments.run, "parts_alone"), rows.iloc[0],
    )  # fmt: skip
    if predicted is not None:
        axes.plot(predicted, places, "D", color=_figure.DARK, markersize=4, linestyle="none",
                  label="predicted from the parts alone")  # fmt: skip
        for place, (found, said) in enumerate(zip(measured["median"], predicted, strict=True)):
            if place and said == said:
                axes.annotate(f"{found / said - 1:+.1%}", (max(found, said), place), xytext=(6, 0),
                              textcoords="offset points", va="center")  # fmt: skip
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set(xlabel="ms for a step", title=_network.about_times(rows))
    figure.legend(loc="outside lower center", ncols=2)
    _figure.save(figure, arguments.out)


def prediction(measured, names, parts, alone, network):
    """The times of the rungs that the parts alone predict, in ms; None without any.

    From the first part on that was not timed alone they are NaN.

    - measured: ms by rung.
    - names: the part that each rung adds.
    - parts: profiles of a step.
    - alone: times of parts by themselves.
    - network: a row of the ladder. Times of another network or on another kind of GPU say nothing.
    """
    keys = ["preset", "batch", "length", "dtype", "gpu"]
    parts, alone = (
        rows[(rows[keys] == network[keys]).all(axis=1) & (rows["status"] == "ok")]
        for rows in (parts, alone)
    )
    # The optimizer's own time alone holds clipping: some optimizers clip by themselves.
    parts = parts[parts["stack"] == EAGER].replace({"part": {"clip": "optimizer"}})
    share = parts.groupby("part")["us"].sum() / 1e3
    both = alone.pivot_table(index="part", columns="stack", values="us")
    if share.empty or not {EAGER, OURS} <= set(both):
        return None
    saved = (share * (1 - both[OURS] / both[EAGER])).reindex(names.iloc[1:])
    predicted = measured.iloc[0] - np.cumsum([0.0, *saved])
    return None if np.isnan(predicted[1:]).all() else predicted


if __name__ == "__main__":
    run(main, __doc__)

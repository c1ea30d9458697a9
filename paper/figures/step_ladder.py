"""Parts of ours put in one after the other: the time of a step, and what their own times predict.

The prediction is Amdahl's: each part takes its share of the step with PyTorch's parts, over the
factor by which ours is faster alone.
"""

import _figure
import _network
import pandas as pd
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
            if place:
                axes.annotate(f"{found / said - 1:+.0%}", (max(found, said), place), xytext=(6, 0),
                              textcoords="offset points", va="center")  # fmt: skip
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set(xlabel="ms for a step", title=_network.about(rows))
    figure.legend(loc="outside lower center", ncols=2)
    _figure.save(figure, arguments.out)


def prediction(measured, names, parts, alone, network):
    """The times of all rungs that the parts alone predict, in ms; None if a part is not known.

    - measured: ms by rung.
    - names: the part that each rung adds.
    - parts: profiles of a step.
    - alone: times of parts by themselves.
    - network: a row of the network that the ladder is about.
    """
    keys = ["preset", "batch", "length", "dtype"]
    parts, alone = (
        rows[(rows[keys] == network[keys]).all(axis=1) & (rows["status"] == "ok")]
        for rows in (parts, alone)
    )
    share = parts[parts["stack"] == EAGER].groupby("part")["us"].sum() / 1e3
    both = alone.pivot_table(index="part", columns="stack", values="us")
    wanted = list(names.iloc[1:])
    if not {EAGER, OURS} <= set(both) or not set(wanted) <= set(both.index) & set(share.index):
        return None
    gain = both[EAGER] / both[OURS]
    saved = pd.Series([0.0, *(share[part] * (1 - 1 / gain[part]) for part in wanted)])
    return (measured.iloc[0] - saved.cumsum()).to_numpy()


if __name__ == "__main__":
    run(main, __doc__)

"""Which kinds of kernels each library ships, beside ours: a dot for each, its area their number."""

import _figure
import seaborn.objects as so
from _data import OURS, kernels, run
from matplotlib import pyplot as plt

# Area of the largest dot, in square points.
AREA = 260
LIBRARY_COLOUR, SHADE = "#56799a", "#f6e3e6"


def main(arguments):
    counts = kernels(arguments.run).groupby(["library", "category"]).size().unstack(fill_value=0)
    libraries = _figure.in_order(counts.index)
    own = counts.reindex([OURS], fill_value=0).loc[OURS]
    categories = sorted(
        counts.columns, key=lambda name: (name == "other", own[name] == 0, -counts[name].sum())
    )
    dots = counts.stack().rename("number").loc[lambda number: number > 0].reset_index()
    dots["size"] = (AREA * dots["number"] / dots["number"].max() + 3) ** 0.5
    dots["ours"] = dots["library"] == OURS
    figure = plt.figure(figsize=(_figure.WIDTH, 0.26 * len(libraries) + 0.8))
    (
        so.Plot(dots, x="category", y="library")
        .add(so.Dot(edgewidth=0), pointsize="size", color="ours", legend=False)
        .scale(x=so.Nominal(order=categories), y=so.Nominal(order=libraries), pointsize=None)
        .scale(color={True: _figure.OURS_COLOUR, False: LIBRARY_COLOUR})
        .label(x="", y="")
        .on(figure)
        .plot()
    )
    (axes,) = figure.axes
    for column, category in enumerate(categories):
        if own[category]:
            axes.axvspan(column - 0.5, column + 0.5, color=SHADE, linewidth=0, zorder=0)
    # Seaborn's text has one distance for all marks; here it grows with the dot.
    for dot in dots.itertuples():
        style = {"textcoords": "offset points", "va": "center", "fontsize": 6.5}
        axes.annotate(str(dot.number), (dot.category, dot.library), (dot.size / 2 + 2, 0), **style)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    plt.setp(axes.get_xticklabels(), rotation=30, ha="left")
    axes.spines[:].set_visible(False)
    axes.grid(visible=True)
    axes.set_xlim(-0.5, len(categories) - 0.2)
    _figure.save(figure, arguments.out)


if __name__ == "__main__":
    run(main, __doc__)

"""Which kinds of kernels each library ships, beside ours: a dot for each, its area their number."""

import _figure
from _data import OURS, kernels, run
from matplotlib import pyplot as plt

# Of the largest dot, in square points.
AREA = 260
LIBRARY_COLOUR, SHADE = "#56799a", "#f6e3e6"


def main(arguments):
    counts = kernels(arguments.run).groupby(["library", "category"]).size().unstack(fill_value=0)
    libraries = _figure.in_order(counts.index)
    own = counts.reindex([OURS], fill_value=0).loc[OURS]
    categories = sorted(
        counts.columns, key=lambda name: (name == "other", own[name] == 0, -counts[name].sum())
    )
    most = counts.to_numpy().max()
    with plt.rc_context(_figure.STYLE):
        size = (_figure.WIDTH, 0.26 * len(libraries) + 0.8)
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        for column, category in enumerate(categories):
            if own[category]:
                axes.axvspan(column - 0.5, column + 0.5, color=SHADE, linewidth=0, zorder=0)
            for row, library in enumerate(libraries):
                colour = _figure.OURS_COLOUR if library == OURS else LIBRARY_COLOUR
                _dot(axes, column, row, counts.loc[library, category], AREA / most, colour)
        axes.set_xticks(range(len(categories)), categories, rotation=30, ha="left")
        axes.set_yticks(range(len(libraries)), libraries)
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlim(-0.5, len(categories) - 0.2)
        axes.set_ylim(len(libraries) - 0.4, -0.6)
        _figure.save(figure, arguments.out)


def _dot(axes, column, row, number, area, colour):
    if number:
        axes.scatter(column, row, s=area * number + 3, color=colour, linewidth=0, zorder=2)
        beside = (0.5 * (area * number + 3) ** 0.5 + 2, 0)
        style = {"textcoords": "offset points", "va": "center", "fontsize": 6.5}
        axes.annotate(str(number), (column, row), beside, **style)


if __name__ == "__main__":
    run(main, __doc__)

"""Attention over the sequence length: time and memory of a call, until memory runs out.

Scores that are stored grow with the square of the length, and so does the memory of a call. The
cases hold the number of tokens constant, so the inputs and the result have one size at all lengths.
"""

import itertools

import _figure
import seaborn as sns
from _data import run, summary
from _status import STATUSES

DTYPE, HEAD, PASSES = "bfloat16", 128, ("forward", "both")
ROWS = {"device_us": ("ms", 1e3), "peak_mem_bytes": ("GiB at the peak", 2**30)}


def main(arguments):
    every = summary(arguments.run)
    rows = _plain(every)
    if rows["peak_mem_bytes"].isna().all():
        _figure.nothing(arguments.out, "This run has no memory of attention.")
        return
    styles = _figure.looks(every["impl"])
    order = _figure.in_order(rows["impl"])[::-1]
    found = set(zip(rows["pass"], rows["flags"], strict=True))
    columns = sorted(found, key=lambda column: (PASSES.index(column[0]), column[1]))
    figure, grid = _figure.plt.subplots(
        len(ROWS), len(columns), figsize=(_figure.WIDTH, 4.2), sharex=True, sharey="row",
        squeeze=False,
    )  # fmt: skip
    for (quantity, column), axes in zip(itertools.product(ROWS, columns), grid.flat, strict=True):
        unit, divisor = ROWS[quantity]
        cells = rows[(rows["pass"] == column[0]) & (rows["flags"] == column[1])]
        _curves(axes, cells.assign(y=cells[quantity] / divisor), order, styles)
        axes.set(ylabel=unit if column == columns[0] else "", xlabel="")
        if quantity == next(iter(ROWS)):
            axes.set_title(" ".join(filter(None, column)))
        else:
            axes.set_xlabel("sequence length S")
    lengths = sorted(set(rows["size_S"]))
    grid[0, 0].set_xticks(lengths, [f"{length:g}" for length in lengths], rotation=30)
    _legend(figure, rows, styles)
    _figure.save(figure, arguments.out)


def _plain(every):
    """Square attention of one head and dtype, without grouped heads, windows or masks."""
    rows = every[(every["family"] == "attention") & (every["set"] == "grid")]
    if rows.empty:
        return rows
    rows = rows[(rows["dtype"] == DTYPE) & (rows["size_D"] == HEAD)]
    rows = rows[rows["pass"].isin(PASSES) & rows["flags"].isin(("", "causal"))]
    for letter in "KTW":
        size = rows.get(f"size_{letter}")
        rows = rows if size is None else rows[size.isna()]
    # As many tokens at each length.
    tokens = rows["size_B"] * rows["size_S"]
    return rows[tokens == tokens.mode().max()] if len(rows) else rows


def _curves(axes, cells, order, styles):
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    known = cells[(cells["status"] == "ok") & cells["y"].notna()]
    for impl in order:
        look = {"linestyle": "-", "markeredgecolor": styles[impl]["color"]} | styles[impl]
        sns.lineplot(known[known["impl"] == impl], x="size_S", y="y", errorbar=None, ax=axes,
                     linewidth=1.6 if impl == _figure.OURS else 1.1, **look)  # fmt: skip
    lost = cells[cells["status"] == "oom"]
    # One below the other at the upper edge: several may run out of memory at one length.
    places = _figure.in_order(lost["impl"])
    for row in lost.to_dict("records"):
        axes.plot(row["size_S"], 0.95 - 0.06 * places.index(row["impl"]),
                  transform=axes.get_xaxis_transform(),
                  **_mark(styles[row["impl"]]["color"]))  # fmt: skip


def _mark(colour):
    return {
        "marker": STATUSES["oom"].mark, "color": colour, "linestyle": "none", "markersize": 6,
        "markeredgewidth": 1.2,
    }  # fmt: skip


def _legend(figure, rows, styles):
    entries = {impl: styles[impl] for impl in _figure.in_order(rows["impl"])}
    if (rows["status"] == "oom").any():
        entries["oom"] = _mark(_figure.DARK)
    handles = [_figure.Line2D([], [], label=name, **look) for name, look in entries.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, columnspacing=1.2)


if __name__ == "__main__":
    run(main, __doc__)

"""Give figures their common parts: style, colours of implementations, panels of rate over size.

Seaborn draws the panels, curves, intervals and cells. Matplotlib draws what seaborn has no mark
for: signs at the edge of a panel, in parts of its height, and a legend over several plots.
"""

import itertools
import math
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import seaborn.objects as so

sys.path.append(str(Path(__file__).parents[1]))
from _data import EMPTY, EVENTS, OURS, natural, whole_file
from _status import STATUSES

mpl.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

# Preferences of a user or a machine must not show in a figure of the paper.
mpl.rcdefaults()
mpl.style.use(Path(__file__).parents[1] / "tilewright.mplstyle")
so.Plot.config.theme.update(mpl.rcParams)

WIDTH = mpl.rcParams["figure.figsize"][0]
OURS_COLOUR, DARK = "#c8102e", "#333333"
BASELINES = list(mpl.rcParams["axes.prop_cycle"])
HOLLOW = {"markerfacecolor": "white", "markeredgewidth": 0.8, "linestyle": (0, (4, 1.5))}
PANEL_INCHES = 1.05
# A panel of more curves than this is higher.
MANY = 8
LEGEND_COLUMNS = 5
# The rate that tells of a cell, by what bounds it, and the unit of each.
RATES = {"compute": "tflops", "memory": "gbps"}
UNITS = {"gbps": "GB/s", "tflops": "TFLOP/s"}
# Inches that a letter of the legend takes, and a mark with the gaps around it.
LETTER, MARK = 0.057, 0.41
LIGHT = {"color": DARK, "linestyle": "--", "linewidth": 0.8}
# A time by events has a ring around its mark, because the host's work is in it.
RING, RING_SIZE, RING_WIDTH = "o", 7.5, 0.6
BY_EVENTS = "timed by events, host included"


def looks(impls: Iterable[str]) -> dict[str, dict]:
    """Colour and marker of each implementation, from its name; a taken one gives way to the next.

    If all are taken, they come once more, with hollow markers and dashed lines. Hand it all
    implementations of a run, so that all figures of the run agree.
    """
    found, taken, face = {}, set(), {}
    for impl in sorted(set(impls)):
        if impl == OURS:
            found[impl] = {"color": OURS_COLOUR, "marker": "o"}
            continue
        if len(taken) == len(BASELINES):
            taken, face = set(), HOLLOW
        index = zlib.crc32(impl.encode()) % len(BASELINES)
        while index in taken:
            index = (index + 1) % len(BASELINES)
        taken.add(index)
        found[impl] = BASELINES[index] | face
    return found


def in_order(impls: Iterable[str]) -> list[str]:
    """Ours first, the others by name."""
    return sorted(set(impls), key=lambda impl: (impl != OURS, impl))


def save(figure: Figure, out: Path, title: str = "") -> None:
    """Writes the PDF and the SVG beside it, without dates: the same data gives the same bytes.

    title: of the documents, which readers of the figure do not see.
    """
    named = {"Title": title} if title else {}
    # The layout differs in its last bits from run to run, and names in the SVG depend on them.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for part in figure.subfigs:
        part.bbox_relative.set_points(part.bbox_relative.get_points().round(4))
    for axes in figure.axes:
        axes.set_position([round(edge, 4) for edge in axes.get_position().bounds])
    for path, metadata in (
        (out.with_suffix(".pdf"), named | {"CreationDate": None}),
        (out.with_suffix(".svg"), named | {"Date": None}),
    ):
        with whole_file(path) as temporary:
            figure.savefig(temporary, format=path.suffix[1:], metadata=metadata)
    plt.close(figure)


def nothing(out: Path, message: str) -> None:
    """A figure of a run that has no rows for it: says so; the paper does not include it."""
    figure = plt.figure(figsize=(WIDTH, 0.5))
    figure.text(0.5, 0.5, message, ha="center", va="center")
    save(figure, out, EMPTY)


def family(
    every: pd.DataFrame,
    rows: pd.DataFrame,
    out: Path,
    *,
    x: Callable[[pd.DataFrame], pd.Series],
    label: str,
    rate: str,
    down: str,
    across: str,
    fixed: tuple[str, ...] = (),
    sharey: bool | str = True,
    ratios: bool = False,
) -> None:
    """Rate over size, a panel for each value of the columns `down` and `across`.

    - every: the summary of all families, for the colours.
    - rows: those to draw.
    - x: the size of each row on a log2 axis, NaN where a case is not on the curve.
    - rate: "gbps" or "tflops"; "" for cells that are on no curve: each by what bounds it.
    - fixed: columns that must agree along a curve; the longest such curve of a panel is drawn.
      Cases that are on no curve of at least three sizes are drawn below, one a line.
    - sharey: as seaborn has it.
    - ratios: whether further panels show the time of each baseline over that of ours along the same
      curves.
    """
    rows = _offered(rows[rows["set"] == "grid"])
    if rows.empty:
        nothing(out, "This run holds no rows for this figure.")
        return
    rates = [(rate, rows)]
    if not rate:
        rates = [(RATES[bound], some) for bound, some in rows.groupby("bound", sort=True)]
    rows = pd.concat(
        some.assign(x=x(some), rate=name, sol=some[name] * some["pct_sol"].rdiv(100))
        for name, some in rates
    )
    curves = _on_a_curve(rows, [down, across], list(fixed))
    lone = rows.drop(curves.index)
    parts = []
    if len(curves):
        panels, lines = (down, across, label), curves[down].nunique()
        high = ratios or curves["impl"].nunique() > MANY
        height = PANEL_INCHES * (1.2 if high else 1) * lines + 0.35
        parts.append((height, _rates, (curves, panels, rate, UNITS[rate], sharey)))
        if ratios:
            parts.append((0.8 * PANEL_INCHES * lines + 0.35, _ratios, (curves, panels)))
    if len(lone):
        lone = lone.assign(
            line=_lines(lone, [n for n in ("op", "pass", "dtype") if rows[n].nunique() > 1])
        )
        for each, cells in lone.groupby("rate", sort=True):
            height = 0.14 * cells["line"].nunique() + 0.5
            parts.append((height, _lone, (cells, each, UNITS[each])))
    styles = looks(every["impl"])
    entries = _entries(rows, styles)
    columns = _columns(list(entries))
    heights = [*(height for height, *_ in parts), 0.1 + 0.14 * math.ceil(len(entries) / columns)]
    figure = plt.figure(figsize=(WIDTH, sum(heights)))
    *places, last = figure.subfigures(len(heights), 1, height_ratios=heights)
    for place, (_, draw, given) in zip(places, parts, strict=True):
        draw(place, styles, *given)
    handles = [Line2D([], [], label=name, **look) for name, look in entries.items()]
    last.legend(handles=handles, loc="center", ncols=columns, columnspacing=1.2)
    save(figure, out)


def over_rows(every: pd.DataFrame, name: str, out: Path) -> None:
    """The figure of a family whose cases are M rows of length N: GB/s by pass and dtype."""
    family(
        every,
        every[every["family"] == name],
        out,
        x=lambda cells: cells["size_N"],
        label="row length N",
        rate="gbps",
        down="pass",
        across="dtype",
        fixed=("size_M", "flags"),
    )


def by_cell(every: pd.DataFrame, names: Collection[str], out: Path) -> None:
    """The figure of families whose cases are on no curve: a line for each, by what bounds it."""
    family(
        every,
        every[every["family"].isin(names)],
        out,
        x=lambda cells: pd.Series(float("nan"), cells.index),
        label="",
        rate="",
        down="pass",
        across="dtype",
    )


def _offered(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the passes of ops that nobody offers, as where a gradient is but a view."""
    passes = rows.groupby(["op", "pass"])["status"]
    return rows[~passes.transform(lambda found: (found == "unsupported").all()).astype(bool)]


def _on_a_curve(rows: pd.DataFrame, panel: list[str], fixed: list[str]) -> pd.DataFrame:
    keep = []
    for _, cells in rows[rows["x"].notna()].groupby(["op", *panel], sort=True):
        groups = cells.groupby(fixed, sort=True) if fixed else [((), cells)]
        _, longest = max(groups, key=lambda group: group[1]["x"].nunique())
        if longest["x"].nunique() >= 3:
            keep.append(longest)
    return pd.concat(keep) if keep else rows.iloc[:0]


def _panels(
    figure: SubFigure,
    styles: Mapping[str, dict],
    rows: pd.DataFrame,
    panels: tuple[str, str, str],
    unit: str,
    sharey: bool | str = True,
    light: pd.DataFrame | None = None,
) -> dict[tuple[str, str], Axes]:
    """Curves of the column `y` over x in the band from `low` to `high`, which are given: seaborn
    would estimate intervals of its own. The axes by the values of the two columns."""
    down, across, label = panels
    downs, acrosses = (sorted(rows[name].unique(), key=natural) for name in (down, across))
    plot = (
        so.Plot(rows, x="x", y="y", group="op")
        .facet(across, down, order={"col": acrosses, "row": downs})
        .share(x=True, y=sharey)
        .scale(x=so.Continuous(trans="log2").tick(upto=7 if len(acrosses) < 3 else 4))
        .scale(y=so.Continuous().tick(upto=4))
        .label(x="", y="")
        .limit(y=(0 if light is not None else None, None))
    )
    if light is not None:
        plot = plot.add(so.Line(**LIGHT), y="sol", group=None, data=light)
    for impl in reversed(in_order(rows["impl"])):
        cells, look = rows[(rows["impl"] == impl) & rows["y"].notna()], styles[impl]
        line = {"fillcolor": look.get("markerfacecolor", look["color"])}
        line |= {name: look[name] for name in ("color", "marker", "linestyle") if name in look}
        band = so.Band(color=look["color"], alpha=0.25, edgewidth=0)
        plot = plot.add(band, ymin="low", ymax="high", data=cells)
        plot = plot.add(so.Line(linewidth=1.6 if impl == OURS else 1.1, **line), data=cells)
    _ringed(plot, rows).on(figure).plot()
    places = dict(zip(itertools.product(downs, acrosses), figure.axes, strict=True))
    for (row, column), axes in places.items():
        axes.set_title(_name(across, column) if row == downs[0] else "")
        if column == acrosses[-1] and len(downs) > 1:
            place = {"xycoords": "axes fraction", "rotation": 270, "va": "center"}
            axes.annotate(_name(down, row), (1.02, 0.5), **place)
    figure.supxlabel(label)
    figure.supylabel(unit)
    return places


def _rates(
    figure: SubFigure,
    styles: Mapping[str, dict],
    rows: pd.DataFrame,
    panels: tuple[str, str, str],
    rate: str,
    unit: str,
    sharey: bool | str,
) -> None:
    y = rows[rate].where(rows["status"] == "ok")
    low, high = (y * rows["device_us"] / rows[end] for end in ("ci_hi", "ci_lo"))
    rows = rows.assign(y=y, low=low, high=high)
    light = (
        rows.dropna(subset="sol")
        .sort_values("sol")
        .drop_duplicates([*panels[:2], "x"], keep="last")
    )
    places = _panels(figure, styles, rows, panels, unit, sharey, light)
    for row in _without_time(rows, list(panels[:2])).to_dict("records"):
        axes = places[row[panels[0]], row[panels[1]]]
        mark = _mark(row["status"], styles[row["impl"]]["color"])
        axes.plot(
            row["x"], 0.04 + 0.07 * row["place"], transform=axes.get_xaxis_transform(), **mark
        )


def _ratios(
    figure: SubFigure, styles: Mapping[str, dict], rows: pd.DataFrame, panels: tuple[str, str, str]
) -> None:
    known = (rows["status"] == "ok") & (rows["timed_by"] != EVENTS)
    names = ("speedup_vs_ours", "speedup_vs_ours_hi", "speedup_vs_ours_lo")
    y, low, high = (1 / rows[name].where(known) for name in names)
    rows = rows.assign(y=y, low=low, high=high)
    for axes in _panels(figure, styles, rows, panels, "baseline / ours").values():
        axes.axhline(1, color=OURS_COLOUR, linewidth=1.2)


def _lines(rows: pd.DataFrame, varying: list[str]) -> pd.Series:
    """The name of each cell: the columns that tell the cells of a figure apart, and its case."""
    names = rows.assign(case=rows["case"].map(_spaced))
    return names[[*varying, "case"]].agg(" ".join, axis=1)


def _lone(
    figure: SubFigure, styles: Mapping[str, dict], rows: pd.DataFrame, rate: str, unit: str
) -> None:
    cells = rows.drop_duplicates("line").to_dict("records")
    order = sorted(cells, key=lambda cell: (natural(cell["op"]), natural(cell["pass"])))
    order = [cell["line"] for cell in order]
    rows = rows.assign(y=rows[rate].where(rows["status"] == "ok"))
    light = rows.dropna(subset="sol").sort_values("sol").drop_duplicates("line", keep="last")
    plot = so.Plot(rows, x="y", y="line").scale(y=so.Nominal(order=order)).limit(x=(0, None))
    plot = plot.label(x=unit, y="")
    plot = plot.add(so.Dash(color=DARK, width=0.8, linewidth=0.8), x="sol", data=light)
    for impl in reversed(in_order(rows["impl"])):
        look = styles[impl]
        face = {"color": look.get("markerfacecolor", look["color"]), "edgecolor": look["color"]}
        dot = so.Dot({"zorder": 3}, marker=look["marker"], pointsize=4, edgewidth=0.8, **face)
        plot = plot.add(dot, data=rows[rows["impl"] == impl])
    _ringed(plot, rows).on(figure).plot()
    (axes,) = figure.axes
    for row in _without_time(rows, ["line"]).to_dict("records"):
        mark = _mark(row["status"], styles[row["impl"]]["color"])
        place = 0.015 * (row["place"] + 1), order.index(row["line"])
        axes.plot(*place, transform=axes.get_yaxis_transform(), scaley=False, **mark)


def _ringed(plot: so.Plot, rows: pd.DataFrame) -> so.Plot:
    ring = {"marker": RING, "pointsize": RING_SIZE, "stroke": RING_WIDTH, "fill": False}
    dot = so.Dot({"zorder": 5}, color=DARK, **ring)
    return plot.add(dot, data=rows[rows["timed_by"] == EVENTS])


def _without_time(rows: pd.DataFrame, group: list[str]) -> pd.DataFrame:
    """Rows without a time; `place`: that of the implementation among those of the group."""
    missing = rows[rows["status"] != "ok"]
    place = missing.groupby(group)["impl"].transform(
        lambda impls: impls.map(in_order(impls)[::-1].index)
    )
    return missing.assign(place=place)


def _mark(status: str, colour: str) -> dict:
    return {
        "marker": STATUSES[status].mark,
        "color": colour,
        "linestyle": "none",
        "markersize": 5,
        "markeredgewidth": 1.1,
        "clip_on": False,
    }


def _entries(rows: pd.DataFrame, styles: Mapping[str, dict]) -> dict[str, dict]:
    """The names in the legend, and how each is drawn."""
    entries = {impl: styles[impl] for impl in in_order(rows["impl"])}
    if rows["sol"].notna().any():
        entries["speed of light"] = LIGHT
    if (rows["timed_by"] == EVENTS).any():
        entries[BY_EVENTS] = {
            "marker": RING, "markersize": RING_SIZE, "markerfacecolor": "none",
            "markeredgecolor": DARK, "markeredgewidth": RING_WIDTH, "linestyle": "none",
        }  # fmt: skip
    for status in sorted(set(rows["status"]) - {"ok"}):
        entries[status] = _mark(status, DARK)
    return entries


def _columns(names: list[str]) -> int:
    """How many columns of a legend fit: the longest name of each, and its mark, set its width."""
    for columns in range(LEGEND_COLUMNS, 1, -1):
        lines = math.ceil(len(names) / columns)
        longest = [max(map(len, names[i : i + lines])) for i in range(0, len(names), lines)]
        if sum(LETTER * letters + MARK for letters in longest) <= WIDTH:
            return len(longest)
    return 1


def _spaced(case: str) -> str:
    """The sizes of a case as they are read: M4096-N128-causal becomes M 4096, N 128, causal."""
    return re.sub(r"\b([A-Z])(\d)", r"\1 \2", case).replace("-", ", ")


def _name(column: str, value: object) -> str:
    if column == "flags":
        return str(value) or "plain"
    if column.startswith("size_"):
        return f"{column[5:]} = {value:g}"
    return str(value)

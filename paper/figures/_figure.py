"""What the figures share: style, one colour for each implementation, panels of rate over size."""

import math
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import matplotlib as mpl
import pandas as pd

sys.path.append(str(Path(__file__).parents[1]))
from _data import EMPTY, EVENTS, OURS, natural, whole_file

mpl.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# What a user or a machine prefers must not show in a figure of the paper.
mpl.rcdefaults()

WIDTH = 6.3
OURS_COLOUR, OURS_MARKER = "#c8102e", "o"
PALETTE = (
    "#0072b2", "#4b3fa7", "#009e73", "#8e4585", "#56b4e9", "#7a5c00",
    "#5f6b73", "#c96a9b", "#2f4b26", "#e69f00", "#a3b300", "#00a6a6",
)  # fmt: skip
HOLLOW = {"markerfacecolor": "white", "markeredgewidth": 0.8, "linestyle": (0, (4, 1.5))}
MARKERS = "sD^vP<>Xhp*8"
PANEL_INCHES = 1.05
# Of more curves than this a panel is higher.
MANY = 8
LEGEND_COLUMNS = 5
HOLES = {
    "unsupported": "x",
    "unavailable": "+",
    "inaccurate": "1",
    "oom": "2",
    "crashed": "3",
    "hung": "4",
    "throttled": "|",
    "impossible": "_",
}
# What events timed: a ring around its mark, since the host's work is in it.
RING = {
    "marker": "o", "markersize": 7.5, "markerfacecolor": "none", "markeredgecolor": "#333333",
    "markeredgewidth": 0.6, "linestyle": "none", "zorder": 5,
}  # fmt: skip
BY_EVENTS = "timed by events, host included"
STYLE = {
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.5,
    "legend.fontsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.1,
    "lines.markersize": 3,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "tilewright",
}


def looks(impls: Iterable[str]) -> dict[str, dict]:
    """Colour and marker of each implementation, from its name; a taken one gives way to the next.

    Where all are taken they come once more, with hollow markers and dashed lines. Hand it all
    implementations of a run, so that all figures of the run agree.
    """
    found, taken, face = {}, set(), {}
    for impl in sorted(set(impls)):
        if impl == OURS:
            found[impl] = {"color": OURS_COLOUR, "marker": OURS_MARKER, "zorder": 4}
            continue
        if len(taken) == len(PALETTE):
            taken, face = set(), HOLLOW
        index = zlib.crc32(impl.encode()) % len(PALETTE)
        while index in taken:
            index = (index + 1) % len(PALETTE)
        taken.add(index)
        found[impl] = {"color": PALETTE[index], "marker": MARKERS[index], "zorder": 3} | face
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
    with plt.rc_context(STYLE):
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
    sharey: str = "all",
    ratios: tuple[str, str] | None = None,
) -> None:
    """Rate over size, a panel for each value of the columns `down` and `across`.

    every: the summary of all families, for the colours. rows: those to draw. x: the size of each
    row on a log2 axis, NaN where a case is not on the curve. rate: "gbps" or "tflops". fixed:
    columns that must agree along a curve; the longest such curve of a panel is drawn. Cases that
    are on no curve of at least three sizes are drawn below, one a line. sharey: "all" or "col".
    ratios: the columns `down` and `across` of further panels, which show the time of each baseline
    over that of ours along the same curves.
    """
    rows = _offered(rows[rows["set"] == "grid"])
    if rows.empty:
        nothing(out, "This run holds no rows for this figure.")
        return
    rows = rows.assign(x=x(rows), sol=rows[rate] * rows["pct_sol"].rdiv(100))
    curves = _on_a_curve(rows, [down, across], list(fixed))
    lone = rows.drop(curves.index)
    styles = looks(every["impl"])
    unit = {"gbps": "GB/s", "tflops": "TFLOP/s"}[rate]
    lines = lone.groupby(["op", "pass", "dtype", "case"], sort=False).ngroups
    parts = []
    if len(curves):
        panels = _split(curves, down, across)
        height = PANEL_INCHES * (1.2 if ratios or curves["impl"].nunique() > MANY else 1)
        parts.append((height * len(panels) + 0.35, _rates, (panels, label, unit, sharey, rate)))
        if ratios:
            panels = _split(curves, *ratios)
            parts.append((0.8 * PANEL_INCHES * len(panels) + 0.35, _ratios, (panels, label)))
    if lines:
        parts.append((0.14 * lines + 0.5, _lone, (lone, rate, unit, _varying(rows))))
    entries = rows["impl"].nunique() + rows["status"].nunique() + 1
    parts.append((0.1 + 0.14 * math.ceil(entries / LEGEND_COLUMNS), _legend, (rows,)))
    heights = [height for height, *_ in parts]
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(WIDTH, sum(heights)), layout="constrained")
        places = figure.subfigures(len(parts), 1, height_ratios=heights, squeeze=False).flat
        for place, (_, draw, given) in zip(places, parts, strict=True):
            draw(place, styles, *given)
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


def _offered(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the passes of ops that nobody offers, as where a gradient is but a view."""
    passes = rows.groupby(["op", "pass"])["status"]
    return rows[~passes.transform(lambda found: (found == "unsupported").all()).astype(bool)]


def _split(curves: pd.DataFrame, down: str, across: str) -> dict[str, dict[str, pd.DataFrame]]:
    """The rows of each panel, by the title of its row and of its column."""
    rows, columns = (sorted(curves[name].unique(), key=natural) for name in (down, across))
    return {
        _name(down, row): {
            _name(across, column): curves[(curves[down] == row) & (curves[across] == column)]
            for column in columns
        }
        for row in rows
    }


def _panels(
    figure: Figure, panels: Mapping, label: str, unit: str, sharey: str
) -> Iterable[tuple[Axes, pd.DataFrame]]:
    """Titled axes and the rows of each panel."""
    columns = next(iter(panels.values()))
    grid = figure.subplots(len(panels), len(columns), sharex=True, sharey=sharey, squeeze=False)
    for axes_row, (title, cells) in zip(grid, panels.items(), strict=True):
        for axes, rows in zip(axes_row, cells.values(), strict=True):
            axes.set_xscale("log", base=2)
            ticks = 7 if len(columns) < 3 else 4
            axes.xaxis.set_major_locator(mpl.ticker.LogLocator(base=2, numticks=ticks))
            axes.xaxis.set_minor_locator(mpl.ticker.NullLocator())
            axes.yaxis.set_major_locator(mpl.ticker.MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
            yield axes, rows
        if len(panels) > 1:
            place = {"xycoords": "axes fraction", "rotation": 270, "va": "center"}
            axes_row[-1].annotate(title, (1.02, 0.5), **place)
    for axes, title in zip(grid[0], columns, strict=True):
        axes.set_title(title, pad=4)
    figure.supxlabel(label, fontsize=7.5)
    figure.supylabel(unit, fontsize=7.5)


def _on_a_curve(rows: pd.DataFrame, panel: list[str], fixed: list[str]) -> pd.DataFrame:
    keep = []
    for _, cells in rows[rows["x"].notna()].groupby(["op", *panel], sort=True):
        groups = cells.groupby(fixed, sort=True) if fixed else [((), cells)]
        _, longest = max(groups, key=lambda group: group[1]["x"].nunique())
        if longest["x"].nunique() >= 3:
            keep.append(longest)
    return pd.concat(keep) if keep else rows.iloc[:0]


def _rates(
    figure: Figure,
    styles: Mapping[str, dict],
    panels: Mapping,
    label: str,
    unit: str,
    sharey: str,
    rate: str,
) -> None:
    drawn = []
    for axes, rows in _panels(figure, panels, label, unit, sharey):
        drawn.append(axes)
        limit = rows.groupby("x")["sol"].max().dropna()
        axes.plot(limit.index, limit, color="#333333", linestyle="--", linewidth=0.8, zorder=2)
        holes = 0
        for impl in reversed(in_order(rows["impl"])):
            cells = rows[rows["impl"] == impl]
            for _, curve in cells[cells["status"] == "ok"].groupby("op"):
                ends = [curve[rate] * curve["device_us"] / curve[end] for end in ("ci_hi", "ci_lo")]
                width = 1.6 if impl == OURS else 1.1
                _curve(axes, curve["x"], curve[rate], ends, width, styles[impl])
                host = curve[curve["timed_by"] == EVENTS]
                axes.plot(host["x"], host[rate], **RING)
            untimed = cells[cells["status"] != "ok"]
            for status, found in untimed.groupby("status"):
                axes.plot(
                    found["x"],
                    [0.04 + 0.07 * holes] * len(found),
                    transform=axes.get_xaxis_transform(),
                    **_mark(status, styles[impl]["color"]),
                )
            holes += len(untimed) > 0
    # Only now: a limit that is set stops the axes that share it from growing with their curves.
    for axes in drawn:
        axes.set_ylim(bottom=0)


def _ratios(figure: Figure, styles: Mapping[str, dict], panels: Mapping, label: str) -> None:
    for axes, rows in _panels(figure, panels, label, "baseline / ours", "all"):
        axes.axhline(1, color=OURS_COLOUR, linewidth=1.2)
        against = "speedup_vs_ours"
        graph = rows["timed_by"] != EVENTS
        timed = rows[rows[against].notna() & (rows["status"] == "ok") & graph]
        for impl, cells in timed.groupby("impl"):
            ends = [1 / cells[f"{against}{end}"] for end in ("_hi", "_lo")]
            _curve(axes, cells["x"], 1 / cells[against], ends, 1.1, styles[impl])


def _curve(
    axes: Axes, x: pd.Series, y: pd.Series, ends: list[pd.Series], width: float, style: dict
) -> None:
    """One curve over rising x with the band between its `ends`."""
    order = x.argsort()
    x, y, low, high = (values.iloc[order] for values in (x, y, *ends))
    axes.plot(x, y, linewidth=width, **style)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.25, linewidth=0)


def _varying(rows: pd.DataFrame) -> list[str]:
    """The columns beside the case that tell the cells of a figure apart."""
    return [name for name in ("op", "pass", "dtype") if rows[name].nunique() > 1]


def _lone(
    figure: Figure,
    styles: Mapping[str, dict],
    rows: pd.DataFrame,
    rate: str,
    unit: str,
    varying: list[str],
) -> None:
    axes = figure.subplots()
    labels = []
    lines = rows.groupby(["op", "pass", "dtype", "case"], sort=False)
    for _, cells in sorted(lines, key=lambda line: [natural(part) for part in line[0][:2]]):
        line = len(labels)
        first = cells.iloc[0]
        labels.append(" ".join([*(first[name] for name in varying), _spaced(first["case"])]))
        if cells["sol"].notna().any():
            axes.vlines(cells["sol"].max(), line - 0.4, line + 0.4, color="#333333", linewidth=0.8)
        holes = 0
        for impl in reversed(in_order(cells["impl"])):
            row = cells[cells["impl"] == impl].iloc[0]
            if row["status"] == "ok":
                axes.plot(row[rate], line, **(styles[impl] | {"ms": 4, "linestyle": "none"}))
                if row["timed_by"] == EVENTS:
                    axes.plot(row[rate], line, **RING)
                continue
            mark = _mark(row["status"], styles[impl]["color"])
            holes += 1
            axes.plot(0.015 * holes, line, transform=axes.get_yaxis_transform(), **mark)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(unit)


def _mark(status: str, colour: str) -> dict:
    return {
        "marker": HOLES[status],
        "color": colour,
        "linestyle": "none",
        "markersize": 5,
        "markeredgewidth": 1.1,
        "clip_on": False,
    }


def _legend(figure: Figure, styles: Mapping[str, dict], rows: pd.DataFrame) -> None:
    handles = [mpl.lines.Line2D([], [], label=i, **styles[i]) for i in in_order(rows["impl"])]
    if rows["sol"].notna().any():
        limit = {"color": "#333333", "linestyle": "--", "linewidth": 0.8}
        handles.append(mpl.lines.Line2D([], [], label="speed of light", **limit))
    if (rows["timed_by"] == EVENTS).any():
        handles.append(mpl.lines.Line2D([], [], label=BY_EVENTS, **RING))
    for status in sorted(set(rows["status"]) - {"ok"}):
        handles.append(mpl.lines.Line2D([], [], label=status, **_mark(status, "#333333")))
    columns = math.ceil(len(handles) / math.ceil(len(handles) / LEGEND_COLUMNS))
    figure.legend(handles=handles, loc="center", ncols=columns, columnspacing=1.2)


def _spaced(case: str) -> str:
    """The sizes of a case as they are read: M4096-N128-causal becomes M 4096, N 128, causal."""
    return re.sub(r"\b([A-Z])(\d)", r"\1 \2", case).replace("-", ", ")


def _name(column: str, value: object) -> str:
    if column == "flags":
        return str(value) or "plain"
    if column.startswith("size_"):
        return f"{column[5:]} = {value:g}"
    return str(value)

"""Writes report.html: the run in one file that needs no network and no script."""

import base64
from pathlib import Path

import _data
import jinja2
import numpy as np
import pandas as pd

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Tilewright: {{ title }}</title>
<style>
:root { color-scheme: light dark; --line: #ccc; --soft: #666; --back: #fff; --ink: #1b1b1b; }
@media (prefers-color-scheme: dark) {
  :root { --line: #444; --soft: #a5a5a5; --back: #16181a; --ink: #e8e8e8; }
}
body { background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  max-width: 74rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem; }
h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
p.note, figcaption, caption { color: var(--soft); font-size: 0.9rem; text-align: left; }
figure { margin: 1rem 0 2rem; overflow-x: auto; }
figure img { width: 100%; min-width: 40rem; height: auto; background: #fff; padding: 0.5rem;
  border-radius: 4px; box-sizing: border-box; }
div.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.15rem 0.6rem 0.15rem 0; text-align: left; vertical-align: top;
  white-space: nowrap; }
th { border-bottom: 1px solid var(--line); }
td.long { white-space: normal; min-width: 18rem; }
td.number { text-align: right; }
td { border-bottom: 1px solid color-mix(in srgb, var(--line) 40%, transparent); }
summary { cursor: pointer; margin: 0.5rem 0; }
code { font-size: 0.9em; overflow-wrap: anywhere; }
nav a { margin-right: 1rem; }
</style>
</head>
<body>
<h1>Tilewright</h1>
{% for run in runs -%}
<p>Run <code>{{ run.run_id }}</code>, {{ run.mode }}: {{ run.gpu or "no GPU" }},
{{ run.date[:10] }}, commit <code>{{ run.commit[:12] }}</code>
{{- " with uncommitted changes" if run.dirty else "" }}.
<span>Ops: {{ run.ops }}.</span>
{%- if run.changed_ops %} Code changed since:
{{ "all" if run.changed_ops == run.ops else run.changed_ops }}.{% endif %}</p>
{% endfor -%}
<nav>
{% for section in sections -%}
<a href="#{{ section.name }}">{{ section.title }}</a>
{% endfor -%}
</nav>
{% for section in sections -%}
<h2 id="{{ section.name }}">{{ section.title }}</h2>
{% if section.note %}<p class="note">{{ section.note }}</p>{% endif %}
{% for figure in section.figures -%}
<figure><figcaption>{{ figure.name }}</figcaption>
<img alt="{{ figure.name }}" src="data:image/svg+xml;base64,{{ figure.data }}"></figure>
{% endfor -%}
{% if section.rows is not none -%}
{% if section.rows -%}
{% set rows = section.rows|length -%}
{% if rows > most %}<details><summary>{{ rows }} rows</summary>{% endif %}
<div class="table"><table>
<thead><tr>{% for name in section.columns %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in section.rows -%}
<tr>
{%- for cell in row -%}
<td class="{{ kind(cell) }}">{{ show(cell) }}</td>
{%- endfor -%}
</tr>
{% endfor -%}
</tbody></table></div>
{% if rows > most %}</details>{% endif %}
{% else %}<p>None.</p>
{% endif -%}
{% endif -%}
{% endfor -%}
</body>
</html>
"""


VERDICTS = ("better", "no difference", "worse", "undecided")
# Figures that sections of their own show, or the families.
SHOWN = ("headline", "survey", "capabilities", "others")
# A table of more rows than this is folded.
MOST_ROWS = 60
FASTEST = (
    "Time of the fastest baseline of each cell over the time of ours; above one, ours takes less "
    "time. Geometric mean, least and greatest over the cells, the verdicts on them, and the least "
    "one's case and baseline."
)
SPEEDUP = (
    "Time of a baseline over the time of ours; above one, ours takes less time. Geometric mean, "
    "least and greatest over the cells, and the verdicts on single cells."
)
CLAIMS = (
    "Time of a baseline over the time of ours: geometric mean over the cells of an op and pass, "
    "with its interval and noise floor; p after Holm's correction over all claims."
)
REMARKS = (
    "What deserves a look in cells that have a time: blocks lost, ceilings passed, far ratios."
)
OVERHEAD = (
    "Wall time of measuring; the share is what was neither timed work nor its warm-up or flush."
)
HOLES = "What has no time that counts, and why. The figures mark these cells."
VERIFICATION = (
    "Cells passed, in all and of hostile inputs, and the largest error as a share of the bound "
    "allowed to it. Error and status are of ordinary cells, and of ours of all."
)
RESOURCES = "What the compiler made of each default configuration; shared memory in KiB."
OFFERS = (
    "What verification saw of each op, pass and dtype (float32, float16, bfloat16 side by side); "
    "below, the cells that were declined or wrong, and why, ordinary ones before hostile inputs."
)
LEDGER = (
    "What else is in the time of each implementation, as observed in one call; empty where it was "
    "not observed or not declared."
)
SURVEY = (
    "Kernels in the syntax trees of the libraries by category, with the functions they call, and "
    "where they were read: in the installed library, in an earlier survey on the date given or, of "
    "what no package holds, in the published source."
)


def main(arguments) -> None:
    folder = arguments.run
    runs = _data.read(folder, "runs")
    sections = [
        _section(
            "fastest",
            "Ours and the fastest",
            _fastest(folder),
            _figures(folder, ["headline"]),
            FASTEST,
        ),
        _section("families", "Families", None, _figures(folder, _drawn(folder))),
        *_more(folder),
        _section("claims", "Claims", _claims(folder), note=CLAIMS),
        _section("speedup", "Speedups", _speedups(folder), note=SPEEDUP),
        _section("holes", "Cells without a time", _holes(folder), note=HOLES),
        _section("remarks", "Remarks", _remarks(folder), note=REMARKS),
        _section("verification", "Verification", _verification(folder), note=VERIFICATION),
        _section("resources", "Resources", _resources(folder), note=RESOURCES),
        _section("ceilings", "Ceilings", _data.read(folder, "shown_ceilings")),
        _section("overhead", "Overhead", _data.read(folder, "overhead"), note=OVERHEAD),
        _section("environment", "Machines", _data.read(folder, "environment")),
    ]
    ships = _figures(folder, ["survey"])
    sections.append(_section("survey", "Kernels in the libraries", _survey(folder), ships, SURVEY))
    offers = _figures(folder, ["capabilities"])
    sections.append(_section("offers", "What each library offers", _gaps(folder), offers, OFFERS))
    sections.append(_section("ledger", "What a call contains", _ledger(folder), note=LEDGER))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(PAGE).render(
        title=", ".join(runs["run_id"]),
        runs=runs.to_dict("records"),
        sections=sections,
        most=MOST_ROWS,
        show=_show,
        kind=_kind,
    )
    _data.write(arguments.out, page)


def _section(
    name: str, title: str, table: pd.DataFrame | None, figures: list[dict] = (), note: str = ""
) -> dict:
    found = {"name": name, "title": title, "figures": figures, "note": note}
    if table is None:
        return found | {"columns": [], "rows": None}
    table = table.astype(object).where(table.notna(), "")
    return found | {"columns": list(table.columns), "rows": table.to_numpy().tolist()}


def _figures(folder: Path, names: list[str]) -> list[dict]:
    found = []
    for name in names:
        path = folder / "figures" / f"{name}.svg"
        try:
            svg = path.read_bytes()
        except FileNotFoundError:
            raise _data.PaperError(f"{path}: missing; run the figure stage first") from None
        data = base64.b64encode(svg).decode()
        found.append({"name": name.replace("_", " "), "data": data, "svg": svg})
    return found


def _drawn(folder: Path) -> list[str]:
    """The figures of the run's families, in the order of the paper."""
    own = {path.stem for path in (folder / "figures").glob("*.svg")}
    names = [family if family in own else "others" for family in _data.rank(folder)]
    return list(dict.fromkeys(names))


def _more(folder: Path) -> list[dict]:
    """A section of the figures that no other section shows, where there are any with rows."""
    scripts = Path(__file__).with_name("figures").glob("[!_]*.py")
    shown = {*SHOWN, *_drawn(folder)}
    names = sorted(path.stem for path in scripts if path.stem not in shown)
    found = [figure for name in names for figure in _figures(folder, [name])]
    found = [figure for figure in found if _data.EMPTY.encode() not in figure["svg"]]
    return [_section("more", "More figures", None, found)] if found else []


def _speedups(folder: Path) -> pd.DataFrame:
    return _ratios(folder, _data.compared(folder), ["op", "pass", "baseline"])


def _fastest(folder: Path) -> pd.DataFrame:
    fastest = _data.fastest(folder)
    names = ["case", "dtype", "baseline"]
    worst = fastest.drop_duplicates(["op", "pass"])[["op", "pass", *names]]
    return _ratios(folder, fastest, ["op", "pass"]).merge(worst, on=["op", "pass"])


def _ratios(folder: Path, verdicts: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Mean and range of the ratios by `names`, and how many cells have each verdict."""
    place = _data.rank(folder)
    groups = sorted(
        verdicts.groupby(["family", *names]),
        key=lambda g: (place[g[0][0]], *map(_data.natural, g[0][1:])),
    )
    rows = []
    for key, cells in groups:
        row = dict(zip(names, key[1:], strict=True)) | {"cells": len(cells)}
        row["mean"] = float(np.exp(np.log(cells["ratio"]).mean()))
        row |= {"least": cells["ratio"].min(), "most": cells["ratio"].max()}
        row |= {name: (cells["verdict"] == name).sum() for name in VERDICTS}
        rows.append(row)
    return pd.DataFrame(rows, columns=None if rows else names)


def _holes(folder: Path) -> pd.DataFrame:
    rows = _data.summary(folder)
    keys = ["op", "pass", "impl", "status", "reason"]
    return rows[rows["status"] != "ok"].groupby(keys).size().rename("cells").reset_index()


def _gaps(folder: Path) -> pd.DataFrame:
    rows = _data.settled(_data.read(folder, "gaps"))
    keys = ["hostile", "impl", "op", "status", "reason"]
    return rows.groupby(keys)["cells"].sum().reset_index()


def _ledger(folder: Path) -> pd.DataFrame:
    rows = _data.settled(_data.read(folder, "ledger"))
    return rows.drop(columns=["family", "impl_version", "mode", "status", "reason"])


def _claims(folder: Path) -> pd.DataFrame:
    rows = _data.read(folder, "claims")
    place = _data.rank(folder)
    return rows.sort_values("family", key=lambda names: names.map(place), kind="stable").drop(
        columns=["family", "p"]
    )


def _remarks(folder: Path) -> pd.DataFrame:
    """Cells with a time and something to say of it, and ratios that are flagged."""
    names = ["op", "case", "dtype", "pass", "impl", "remark"]
    rows = _data.summary(folder)
    rows = rows[(rows["status"] == "ok") & (rows["reason"] != "")]
    ratios = _data.read(folder, "verdicts")
    ratios = ratios[ratios["note"] != ""].rename(columns={"baseline": "impl", "note": "remark"})
    return pd.concat([rows.rename(columns={"reason": "remark"})[names], ratios[names]])


def _verification(folder: Path) -> pd.DataFrame:
    columns = (
        "op impl impl_version mode passed cells hostile_passed hostile worst_ratio worst_case"
        " status reason"
    )
    return _data.read(folder, "verification")[columns.split()]


def _resources(folder: Path) -> pd.DataFrame:
    rows = _data.read(folder, "resources")
    if "arch" not in rows:
        return pd.DataFrame()
    columns = ["file", "kernel", "arch", "dtype", "config", "registers", "spill_stores"]
    rows = rows[rows["default"].astype(bool)]
    return rows[columns].assign(shared=rows["shared_bytes"] / 1024, status=rows["status"])


def _survey(folder: Path) -> pd.DataFrame:
    keys = ["library", "version", "source", "date"]
    functions = _data.read(folder, "survey").query("role == 'function'").groupby(keys).size()
    found = _data.kernels(folder).groupby([*keys, "category"]).size().unstack(fill_value=0)
    found.insert(0, "kernels", found.sum(axis=1))
    return found.assign(functions=functions).fillna({"functions": 0}).reset_index()


def _kind(cell: object) -> str:
    """The class of a table cell: numbers stand to the right, long text may break."""
    return "number" if not isinstance(cell, str) else "long" if len(cell) > 40 else "text"


def _show(cell: object) -> str:
    if isinstance(cell, float):
        if cell == int(cell):
            return f"{cell:.0f}"
        return f"{cell:.1f}" if abs(cell) >= 100 else f"{cell:#.3g}"
    return str(cell)


if __name__ == "__main__":
    _data.run(main, __doc__)

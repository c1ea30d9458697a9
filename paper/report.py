"""Writes report.html: the run in one file that needs no network and no script."""

import base64
from pathlib import Path

import _data
import _missing
import jinja2
import pandas as pd

TEMPLATES = Path(__file__).with_name("templates")


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
MORE = "Networks, memory and the forms of kernels. The captions of the paper say how to read them."
REMARKS = (
    "What deserves a look in cells that have a time: blocks lost, ceilings passed, far ratios."
)
OVERHEAD = (
    "Wall time of measuring; the share is what was neither timed work nor its warm-up or flush."
)
MISSING_TIMES = "What has no time that counts, and why. The figures mark these cells."
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
        _section(
            "missing_times", "Cells without a time", _missing_times(folder), note=MISSING_TIMES
        ),
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
    sections.append(
        _section("offers", "What each library offers", _missing_results(folder), offers, OFFERS)
    )
    sections.append(_section("ledger", "What a call contains", _ledger(folder), note=LEDGER))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("report.html.j2").render(
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
    return [_section("more", "More figures", None, found, MORE)] if found else []


def _speedups(folder: Path) -> pd.DataFrame:
    return _ratios(folder, _data.compared(folder, every=True), ["op", "pass", "baseline"])


def _fastest(folder: Path) -> pd.DataFrame:
    fastest = _data.fastest(folder, every=True)
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
        row["mean"] = _data.mean_ratio(cells)
        row |= {"least": cells["ratio"].min(), "most": cells["ratio"].max()}
        row |= {name: (cells["verdict"] == name).sum() for name in _data.VERDICTS}
        rows.append(row)
    return pd.DataFrame(rows, columns=None if rows else names)


def _missing_times(folder: Path) -> pd.DataFrame:
    keys = ["op", "pass", "impl", "status", "reason"]
    return _missing.missing_times(folder).groupby(keys).size().rename("cells").reset_index()


def _missing_results(folder: Path) -> pd.DataFrame:
    keys = ["hostile", "impl", "op", "status", "reason"]
    return _missing.missing_results(folder).groupby(keys)["cells"].sum().reset_index()


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

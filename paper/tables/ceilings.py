"""The ceilings of each GPU of a run shown, at the clocks seen meanwhile, beside data sheets."""

import _table
from _data import read, run

MEASURED, SHEET = "measured", "data sheet: "
# Traffic of every kind goes through the memory that a data sheet names.
MEMORY = ("read", "write", "copy")
PARAGRAPH = "\n\\par\\smallskip\n"


def main(arguments):
    rows = read(arguments.run, "shown_ceilings")
    if rows.empty:
        _table.save(arguments.out, "The runs shown come without ceilings.\n")
        return
    sheets = read(arguments.run, "datasheets")
    parts = []
    for (run_id, board), own in rows.groupby(["run_id", "board"], sort=False):
        several = rows.loc[rows["run_id"] == run_id, "board"].nunique() > 1
        title = f"Run {_table.code(run_id)}" + f", board {_table.board(board)}" * several
        parts += _of_run(title, own, sheets)
    _table.save(arguments.out, PARAGRAPH.join([*parts, _sources(rows, sheets)]))


def _of_run(title, own, sheets):
    measured = own[own["source"] == MEASURED]
    sheet = own[own["source"].str.startswith(SHEET)]
    known = set(sheet["source"].str.removeprefix(SHEET))
    limits = [_values(sheet)]
    titles = ["{data sheet}"]
    for gpu, rows in sheets.groupby("gpu", sort=False):
        if known.isdisjoint(rows["source"]):
            limits.append(_values(rows))
            titles.append(f"{{{_table.escape(gpu.split('-')[0].upper())}}}")
    lines, above = [], []
    for row in measured.itertuples():
        of_sheets = [values.get(_bound(row.quantity), float("nan")) for values in limits]
        percent = 100 * row.value / of_sheets[0]
        if percent > 100:
            above.append(row.quantity)
        cells = [_table.escape(row.quantity), _table.escape(row.unit), _digits(row.value)]
        cells += [_table.number(row.sm_mhz, 0), _digits(of_sheets[0])]
        cells += [_marked(percent), *map(_digits, of_sheets[1:])]
        lines.append(cells)
    head = ["quantity", "unit", "{measured}", r"{SM \si{\mega\hertz}}", titles[0], r"{\%}"]
    columns = "ll" + "S[table-format=4.2]S[table-format=4.0]S[table-format=4.1]S[table-format=3.1]"
    columns += "S[table-format=4.1]" * (len(titles) - 1)
    table = _table.tabular(columns, [" & ".join([*head, *titles[1:]])], lines)
    # A page may end between two runs, and not between a title and its table.
    parts = [f"{title}\n\\par\\nopagebreak\n{table}"]
    if above:
        named = ", ".join(map(_table.escape, above))
        parts.append(rf"\textbf{{Above the data sheet, so one of the two is wrong: {named}.}}")
    return parts


def _values(rows):
    return dict(zip(rows["quantity"], rows["value"], strict=True))


def _bound(quantity):
    return "memory" if quantity in MEMORY else quantity


def _digits(value):
    return "{--}" if value != value else f"{value:.4g}"


def _marked(percent):
    """A share of the data sheet; one above it cannot be printed as if it were any other."""
    text = _table.number(percent, 1)
    return rf"{{\textbf{{{text}!}}}}" if percent > 100 else text


def _sources(rows, sheets):
    """Which data sheets the figures are from, each title once."""
    found = [*rows["source"][rows["source"].str.startswith(SHEET)].str.removeprefix(SHEET)]
    titles = dict.fromkeys(source.partition(";")[0] for source in [*found, *sheets["source"]])
    text = "; ".join(map(_table.escape, titles))
    halved = " Figures that they give with sparsity are halved." if _halved(sheets) else ""
    return f"Data sheets: {text}.{halved}\n"


def _halved(sheets):
    return sheets["source"].str.contains("half of").any()


if __name__ == "__main__":
    run(main, __doc__)

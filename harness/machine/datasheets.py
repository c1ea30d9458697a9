"""Reads what the data sheets of some GPUs promise for products and memory (`datasheets.csv`)."""

import csv
from collections.abc import Iterable
from pathlib import Path

SOURCE = "data sheet: "
TABLE = Path(__file__).with_name("datasheets.csv")
# The quantity of a data sheet that bounds a measured one of another name.
BOUND_BY = dict.fromkeys(("read", "write", "copy"), "memory")


def rows() -> list[dict[str, str]]:
    """gpu (as `environment.model` names it), quantity, unit, value and source of each figure.

    The source is title, date and form, and what was halved to leave sparsity out.
    """
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def of(model: str) -> list[tuple]:
    """The rows of ceilings.csv that the data sheet of a GPU gives; none for an unknown one."""
    return [
        (row["quantity"], row["unit"], float(row["value"]), None, SOURCE + row["source"])
        for row in rows()
        if row["gpu"] == model
    ]


def beyond(measured: Iterable[tuple], sheet: Iterable[tuple]) -> list[str]:
    """Return in words what was measured above the data sheet: one of the two is wrong.

    Both are rows of ceilings.csv.
    """
    limits = {quantity: value for quantity, _, value, *_ in sheet}
    found = []
    for quantity, unit, value, *_ in measured:
        limit = limits.get(BOUND_BY.get(quantity, quantity))
        if limit is not None and value > limit:
            found.append(f"{quantity}: {value:g} {unit} measured, above the data sheet's {limit:g}")
    return found

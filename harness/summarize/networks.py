"""Tell of a network's calls what its user asks: tokens a second, MFU, memory, energy of a token.

The MFU is the FLOPs of the model (`network.cost`) over the time and the peak rate of the dtype. The
peak is that of the data sheet, as in Chowdhery et al., "PaLM" (2022); without one, the rate that
was measured.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from harness.cli import UserError
from harness.project.implementations import TWIN
from harness.results import columns, manifest

EAGER = "torch_eager"
SHEET = "data sheet"


def rows(
    summary: Iterable[Mapping], ceilings: Mapping[tuple[str, str], list[Mapping]]
) -> Iterator[dict]:
    """Yield a row of `columns.NETWORK` for each row of the summary on an op of a network.

    Args:
        summary: rows of `columns.SUMMARY`; those of other ops are left out.
        ceilings: by op of a network and run, the rates of the machine that timed it there, with
            their sources.
    """
    ops = {op for op, _ in ceilings}
    found = [row for row in summary if row["op"] in ops and row["impl"] != TWIN]
    eager = {_cell(row): row.get("device_us") for row in found if row["impl"] == EAGER}
    for row in found:
        yield _row(row, ceilings[row["op"], row["run_id"]], eager.get(_cell(row)))


def _cell(row: Mapping) -> tuple:
    return row["op"], row["case"], row["dtype"]


def _row(row: Mapping, rates: list[Mapping], eager_us: float | None) -> dict:
    batch, length, decoded = (row.get(f"size_{letter}") for letter in "BST")
    tokens = batch * (decoded or length)
    made = {name: row[name] for name in ("op", "case", "dtype", "status", "reason")}
    made |= {"stack": row["impl"], "preset": row["flags"].replace("_", "-")}
    made |= {"batch": batch, "length": length, "tokens": tokens}
    us = row.get("device_us")
    if not us:
        return made
    made |= {name: row[name] for name in ("device_us", "ci_lo", "ci_hi")}
    made["tokens_per_s"] = tokens / us * 1e6
    if peak := _peak(rates, row["dtype"]):
        made |= {"mfu": row["tflops"] / peak["value"], "peak": peak["source"]}
    if "peak_mem_bytes" in row:
        made["peak_mem_bytes"] = row["peak_mem_bytes"]
    if row.get("energy_uj"):
        made["energy_mj_per_token"] = row["energy_uj"] / 1e3 / tokens
    if eager_us:
        made["speedup_vs_eager"] = eager_us / us
    return made


def _peak(rates: list[Mapping], dtype: str) -> Mapping | None:
    """The rate of a dtype by the data sheet, else as it was measured."""
    found = [rate for rate in rates if rate["quantity"] == dtype]
    sheets = [rate for rate in found if rate["source"].startswith(SHEET)]
    return next(iter([*sheets, *found]), None)


def dissected(folder: Path, recorded: Path | None, table: columns.Table) -> list[dict[str, str]]:
    """Return the rows of a file of `harness.measure.dissect`: of the run, else as recorded.

    There are none if neither has the file.

    Raises UserError if its header is not that of the table.
    """
    places = [place / "dissect" / f"{table.name}.csv" for place in (folder, recorded) if place]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return []
    if recorded is not None and path.is_relative_to(recorded):
        manifest.check_file(recorded, f"dissect/{path.name}")
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != table.header:
            raise UserError(
                f"{path}: its columns are not those of {table.name}; remove it, or make it again:"
                f" python -m harness.measure.dissect {table.name}"
            )
        return list(reader)

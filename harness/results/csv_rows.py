"""Reads a declared CSV file whole: a broken or cut one is an error, not fewer rows."""

import csv
import io
from pathlib import Path

from harness.cli import UserError
from harness.results.columns import Table


def read(path: Path, table: Table, remedy: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file with the columns of `table`.

    UserError that ends in `remedy` if the file is missing, cut, no text, or of other columns.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {remedy}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; {remedy}") from None
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise UserError(f"{path}: not CSV ({error}); {remedy}") from None
    if not lines or tuple(lines[0]) != table.header:
        raise UserError(f"{path}: its columns are not those of {table.name}; {remedy}")
    wrong = (number for number, line in enumerate(lines, 1) if len(line) != len(table.header))
    if number := next(wrong, 0):
        raise UserError(f"{path}: row {number} has not the fields of the header; {remedy}")
    if not text.endswith("\n"):
        raise UserError(f"{path}: the file ends inside a line: it is truncated; {remedy}")
    return [dict(zip(table.header, line, strict=True)) for line in lines[1:]]

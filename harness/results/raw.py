"""The raw measurements of one op: `raw/<op>.csv`, a row a block, and its sidecar in JSON."""

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from harness import files
from harness.cli import UserError
from harness.results import columns, parts, schema
from harness.results.columns import Column
from harness.status import TIMED

HEADER = columns.RAW.header
COUNTS = tuple(column.name for column in columns.RAW.columns if column.kind == columns.COUNT)
TIMES = tuple(column.name for column in columns.RAW.columns if column.positive)
READINGS = tuple(column.name for column in columns.READINGS)
# Columns that files of former runs lack, and their value there.
ADDED = {column.name: column.absent for column in columns.RAW.columns if column.absent is not None}
# Never empty; a row of a TIMED status has its times as well.
FILLED = tuple(column.name for column in columns.RAW.columns if column.filled)
# No counter of a run is larger.
LARGEST = 2**63


def line(row: Mapping[str, object]) -> str:
    """The CSV line of a row; raises ValueError for an unknown column or a number not finite."""
    if unknown := set(row) - set(HEADER):
        raise ValueError(f"unknown columns {sorted(unknown)}")
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(
        _cell(row.get(name, ADDED.get(name))) for name in HEADER
    )
    return buffer.getvalue()


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is no measurement")
        return repr(value)
    # One row is one line of plain text: a reason is whatever a library said.
    return "".join(letter if letter.isprintable() else " " for letter in str(value))


def header_line() -> str:
    return ",".join(HEADER) + "\n"


def parse(text: str, where: str, remedy: str) -> list[dict[str, object]]:
    """The rows of a raw CSV's text: numbers as int or float, None where empty.

    Raises UserError that names `where`, the line, what is wrong, and `remedy`.
    """

    def refuse(number: int, problem: str):
        raise UserError(f"{where}:{number}: {problem}; {remedy}")

    if not text.endswith("\n"):
        refuse(text.count("\n") + 1, "the file ends inside a line: it is truncated")
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        refuse(1, f"not CSV ({error})")
    header = tuple(lines[0])
    if header != tuple(name for name in HEADER if name in header or name not in ADDED):
        refuse(1, "the header is not that of a raw measurement")
    absent = {name: str(value) for name, value in ADDED.items()}
    rows = []
    for number, fields in enumerate(lines[1:], start=2):
        if len(fields) != len(header):
            refuse(number, f"{len(fields)} fields where the header has {len(header)}")
        try:
            rows.append(_typed(absent | dict(zip(header, fields, strict=True))))
        except ValueError as error:
            refuse(number, str(error))
    return rows


def _typed(fields: dict[str, str]) -> dict[str, object]:
    row: dict[str, object] = dict(fields)
    for column in columns.RAW.columns:
        name, text = column.name, fields[column.name]
        if column.kind != columns.TEXT:
            row[name] = _number(column, text)
        elif column.values and text not in column.values:
            raise ValueError(f"{name} {text!r} is none of {', '.join(column.values)}")
    filled = FILLED + TIMES if fields["status"] in TIMED else FILLED
    if empty := [name for name in filled if not fields[name]]:
        raise ValueError(f"{empty[0]} is empty")
    return row


def _number(column: Column, text: str) -> int | float | None:
    if text == "":
        return None
    # A reading without a point stays so, and a row that is read and written is the same line.
    kind = int if column.kind == columns.COUNT or text.isdecimal() else float
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"{column.name} is {text!r}, no number") from None
    high = LARGEST if kind is int else math.inf
    if not 0 <= value < high or (value == 0 and column.positive):
        raise ValueError(f"{column.name} is {text}, no measurement")
    return value


def read(path: Path, remedy: str) -> tuple[list[dict[str, object]], dict]:
    """The rows of a raw CSV and its sidecar, which must belong together.

    Raises UserError where either is missing, broken, or not what the other says.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {remedy}") from None
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; {remedy}") from None
    rows = parse(text, str(path), remedy)
    beside = path.with_suffix(".json")
    sidecar = schema.read(beside, "sidecar", remedy)
    if sidecar["rows"] != len(rows):
        said = sidecar["rows"]
        raise UserError(f"{path}: {len(rows)} rows where {beside.name} says {said}; {remedy}")
    if sidecar["csv_sha256"] != sha256(content):
        raise UserError(f"{path}: its SHA-256 is not the one in {beside.name}; {remedy}")
    earlier = parts.of(sidecar)[:-1]
    boards = {each: parts.uuid(part) for part in earlier for each in part["cells"]}
    own = parts.uuid(sidecar)
    for row in rows:
        said = boards.get(parts.name(parts.cell(row)), own)
        # Rows of former runs name no board.
        if row["board"] not in ("", said):
            problem = f"rows of board {row['board']} where {beside.name} says {said or 'no GPU'}"
            raise UserError(f"{path}: {problem}; {remedy}")
    for part in parts.of(sidecar):
        if part["environment_sha256"] != environment_sha256(part["environment"]):
            raise UserError(f"{beside}: its environment_sha256 is of another environment; {remedy}")
    return rows, sidecar


def write(path: Path, rows: Iterable[Mapping[str, object]], sidecar: Mapping[str, object]) -> None:
    """Write the CSV and its sidecar whole, or neither; count and digest become the rows' own."""
    lines = [line(row) for row in rows]
    content = (header_line() + "".join(lines)).encode()
    with files.whole_file(path) as temporary:
        temporary.write_bytes(content)
        told = {**sidecar, "rows": len(lines), "csv_sha256": sha256(content)}
        files.write_json(path.with_suffix(".json"), told)


def environment_sha256(environment: Mapping[str, object]) -> str:
    """The name by which sidecars and tables call a machine's description."""
    return sha256(json.dumps(environment, sort_keys=True).encode())


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

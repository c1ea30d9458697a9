"""The raw measurements of one op: `raw/<op>.csv`, a row a block, and its sidecar in JSON."""

import csv
import hashlib
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path

from harness.cli import UserError
from harness.files import read_json
from harness.status import STATUSES
from ops._spec import PASSES

TEXT = ("op", "family", "case", "dtype", "pass", "set", "impl", "impl_version")
PLACE = ("process", "block", "order")
INTEGERS = (*PLACE, "calls", "bytes_read", "bytes_written", "flops", "peak_mem_bytes")
READINGS = ("sm_mhz", "temp_c", "power_w", "energy_uj", "energy_pm_uj")
TIMES = ("device_us", "call_us")
HEADER = (
    *TEXT,
    *PLACE,
    *TIMES,
    *("calls", "bytes_read", "bytes_written", "flops", "peak_mem_bytes"),
    *READINGS,
    *("throttle", "status", "reason"),
)
GRID = "grid"
# Columns that files of former runs lack, and what holds there.
ADDED = {"set": GRID, "process": 0}
SETS = (GRID, "drawn")
# Never empty; a row of a TIMED status has its times as well.
FILLED = (*TEXT[:-1], *PLACE, "bytes_read", "bytes_written", "flops")
TIMED = ("ok", "throttled", "impossible")
SIDECAR = {"op": str, "run_id": str, "mode": str, "rows": int, "csv_sha256": str}
SIDECAR |= {"environment": dict, "environment_sha256": str, "ceilings": list}
SIDECAR |= {"date": str, "commit": str, "dirty": bool}
# What a sidecar may lack, and of these the figures.
OPTIONAL = {"overhead": dict, "schedule": dict, "autotuned": dict}
SPENT = ("total_s", "timed_s", "first_s", "share")
MODES = ("measured", "replayed")
# No counter of a run is larger.
LARGEST = 2**63
CEILING = {"quantity": str, "unit": str, "value": (int, float), "source": str}


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
    for name in HEADER:
        if name in INTEGERS or name in READINGS or name in TIMES:
            row[name] = _number(name, fields[name])
    if fields["status"] not in STATUSES:
        raise ValueError(f"status {fields['status']!r} is none of {', '.join(STATUSES)}")
    if fields["set"] not in SETS:
        raise ValueError(f"set {fields['set']!r} is none of {', '.join(SETS)}")
    if fields["pass"] not in PASSES:
        raise ValueError(f"pass {fields['pass']!r} is none of {', '.join(PASSES)}")
    filled = FILLED + TIMES if fields["status"] in TIMED else FILLED
    if empty := [name for name in filled if not fields[name]]:
        raise ValueError(f"{empty[0]} is empty")
    return row


def _number(name: str, text: str) -> int | float | None:
    if text == "":
        return None
    kind = int if name in INTEGERS else float
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, no number") from None
    high = LARGEST if kind is int else math.inf
    if not 0 <= value < high or (value == 0 and name in TIMES):
        raise ValueError(f"{name} is {text}, no measurement")
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
    sidecar = read_json(beside, remedy)
    _check(sidecar, str(beside), remedy)
    if sidecar["rows"] != len(rows):
        said = sidecar["rows"]
        raise UserError(f"{path}: {len(rows)} rows where {beside.name} says {said}; {remedy}")
    if sidecar["csv_sha256"] != sha256(content):
        raise UserError(f"{path}: its SHA-256 is not the one in {beside.name}; {remedy}")
    if sidecar["environment_sha256"] != environment_sha256(sidecar["environment"]):
        raise UserError(f"{beside}: its environment_sha256 is of another environment; {remedy}")
    return rows, sidecar


def _check(sidecar: dict, where: str, remedy: str) -> None:
    """Raises UserError where a sidecar lacks what readers ask for, or has it of another kind."""
    told = {key: kind for key, kind in OPTIONAL.items() if key in sidecar}
    _kinds(SIDECAR | told, sidecar, where, remedy)
    spent = {key: sidecar.get("overhead", {}).get(key) for key in SPENT}
    gpu = sidecar["environment"].get("gpu")
    for holds, key, value in (
        (sidecar["mode"] in MODES, "mode", sidecar["mode"]),
        (gpu is None or isinstance(gpu, dict), "environment.gpu", gpu),
        (all(value is None or _finite(value) for value in spent.values()), "overhead", spent),
    ):
        if not holds:
            raise UserError(f"{where}: {key!r} cannot be {value!r}; {remedy}")
    for ceiling in sidecar["ceilings"]:
        _kinds(CEILING, ceiling, f"{where}: ceilings", remedy)
        if not _finite(ceiling["value"]) or ceiling["value"] <= 0:
            problem = f"{ceiling['quantity']!r} cannot be {ceiling['value']!r}"
            raise UserError(f"{where}: ceilings: {problem}; {remedy}")


def _finite(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _kinds(wanted: Mapping[str, type], found: object, where: str, remedy: str) -> None:
    if not isinstance(found, dict):
        raise UserError(f"{where}: {found!r} is no object; {remedy}")
    for key, kind in wanted.items():
        if key not in found:
            raise UserError(f"{where}: has no {key!r}; {remedy}")
        if not isinstance(found[key], kind):
            raise UserError(f"{where}: {key!r} cannot be {found[key]!r}; {remedy}")


def environment_sha256(environment: Mapping[str, object]) -> str:
    """The name by which sidecars and tables call a machine's description."""
    return sha256(json.dumps(environment, sort_keys=True).encode())


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

"""The speed of light of this GPU: what memory and matrix units reach at most, measured here.

`python -m harness.ceilings --out ceilings.csv`; each value is the median of repeated runs of the
best of several forms. Without a GPU the file holds its header only.
"""

import argparse
import csv
import io
from pathlib import Path

from harness import command, lease
from harness.command import UserError

HEADER = ("quantity", "unit", "value", "source")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    if lease.gpus():
        with lease.hold(exclusive=True):
            from harness import probes

            rows = [(*row, "measured") for row in probes.measure()]
    write(options.out, rows)


def write(path: Path, rows: list[tuple]) -> None:
    """Rows as (quantity, unit, value, source)."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([HEADER, *rows])
    command.write_text(path, buffer.getvalue())


def read(path: Path) -> list[dict[str, object]]:
    """The rows of a ceilings file with `value` as float; UserError where it is none."""
    remedy = "make it with python -m harness.ceilings"
    try:
        lines = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {remedy}") from None
    if not lines or tuple(lines[0]) != HEADER:
        raise UserError(f"{path}:1: the header is not {','.join(HEADER)}; {remedy}")
    try:
        rows = [dict(zip(HEADER, line, strict=True)) for line in lines[1:]]
        return [row | {"value": float(row["value"])} for row in rows]
    except ValueError as error:
        raise UserError(f"{path}: {error}; {remedy}") from None


if __name__ == "__main__":
    command.run(main)

"""The speed of light of this GPU: what memory and matrix units reach at most, measured here.

`python -m harness.machine.ceilings --out ceilings.csv`; each value is the median of repeated runs
of the best of several forms. Below them stand the figures of the GPU's data sheet, where
`datasheets.csv` has them. Without a GPU the file holds its header only.
"""

import argparse
import csv
import io
import sys
from pathlib import Path

from harness import cli, files
from harness.cli import UserError
from harness.machine import datasheets, environment, gpu_lock

HEADER = ("quantity", "unit", "value", "sm_mhz", "source")
MEASURED = "measured"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    if gpu_lock.gpus():
        with gpu_lock.hold(exclusive=True) as gpu:
            from harness.machine import peaks

            measured = [(*row, MEASURED) for row in peaks.measure()]
        sheet = datasheets.of(environment.model(gpu.name))
        for line in datasheets.beyond(measured, sheet):
            print(f"tilewright: {line}", file=sys.stderr)
        rows = [*measured, *sheet]
    write(options.out, rows)


def write(path: Path, rows: list[tuple]) -> None:
    """Rows in the order of HEADER."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([HEADER, *rows])
    files.write_text(path, buffer.getvalue())


def read(path: Path) -> list[dict[str, object]]:
    """The rows of a ceilings file; `value` is a float, `sm_mhz` an int or None.

    Raises UserError where the file is none.
    """
    remedy = "make it with python -m harness.machine.ceilings"
    try:
        lines = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {remedy}") from None
    if not lines or tuple(lines[0]) != HEADER:
        raise UserError(f"{path}:1: the header is not {','.join(HEADER)}; {remedy}")
    try:
        return [_typed(dict(zip(HEADER, line, strict=True))) for line in lines[1:]]
    except ValueError as error:
        raise UserError(f"{path}: {error}; {remedy}") from None


def _typed(row: dict[str, str]) -> dict[str, object]:
    clock = row["sm_mhz"]
    return row | {"value": float(row["value"]), "sm_mhz": int(clock) if clock else None}


if __name__ == "__main__":
    cli.run(main)

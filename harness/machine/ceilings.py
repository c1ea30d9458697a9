"""The speed of light of this GPU: what memory and matrix units reach at most, measured here.

`python -m harness.machine.ceilings --out ceilings.csv`; each value is the median of repeated runs
of the best of several forms. Below them stand the figures of the GPU's data sheet, where
`datasheets.csv` has them. Without a GPU the file holds its header only. With several GPUs the
command measures one, and a measurement on another adds the rows of its own (`ensure`).
"""

import argparse
import contextlib
import csv
import io
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from harness import cli, files
from harness.cli import UserError
from harness.machine import datasheets, environment, gpu_lock

HEADER = ("quantity", "unit", "value", "sm_mhz", "source", "board")
MEASURED = "measured"
ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--held", action="store_true", help="the process that starts this one holds the GPU"
    )
    options = parser.parse_args()
    rows = []
    if visible := gpu_lock.gpus():
        held = contextlib.nullcontext(visible[0])
        with held if options.held else gpu_lock.hold(exclusive=True) as gpu:
            from harness.machine import peaks

            measured = [(*row, MEASURED) for row in peaks.measure()]
        sheet = datasheets.of(environment.model(gpu.name))
        for line in datasheets.beyond(measured, sheet):
            print(f"tilewright: {line}", file=sys.stderr)
        rows = [(*row, gpu.uuid) for row in (*measured, *sheet)]
    write(options.out, rows)


def ensure(path: Path, board: str) -> list[dict[str, object]]:
    """Return the rows of a board that this process holds, without its name; measure them if the
    file at `path` has none.

    Raises UserError where the file is none, or where the measurement fails.
    """
    if found := _of(board, read(path)):
        return found
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "ceilings.csv")
        call = [sys.executable, "-m", "harness.machine.ceilings", "--held", "--out", str(out)]
        if subprocess.run(call, cwd=ROOT).returncode:
            raise UserError(f"the ceilings of board {board} could not be measured, see above")
        rows = read(out)
    with files.locked(path):
        write(path, [tuple(row.values()) for row in (*read(path), *rows)])
    return _of(board, rows)


def _of(board: str, rows: Iterable[dict[str, object]]) -> list[dict[str, object]]:
    return [
        {key: value for key, value in row.items() if key != "board"}
        for row in rows
        if row["board"] == board
    ]


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

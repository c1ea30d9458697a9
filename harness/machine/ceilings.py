"""The speed of light of this GPU: what memory and matrix units reach at most, measured here.

`python -m harness.machine.ceilings --out ceilings.csv`; each value is the median of repeated runs
of the best of several forms. Below them stand the figures of the GPU's data sheet, where
`datasheets.csv` has them. Without a GPU the file holds its header only. Several GPUs are measured
side by side, before any job needs one. A measurement on a board that has no rows, since it was not
free then, adds them (`ensure`).
"""

import argparse
import contextlib
import csv
import io
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from harness import cli, files
from harness.cli import UserError
from harness.machine import datasheets, environment, gpu_lock, nvml

HEADER = ("quantity", "unit", "value", "sm_mhz", "source", "board")
MEASURED = "measured"
ROOT = Path(__file__).resolve().parents[2]
# How much longer than the first of several boards another may take. One that is in use is given up.
LONGER_S, PAUSE_S = 30.0, 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--board", help="UUID of one GPU; without it all are measured")
    parser.add_argument(
        "--held", action="store_true", help="the process that starts this one holds the GPU"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    boards = nvml.boards(gpu_lock.gpus())
    if options.held:
        rows = measure(boards[0])
    elif options.board or len(boards) == 1:
        with gpu_lock.hold(exclusive=True, uuid=options.board) as gpu:
            rows = measure(gpu)
    else:
        rows = side_by_side([gpu.uuid for gpu in boards])
    write(options.out, rows)


def measure(gpu: nvml.Gpu) -> list[tuple]:
    """Return the rows of the GPU that this process has alone, in the order of HEADER."""
    # It imports torch, which must not see the other GPUs.
    from harness.machine import peaks

    measured = [(*row, MEASURED) for row in peaks.measure()]
    sheet = datasheets.of(environment.model(gpu.name))
    for line in datasheets.beyond(measured, sheet):
        print(f"tilewright: {line}", file=sys.stderr)
    return [(*row, gpu.uuid) for row in (*measured, *sheet)]


def side_by_side(boards: Sequence[str]) -> list[tuple]:
    """Return the rows of several boards, each measured by a process of its own.

    When one is done the others have LONGER_S, and are ended then; a line names those that are left
    out. Raises UserError if that is all of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        outs = {board: Path(folder, f"{number}.csv") for number, board in enumerate(boards)}
        jobs = {board: _started(out, "--board", board) for board, out in outs.items()}
        with _ending(jobs.values()):
            deadline = None
            while any(job.poll() is None for job in jobs.values()):
                if deadline is None and any(job.poll() == 0 for job in jobs.values()):
                    deadline = time.monotonic() + LONGER_S
                if deadline is not None and time.monotonic() > deadline:
                    break
                time.sleep(PAUSE_S)
        rows = [row for board in boards if not jobs[board].wait() for row in read(outs[board])]
    found = {row["board"] for row in rows}
    if boards and not found:
        raise UserError("the ceilings of no GPU could be measured, see above")
    for board in boards:
        if board not in found:
            print(f"tilewright: board {board} has no ceilings yet, see above", file=sys.stderr)
    return [tuple(row.values()) for row in rows]


@contextlib.contextmanager
def _ending(jobs: Collection[subprocess.Popen]) -> Iterator[None]:
    """After the body, end the jobs: one that is left would use a GPU that nobody holds."""
    try:
        yield
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def _started(out: Path, *options: str) -> subprocess.Popen:
    call = [sys.executable, "-m", "harness.machine.ceilings", "--out", str(out), *options]
    return subprocess.Popen(call, cwd=ROOT)


def ensure(path: Path, board: str) -> list[dict[str, object]]:
    """Return the rows of a board that this process holds, without its name; measure them if the
    file at `path` has none.

    Raises UserError where the file is none, or where the measurement fails.
    """
    if found := _of(board, read(path)):
        return found
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "ceilings.csv")
        job = _started(out, "--held")
        with _ending([job]):
            failed = job.wait()
        if failed:
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

"""Shared by the scripts of the paper: a run's CSV files, errors, options, files written whole.

These scripts know the CSV files of docs/formats.md and nothing of the code that wrote them.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd

OURS = "ours"
TWIN = "ours_twin"
GRAPH, EVENTS = "graph", "events"
CELL = ["op", "case", "dtype", "pass"]
VERDICTS = ("better", "no difference", "worse", "undecided")
# A cell that moves so much is large.
LARGE_MIB = 64
HEADLINE, TRAINING = "headline", "training"
# The rows of a file that are meant where nothing else is said. No mean joins times by graphs with
# times by events, the tuned grid with drawn shapes, or two passes with both of them in one call.
USUAL = {
    "summary": {"set": "grid"},
    "verdicts": {"set": "grid", "timed_by": GRAPH, "part": HEADLINE},
    "claims": {"against": "each", "timed_by": GRAPH, "part": HEADLINE},
}
# The title of a figure for which a run has no rows; the report leaves it out.
EMPTY = "no rows for this figure"


class PaperError(Exception):
    """An error in one or two lines: the fault, its place, the remedy."""


def run(main: Callable[[argparse.Namespace], None], description: str) -> None:
    """Runs a script that makes `--out` from `--run`.

    A PaperError, or a file that the system does not give, ends it with a line and exit code 2.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    try:
        main(parser.parse_args())
    except PaperError as error:
        print(f"tilewright: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"tilewright: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)


def read(folder: Path, name: str) -> pd.DataFrame:
    """Return one CSV file of a run; an empty text is "", and another empty value is NaN.

    Raises PaperError if the file is missing, is no CSV or lacks a column that the run declares.
    """
    path = folder / f"{name}.csv"
    again = "remove it and run the study again"
    kinds = _declared(folder)[name]
    text = {column: str for column, about in kinds.items() if about["kind"] == "text"}
    try:
        frame = pd.read_csv(path, keep_default_na=False, na_values=[""], dtype=text)
    except FileNotFoundError:
        raise PaperError(f"{path}: missing; run the summarize stage first") from None
    except ValueError as error:
        raise PaperError(f"{path}: not readable as CSV ({error}); {again}") from None
    # A name with a part in angle brackets stands for any number of columns.
    if absent := [column for column in kinds if "<" not in column and column not in frame]:
        raise PaperError(f"{path}: has no column {absent[0]!r}; {again}")
    return frame.assign(**{column: frame[column].fillna("") for column in text})


def _declared(folder: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Return the kind and unit of each column by file, as the summary of the run declares them."""
    path = folder / "columns.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PaperError(f"{path}: missing; run the summarize stage first") from None
    except ValueError as error:
        raise PaperError(f"{path}: not readable as JSON ({error}); remove it") from None


def summary(folder: Path) -> pd.DataFrame:
    """summary.csv without the A/A twin, which measures the noise and is no rival."""
    frame = read(folder, "summary")
    return frame[frame["impl"] != TWIN]


def compared(folder: Path, *, every: bool = False, **wanted: str) -> pd.DataFrame:
    """The verdicts on cells that are meant; wanted: values of columns beside those of USUAL.

    every: those of training too, for what tells passes apart and takes no mean over them.
    """
    columns = USUAL["verdicts"] | wanted
    if every:
        del columns["part"]
    frame = read(folder, "verdicts")
    return frame[(frame[list(columns)] == list(columns.values())).all(axis=1)]


def fastest(folder: Path, **wanted) -> pd.DataFrame:
    """The verdict of each cell against its fastest baseline, the cell furthest behind first."""
    return compared(folder, **wanted).sort_values("ratio", kind="stable").drop_duplicates(CELL)


def claims(folder: Path, against: str = "each") -> pd.DataFrame:
    """The claims against "each" baseline or the "best", on times by events and on training too."""
    frame = read(folder, "claims")
    return frame[frame["against"] == against].reset_index(drop=True)


def kernels(folder: Path) -> pd.DataFrame:
    """survey.csv without the functions that kernels call and the libraries' own tests."""
    frame = read(folder, "survey")
    return frame[frame["role"] == "kernel"]


def rank(folder: Path) -> dict[str, int]:
    """The place of each family in this run: the fewer sizes its cases have, the earlier."""
    rows = summary(folder)
    sizes = rows.filter(like="size_").notna().sum(axis=1).groupby(rows["family"]).max()
    families = sorted(sizes.index, key=lambda family: (sizes[family], family))
    return {family: place for place, family in enumerate(families)}


def changed(folder: Path) -> set[str]:
    """The ops whose code has changed since their times were taken."""
    return {op for ops in read(folder, "runs")["changed_ops"] for op in ops.split()}


def settled(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows, for each op and implementation, of reports made on a GPU, where there are any."""
    gpu = frame["mode"] == "gpu"
    some = gpu.groupby([frame["op"], frame["impl"]]).transform("any")
    return frame[gpu | ~some]


def mean_ratio(cells: pd.DataFrame) -> float:
    """The geometric mean of the ratios of cells."""
    return float(np.exp(np.log(cells["ratio"]).mean()))


def natural(value: object) -> tuple:
    """A sort key that reads numbers as numbers and puts the forward pass first."""
    parts = re.split(r"(\d+)", str(value))
    return not str(value).startswith("forward"), [
        int(part) if part.isdigit() else part for part in parts
    ]


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a temporary name of the same kind beside `path`; renames it if the body succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")

"""Run the paper's scripts on a made-up run."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pandas as pd

from harness.results import columns

PAPER = Path(__file__).parents[2] / "paper"
FIGURES = sorted(path.stem for path in (PAPER / "figures").glob("[!_]*.py"))
TABLES = sorted(path.stem for path in (PAPER / "tables").glob("[!_]*.py"))


def script(path, run, out):
    """Run a script of the paper in this process as `python path --run run --out out` does."""
    before = sys.argv, list(sys.path)
    sys.argv = [str(path), "--run", str(run), "--out", str(out)]
    # The second is what their first import of their own adds, once in a process.
    sys.path[:0] = [str(path.parent), str(PAPER)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
    return out


def save(run, name, rows):
    """Writes rows as a CSV file of a run with all declared columns, and the declarations."""
    frame = pd.DataFrame(rows)
    declared = [column for column in columns.TABLES[name].header if "<" not in column]
    frame = frame.reindex(columns=[*frame, *(each for each in declared if each not in frame)])
    frame.to_csv(run / f"{name}.csv", index=False)
    (run / "columns.json").write_text(columns.declared())


def call(name, run, out, **environment):
    command = [sys.executable, PAPER / name, "--run", run, "--out", out]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, check=False
    )


def make(run, figures=FIGURES):
    """Make figures, all tables and all numbers of a summarized run."""
    for name in figures:
        script(PAPER / "figures" / f"{name}.py", run, run / "figures" / f"{name}.pdf")
    for name in TABLES:
        script(PAPER / "tables" / f"{name}.py", run, run / "tables" / f"{name}.tex")
    assert call("claims.py", run, run / "numbers.tex").returncode == 0
    return run


def numbers(run):
    text = (run / "numbers.tex").read_text()
    return dict(re.findall(r"\\csname result@(\w+)\\endcsname\{(.*)\}", text))

"""Checks the folder and the clock before Snakemake does, whose own words for them are a traceback.

Snakemake writes to `.snakemake` and to the run's folder. It compares the times of files: if a clock
was set back, an edit looks older than the output that it should renew.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from harness.cli import UserError

MEMORY = ".snakemake"
SOURCES = ("baselines", "config", "harness", "kernels", "network", "ops", "paper", "workflow")
# Clocks of the machines that share a folder differ by less.
AHEAD_S = 300.0


def check(root: Path, run: str) -> None:
    """Raise UserError if `root` or its `run` cannot be written, or if a file is of a later time."""
    for name in (MEMORY, run):
        refuse_unwritable(root, name)
    refuse_future(root, run, time.time())


def refuse_unwritable(root: Path, name: str) -> None:
    """Raise UserError if `name`, or the folder in which it would be made, cannot be written."""
    place = root / name
    while not place.exists() and place != root:
        place = place.parent
    if os.access(place, os.W_OK | os.X_OK):
        return
    shown = "this folder" if place == root else str(place.relative_to(root))
    owner = place.stat().st_uid
    why = f"it belongs to user {owner}" if owner != os.geteuid() else "it is read-only"
    raise UserError(
        f"{shown}: user {os.geteuid()} may not write there, {why}; a study writes to {MEMORY} and"
        f" {run_of(name)}: copy the project to a folder of your own, or change the rights"
    )


def run_of(name: str) -> str:
    """Return the folder that a message names as that of the outputs."""
    return "results" if name == MEMORY else name


def refuse_future(root: Path, run: str, now: float) -> None:
    """Raise UserError if a source or an output was written later than `now`, in s."""
    newest, path = max(
        ((path.stat().st_mtime, path) for path in files(root, run)), default=(0, root)
    )
    if newest <= now + AHEAD_S:
        return
    raise UserError(
        f"{path.relative_to(root)}: was written {newest - now:.0f} s after the time of this clock;"
        " set the clock. If it is right, give the files its time:"
        f" find {' '.join(SOURCES)} {run} -exec touch {{}} +"
    )


def files(root: Path, run: str) -> Iterator[Path]:
    """Yield the sources and the outputs whose times Snakemake compares."""
    for folder in (*SOURCES, run):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path

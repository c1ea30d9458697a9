"""Make a folder once for all processes of a test run."""

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def made_once(tmp_path_factory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` fills; the first process that asks has it filled, others wait.

    No test may change it.
    """
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent
    made, unfinished = folder / f"{name} once", folder / f"{name} unfinished"
    with FileLock(folder / f"{name}.lock"):
        if not made.exists():
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(made)
    return made

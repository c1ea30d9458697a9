"""Make a folder once for all processes of a test run."""

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def _shared(tmp_path_factory) -> Path:
    """Return the folder that all processes of this test run share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder


def made_once(tmp_path_factory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` fills; the first process that asks has it filled, others wait.

    No test may change it.
    """
    folder = _shared(tmp_path_factory)
    made, unfinished = folder / f"{name} once", folder / f"{name} unfinished"
    with FileLock(folder / f"{name}.lock"):
        if not made.exists():
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(made)
    return made

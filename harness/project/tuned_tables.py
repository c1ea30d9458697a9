"""The files of the tuned tables in force, as the kernels find them."""

import os
from pathlib import Path

VARIABLE = "TILEWRIGHT_TUNED"


def in_force(committed: Path) -> list[Path]:
    """The tables of the folder that VARIABLE names: `committed` if it is unset, none if empty."""
    named = os.environ.get(VARIABLE)
    folder = committed if named is None else Path(named)
    return [] if named == "" else sorted(folder.glob("*.json"))

"""List the cells without a time or a right result, with the reason, for tables and report."""

import re
from pathlib import Path

import pandas as pd
from _data import read, settled, summary

# Numbers in a reason that are others in each cell.
MEMORY = re.compile(r"(?<=CUDA out of memory)\. Tried to allocate .*", re.DOTALL)
FLOOR = re.compile(r"^(?:[\d.]+ us, )?(faster than the floor) of [\d.]+ us$")


def missing_times(folder: Path) -> pd.DataFrame:
    """The rows of summary.csv without a time that counts; equal reasons read the same."""
    rows = summary(folder)
    rows = rows[rows["status"] != "ok"]
    reason = rows["reason"].str.replace(MEMORY, "", regex=True)
    return rows.assign(reason=reason.str.replace(FLOOR, r"\1", regex=True))


def missing_results(folder: Path) -> pd.DataFrame:
    """The rows of gaps.csv, of the GPU where there are any: verified cells that are not right."""
    return settled(read(folder, "gaps"))

"""Rows of a dissected step or kernel, written and read back."""

import pandas as pd

from harness.measure.dissect import __main__ as command
from harness.results import columns


def written(tmp_path, name, rows):
    command.write(tmp_path / "out.csv", columns.DISSECTED[name], rows)
    frame = pd.read_csv(tmp_path / "out.csv", keep_default_na=False, na_values=[""])
    assert tuple(frame) == columns.DISSECTED[name].header
    return frame

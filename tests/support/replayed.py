"""Summarize a recorded run as a replay does; it takes a minute."""

import json
from pathlib import Path

import pytest

from harness.results import raw
from harness.summarize.__main__ import summarize
from tests.support.once import made_once

ROOT = Path(__file__).parents[2]
# The folders of raw rows of the recorded runs, as parameters of a fixture.
RECORDED = [
    pytest.param(raw_rows, id=raw_rows.parent.name, marks=pytest.mark.slow)
    for raw_rows in sorted((ROOT / "results/recorded").glob("*/raw"))
]


def replayed_once(tmp_path_factory, recorded: Path) -> Path:
    """Return the run, made once for all processes of the test run; no test may change it."""
    name = f"replayed {recorded.name}"
    return made_once(tmp_path_factory, name, lambda run: write(run, recorded, "replayed"))


def write(run: Path, recorded: Path, mode: str) -> None:
    """Write a summarized run with the times of another into the folder `run`."""
    (run / "raw").mkdir()
    for path in sorted((recorded / "raw").glob("*.csv")):
        rows, sidecar = raw.read(path, "record it")
        assert {row["op"] for row in rows} == {path.stem}
        copy = run / "raw" / path.name
        copy.write_bytes(path.read_bytes())
        copy.with_suffix(".json").write_text(json.dumps(sidecar | {"mode": mode}))
    (run / "environment.json").write_text(json.dumps(sidecar["environment"]))
    (run / "survey.csv").write_bytes((ROOT / "results/recorded/survey.csv").read_bytes())
    summarize(run, recorded)

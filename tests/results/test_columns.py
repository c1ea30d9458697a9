"""One declaration of each column: what is written, checked, read and documented follows from it."""

import csv
import json
import re
from pathlib import Path

import pytest

from harness import survey
from harness.calls import drawn
from harness.machine import ceilings, datasheets
from harness.results import columns
from ops._spec import PASSES

ROOT = Path(__file__).parents[2]
EVERY = [(table.name, column) for table in columns.TABLES.values() for column in table.columns]


def header(path):
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(next(csv.reader(file)))


@pytest.mark.parametrize("table", columns.TABLES.values(), ids=lambda table: table.name)
def test_a_table_names_each_column_once_and_says_what_it_is(table):
    assert len(set(table.header)) == len(table.header) > 0
    assert table.row and all(column.meaning for column in table.columns)
    assert {column.kind for column in table.columns} <= {"text", "count", "number", "flag"}
    assert not [c.name for c in table.columns if c.kind == "number" and not c.unit]
    assert not [c.name for c in table.columns if c.values and c.kind != "text"]


def test_a_name_for_several_columns_is_put_in_its_place():
    table = columns.SUMMARY
    found = table.expanded(letter="MN", impl=["ours", "x"])
    assert len(found) == len(table.columns) - 1 - 3 + 2 + 6
    at = found.index("size_M")
    assert found[at - 1 : at + 3] == ["impl_version", "size_M", "size_N", "flags"]
    at = found.index("speedup_vs_ours")
    ours = [f"speedup_vs_{impl}{end}" for impl in ("ours", "x") for end in ("", "_lo", "_hi")]
    assert found[at : at + 6] == ours
    assert found[at + 6 :] == ["status", "reason", "run_id"]
    assert table.expanded(letter=(), impl=())[-4:] == ["pct_sol", "status", "reason", "run_id"]


def test_a_declared_name_knows_its_columns():
    (sizes,) = (c for c in columns.SUMMARY.columns if c.name == "size_<letter>")
    assert sizes.names(["size_M", "resize_M", "size_", "size_M.x", "op"]) == ["size_M"]


def test_recorded_files_have_the_declared_columns():
    absent = {c.name for c in columns.RAW.columns if c.absent is not None}
    paths = list((ROOT / "results/recorded").glob("*/raw/*.csv"))
    assert paths
    for path in paths:
        found = header(path)
        assert found == tuple(n for n in columns.RAW.header if n in found or n not in absent)
    for name in ("survey", "published"):
        assert header(ROOT / f"results/recorded/{name}.csv") == columns.SURVEY.header
    assert header(datasheets.TABLE) == columns.DATASHEETS.header


def test_rooms_that_cannot_import_the_declarations_agree_with_them():
    assert columns.CEILINGS.header == ceilings.HEADER
    assert columns.SET.values == (drawn.GRID, drawn.DRAWN)
    assert tuple(PASSES) == columns.PASSES
    assert columns.SURVEY.header == survey.COLUMNS


def test_the_paper_finds_the_kind_of_each_column_it_reads():
    found = json.loads(columns.declared())
    assert set(found) == {table.name for table in (*columns.SUMMARIES, columns.SURVEY)}
    assert found["environment"]["value"]["kind"] == "text"
    assert found["datasheets"]["value"] == {"kind": "number", "unit": "as `unit` says"}
    assert list(found["summary"]) == list(columns.SUMMARY.header)


@pytest.mark.parametrize("name", ["summary", "verdicts", "claims", "overhead"])
def test_claims_of_the_paper_name_declared_columns(name):
    """`claims.yaml` is text: a column that is renamed here must be renamed there."""
    text = (ROOT / "paper/claims.yaml").read_text()
    blocks = re.findall(rf"source: {name}\n(.*?)(?=\n\w|\Z)", text, re.DOTALL)
    cited = {column for block in blocks for column in re.findall(r"column: (\w+)", block)}
    declared = columns.TABLES[name].columns
    assert cited and not [one for one in cited if not any(c.names([one]) for c in declared)]

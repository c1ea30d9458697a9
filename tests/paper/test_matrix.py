"""Check the matrix of capabilities in the paper: ordinary and hostile cells apart."""

import runpy
import sys

import pandas as pd
import pytest

from harness.summarize.__main__ import summarize
from tests.support import synthetic
from tests.support.paper_scripts import PAPER, save, script

SIZES = ("of", "cells", "passed", "declined")
PASSES = ("forward", "backward")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = synthetic.write_run(tmp_path_factory.mktemp("run"), ("attention",))
    summarize(folder, folder / "recorded")
    return folder


@pytest.fixture(scope="module")
def figure():
    sys.path.insert(0, str(PAPER / "figures"))
    try:
        return runpy.run_path(str(PAPER / "figures" / "capabilities.py"))
    finally:
        sys.path.remove(str(PAPER / "figures"))


@pytest.mark.parametrize(
    ("numbers", "status", "look"),
    [
        ((9, 9, 9, 0), "ok", "OK"),
        ((9, 9, 5, 4), "ok", "PARTLY"),
        ((9, 9, 8, 0), "oom", "PARTLY"),
        ((9, 8, 8, 0), "ok", "REACHED"),
        ((9, 0, 0, 0), "unreached", "REACHED"),
        ((9, 8, 7, 0), "inaccurate", "WRONG"),
        ((9, 9, 7, 1), "crashed", "WRONG"),
        ((9, 9, 8, 0), "hung", "WRONG"),
        ((9, 9, 0, 9), "unsupported", "DECLINED"),
        ((0, 0, 0, 0), "unavailable", "ABSENT"),
    ],
)
def test_a_mark_says_what_the_ordinary_cells_were(figure, numbers, status, look):
    row = dict(zip(SIZES, numbers, strict=True)) | {"status": status, "pass": "forward"}
    assert figure["_look"](row) == figure[look]


def test_the_figure_gives_shares_and_hostile_cells(figure, run, tmp_path):
    rows = pd.read_csv(run / "capabilities.csv")
    found = {impl: figure["_numbers"](some) for impl, some in rows.groupby("impl")}
    # Attention has one hostile case in each of three dtypes; the last ordinary case was left out.
    assert found["sdpa_cudnn"] == ("89 %", "2/3")
    assert found["ours"] == ("100 %", "3/3")
    assert figure["_numbers"](rows[:0]) == ("--", "--")
    out = script(PAPER / "figures" / "capabilities.py", run, tmp_path / "capabilities.pdf")
    drawn = out.with_suffix(".svg").read_text()
    assert all(text in drawn for text in ("89 %", "2/3", "hostile passed"))


@pytest.mark.parametrize(
    ("status", "look"),
    [
        ("unavailable", "ABSENT"),
        ("crashed", "WRONG"),
        ("hung", "WRONG"),
        ("unsupported", "DECLINED"),
    ],
)
def test_a_report_without_cells_fills_the_fields_of_its_op(figure, status, look):
    there = dict(zip(SIZES, (9, 9, 9, 0), strict=True)) | {"op": "dot", "status": "ok"}
    names = ("impl", "pass", "dtype", "status", *SIZES)
    none = dict(zip(names, ("other", "", "", status, 0, 0, 0, 0), strict=True)) | {"op": "dot"}
    rows = [there | {"impl": "ours", "pass": name, "dtype": "float16"} for name in PASSES]
    found = figure["_fields"](pd.DataFrame([*rows, none]))
    own = {key[1:]: look for key, look in found.items() if key[0] == "ours"}
    assert own == {(line, "dot", 1): figure["OK"] for line in range(2)}
    other = found.xs("other", level="impl")
    assert len(other) == 2 * len(figure["DTYPES"])
    assert set(other) == {figure[look]}


def test_a_share_is_neither_nothing_nor_all_unless_it_is(figure):
    found = [figure["_percent"](part, 1000) for part in (0, 1, 500, 999, 1000)]
    assert found == [0, 1, 50, 99, 100]


def test_the_table_counts_hostile_cells_apart_and_judges_by_the_others(run, tmp_path):
    table = script(PAPER / "tables" / "verification.py", run, tmp_path / "v.tex").read_text()
    line = next(line for line in table.splitlines() if "cudnn" in line)
    # Columns: ordinary cells passed of those reached, then hostile ones. A hostile failure is no
    # status.
    assert "& 8/8 & 2/3 &" in line and line.endswith(r"& ok \\")


def test_the_gaps_in_hostile_inputs_have_a_part_of_their_own(run, tmp_path):
    table = script(PAPER / "tables" / "gaps.py", run, tmp_path / "g.tex").read_text()
    ordinary, hostile = table.split("Hostile inputs")
    assert "time limit" in ordinary and "far from the oracle" not in ordinary
    assert "far from the oracle" in hostile and "time limit" not in hostile


def test_a_page_without_hostile_gaps_has_no_part_for_them(run, tmp_path):
    rows = pd.read_csv(run / "gaps.csv")
    save(tmp_path, "gaps", rows[~rows["hostile"]])
    table = script(PAPER / "tables" / "gaps.py", tmp_path, tmp_path / "g.tex").read_text()
    assert "Hostile" not in table and "time limit" in table

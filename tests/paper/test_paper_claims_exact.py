"""Check numbers of the text from a few rows, with results that a hand computes; each test is quick.

`make mutants` runs these tests. The study's own claims.yaml is tested in test_paper.py.
"""

import argparse
import importlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import paper
from tests.support.paper_scripts import save

PAPER = Path(next(iter(paper.__path__)))
ROWS = pd.DataFrame(
    {
        "op": ["add", "add", "add", "mul", "mul"],
        "case": ["N1", "N1", "N2", "N1", "N2"],
        "dtype": "float32",
        "pass": "forward",
        "impl": ["ours", "rival", "ours", "ours", "rival"],
        "set": ["grid", "grid", "grid", "grid", "drawn"],
        "bound": ["read", "", "read", "", "write"],
        "size_N": [1.0, 1.0, 2.0, 1.0, 2.0],
        "device_us": [2.0, 8.0, 1.0, np.nan, 16.0],
        "floor_us": [1.0, 2.0, 4.0, 1.0, 1.0],
    }
)
EVERY = {"set": ["grid", "drawn"]}


@pytest.fixture(scope="module")
def claims():
    """Import paper/claims.py, which finds `_data` beside itself as a script does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PAPER)
        return importlib.import_module("paper.claims")


@pytest.fixture
def value(claims):
    def text(key="a_key", rows=ROWS, source="summary", **claim):
        claim = {"source": source, "column": "device_us", "aggregate": "max"} | claim
        return claims.value(key, claim, {source: rows})

    return text


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("max", "16.0"), ("min", "1.0"), ("sum", "27.0"), ("median", "5.0"), ("p95", "14.80"),
        ("geomean", "4.0"), ("count", "4"), ("distinct", "4"), ("single", None),
    ],
)  # fmt: skip
def test_values_become_one(value, aggregate, expected):
    form = {"format": ".2f"} if aggregate == "p95" else {"format": ".1f"}
    form = {} if aggregate in ("count", "distinct") else form
    assert value(aggregate=aggregate, where=EVERY, **form) == expected


def test_a_single_value_is_the_same_in_all_rows(value):
    assert value(aggregate="single", where={"impl": "rival"}) == "8.0"
    assert value(aggregate="single", where={"op": "add", "impl": "ours"}) is None
    assert value(column="op", aggregate="single", where={"op": "add"}) == "add"


def test_rows_are_those_of_the_tuned_grid_unless_the_claim_says_more(value):
    assert value() == "8.0"
    assert value(where={"impl": "ours"}) == "2.0"
    assert value(where=EVERY) == value(where={"set": "drawn"}) == "16.0"
    assert value(where={"op": ["add", "mul"], "impl": ["ours", "none"]}) == "2.0"
    assert value(source="verification") == "16.0"


def test_rows_with_the_least_value_at_least_and_the_largest_size(value):
    assert value(aggregate="min", at_least={"device_us": 2.0}) == "2.0"
    assert value(aggregate="count", at_least={"device_us": 2.0, "floor_us": 2.0}) == "1"
    assert value(aggregate="sum", largest="size_N") == "1.0"
    assert value(aggregate="sum", largest="size_N", where=EVERY) == "17.0"


def test_only_rows_with_a_value_count(value):
    assert value(column="bound", aggregate="count") == "2"
    assert value(aggregate="count") == "3"
    assert value(where={"op": "mul"}) is None
    assert value(where={"op": "mul"}, aggregate="count") == "0"
    assert value(where={"op": "mul"}, aggregate="count", rows=ROWS[:0]) is None


@pytest.mark.parametrize(
    "claim",
    [{"where": {"size_M": 1}}, {"at_least": {"size_M": 1}}, {"largest": "size_M"},
     {"per": "size_M"}, {"column": "size_M"}],
)  # fmt: skip
def test_a_run_without_the_column_supports_nothing(value, claim):
    assert value(**claim) is None
    assert value(**claim | {"aggregate": "count"}) is None


def test_values_are_divided_row_by_row_and_gaps_are_from_one(value):
    assert value(per="floor_us") == "4.0"
    assert value(per="floor_us", aggregate="min") == "0.25"
    assert value(per="floor_us", aggregate="min", gap=True) == "0.75"
    assert value(per="floor_us", aggregate="min", gap=False) == "0.25"
    assert value(aggregate="sum", gap=True) == "8.0"


def test_cells_are_reduced_before_values_are_kept_below(value):
    assert value(aggregate="sum", within="max") == "9.0"
    assert value(aggregate="sum", within="min", where=EVERY) == "19.0"
    assert value(aggregate="count", below=8) == "2"
    assert value(aggregate="count", below=8, within="max") == "1"


def test_numbers_are_scaled_and_formatted(value):
    assert value(factor=3) == "24.0"
    assert value(factor=0.5, format=".2f") == "4.00"
    assert value(format=".0f") == "8"


@pytest.mark.parametrize(
    ("key", "claim", "message"),
    [
        ("a-b", {}, "a-b: letters, digits and underscores only"),
        ("_", {}, "_: letters, digits and underscores only"),
        ("a", {"colour": 1, "size": 2}, r"a: unknown or missing \['colour', 'size'\]"),
        ("a", {"aggregate": "mode"}, "a: aggregate is one of single, max, min, sum, median, p95,"),
        ("a", {"within": "mode"}, "a: within is one of single, max, min"),
    ],
)
def test_an_ill_formed_claim_is_named(claims, value, key, claim, message):
    with pytest.raises(claims._data.PaperError, match=f"^claims.yaml: {message}"):
        value(key, **claim)


@pytest.mark.parametrize("missing", ["source", "column", "aggregate"])
def test_a_claim_needs_what_it_is_made_of(claims, missing):
    claim = {"source": "summary", "column": "op", "aggregate": "count"}
    del claim[missing]
    with pytest.raises(claims._data.PaperError, match=rf"unknown or missing \['{missing}'\]"):
        claims.value("a", claim, {"summary": ROWS})


def test_the_file_defines_each_number_and_names_what_has_none(claims, tmp_path, monkeypatch):
    save(tmp_path, "summary", ROWS.assign(family="vector", status="ok"))
    book = tmp_path / "claims.yaml"
    book.write_text(
        "ops: {source: summary, column: op, aggregate: distinct}\n"
        "none: {source: summary, column: size_K, aggregate: max}\n"
    )
    monkeypatch.setattr(claims, "CLAIMS", book)
    claims.main(argparse.Namespace(run=tmp_path, out=tmp_path / "numbers.tex"))
    assert (tmp_path / "numbers.tex").read_text() == (
        "% Generated by claims.py from claims.yaml; edit that instead.\n"
        "\\expandafter\\def\\csname result@ops\\endcsname{2}\n"
        "% none: no row of summary.csv supports it\n"
    )
    book.write_text("ops: {column: op, aggregate: distinct}\n")
    with pytest.raises(claims._data.PaperError, match=r"unknown or missing \['source'\]"):
        claims.main(argparse.Namespace(run=tmp_path, out=tmp_path / "numbers.tex"))

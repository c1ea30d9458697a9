"""Check the matrix of capabilities and its gaps on reports with known content."""

import json
from pathlib import Path

import pytest

from harness.project import source_tree
from harness.results import columns, reports
from harness.summarize import capabilities

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "results/recorded/hopper"
FAMILIES = {"add": "vector", "dot": "vector", "softmax": "softmax"}


def cell(case, status="ok", dtype="float16", pass_="forward", reason=""):
    return {"case": case, "dtype": dtype, "pass": pass_, "status": status, "reason": reason}


def report(op, impl, *cells, status="ok", reason="", version="1.0"):
    same = {"op": op, "impl": impl, "impl_version": version, "mode": "gpu"}
    return same | {"status": status, "reason": reason, "cells": list(cells)}


def row_of(*cells):
    (row,) = capabilities.rows([report("add", "lib", *cells)], FAMILIES)
    return row


@pytest.mark.parametrize(
    ("statuses", "status", "passed", "declined", "state"),
    [
        (["ok", "ok"], "ok", 2, 0, "ok"),
        (["unsupported", "ok"], "ok", 1, 1, "partly"),
        (["unsupported", "unsupported"], "unsupported", 0, 2, "unsupported"),
        (["ok", "unsupported", "inaccurate", "crashed"], "crashed", 1, 1, "wrong"),
        (["ok", "inaccurate", "unreached"], "inaccurate", 1, 0, "wrong"),
        (["ok", "hung"], "hung", 1, 0, "wrong"),
        (["oom", "inaccurate", "ok"], "inaccurate", 1, 0, "wrong"),
        (["oom", "ok"], "oom", 1, 0, "partly"),
        (["ok", "unreached"], "ok", 1, 0, "unreached"),
        (["ok", "withdrawn"], "ok", 1, 0, "unreached"),
        (["unreached", "unsupported"], "unsupported", 0, 1, "unreached"),
        (["unreached", "unreached"], "unreached", 0, 0, "unreached"),
    ],
)
def test_the_worst_cell_speaks_for_a_pass_and_dtype(statuses, status, passed, declined, state):
    row = row_of(*(cell(f"N{i + 2}", one, reason=one) for i, one in enumerate(statuses)))
    assert (row["status"], row["passed"], row["declined"]) == (status, passed, declined)
    assert row["cells"] == sum(one not in capabilities.UNKNOWN for one in statuses)
    assert row["of"] == len(statuses)
    assert capabilities.state(row) == state
    if status not in ("ok", "unreached"):
        assert (row["case"], row["reason"]) == (f"N{statuses.index(status) + 2}", status)
    assert set(row) <= set(columns.CAPABILITIES.header)


@pytest.mark.parametrize("status", ["inaccurate", "crashed", "hung", "oom", "unreached"])
def test_no_mark_rests_on_a_hostile_case(status):
    hostile = [cell("N9-denormal", status, reason="odd"), cell("N0", "unsupported"), cell("N1")]
    row = row_of(cell("N9"), *hostile)
    assert capabilities.state(row) == "ok"
    assert (row["of"], row["cells"], row["passed"], row["status"]) == (1, 1, 1, "ok")
    reached = 3 - (status == "unreached")
    numbers = [row[f"hostile{name}"] for name in ("_of", "", "_passed", "_declined")]
    assert numbers == [3, reached, 1, 1]


def test_case_is_what_its_cell_says_else_what_its_name_says():
    said = cell("N9", "inaccurate") | {"hostile": True}
    assert capabilities.state(row_of(cell("N8"), said)) == "ok"
    assert capabilities.state(row_of(cell("N8"), cell("N9", "inaccurate"))) == "wrong"


MANY = [f"N{n}-inf" for n in range(400)]


@pytest.mark.parametrize(
    ("cells", "page", "score"),
    [
        (["N2", "N3-large"], "·●·", "1/1"),
        (["N2", "N3 unreached", "N4 unreached"], "·◔· 33 %", "·"),
        (["N2", "N3 unsupported", "N4-inf unsupported"], "·◐·", "○"),
        (["N2 unreached", "N4-inf unreached"], "·◔· 0 %", "◔ 0 %"),
        (["N2 inaccurate", "N3 unreached"], "·✗· 50 %", "·"),
        (["N2", "N4-inf", "N4-spike inaccurate", "N4-large unreached"], "·●·", "1/2 (67 %)"),
        (
            ["N2", *(f"N{n}-inf" for n in range(400)), "N9-large unreached"],
            "·●·",
            "400/400 (99 %)",
        ),
    ],
)
def test_a_mark_for_all_is_given_where_all_was_reached(cells, page, score):
    found = [report("add", "lib", *(cell(*one.split()) for one in cells))]
    ordinary, hostile = capabilities.page(found, FAMILIES).split("## Hostile inputs")
    assert f"| `lib` 1.0 | {page} |" in ordinary
    assert f"| `lib` 1.0 | {score} |" in hostile


def test_gaps_in_hostile_inputs_stand_apart():
    cells = [
        cell("N2"),
        cell("N2-large", "inaccurate", reason="far"),
        cell("N3", "oom", reason="m"),
    ]
    page = capabilities.page([report("add", "lib", *cells)], FAMILIES)
    ordinary, hostile = page.split("### Gaps in hostile inputs")
    assert (
        "| `lib` | oom | m | add forward float16 (1) |" in ordinary.split("### Gaps in ordinary")[1]
    )
    assert "inaccurate" not in ordinary.split("### Gaps in ordinary")[1]
    assert "| `lib` | inaccurate | far | add forward float16 (1) |" in hostile


def test_cells_left_out_by_the_time_limit_are_a_gap():
    left = report("add", "lib", cell("N2"), cell("N3", "unreached", "float32", reason="limit"))
    states = {row["dtype"]: row["status"] for row in capabilities.rows([left], FAMILIES)}
    assert states == {"float16": "ok", "float32": "unreached"}
    assert [row["reason"] for row in capabilities.gaps([left], FAMILIES)] == ["limit"]


def test_passes_and_dtypes_have_rows_of_their_own():
    cells = [cell("N8"), cell("N8", dtype="float32"), cell("N8", pass_="backward")]
    rows = capabilities.rows([report("add", "lib", *cells)], FAMILIES)
    places = {(row["pass"], row["dtype"]) for row in rows}
    assert places == {("forward", "float16"), ("forward", "float32"), ("backward", "float16")}


def test_an_absent_library_says_why():
    absent = report("add", "lib", status="unavailable", reason="No module named 'lib'", version="")
    (row,) = capabilities.rows([absent], FAMILIES)
    assert (row["status"], row["reason"]) == ("unavailable", "No module named 'lib'")
    (gap,) = capabilities.gaps([absent], FAMILIES)
    assert (gap["status"], gap["reason"], gap["cells"]) == (row["status"], row["reason"], 0)


def test_gaps_count_the_cells_of_each_reason():
    cells = [cell("N8"), cell("N2", "inaccurate", reason="a"), cell("N3", "inaccurate", reason="b")]
    cells += [cell("N4", "inaccurate", reason="a"), cell("N5", "unsupported", reason="a")]
    found = list(capabilities.gaps([report("add", "lib", *cells)], FAMILIES))
    counted = {(row["status"], row["reason"]): (row["cells"], row["case"]) for row in found}
    assert counted == {
        ("inaccurate", "a"): (2, "N2"),
        ("inaccurate", "b"): (1, "N3"),
        ("unsupported", "a"): (1, "N5"),
    }
    assert set(found[0]) <= set(columns.GAPS.header)


REPORTS = [
    report("add", "ours", *(cell("N8", dtype=d) for d in ("float32", "float16", "bfloat16"))),
    report("add", "lib", cell("N8", dtype="float32"), cell("N8", "inaccurate", reason="a*b")),
    report("softmax", "absent", status="unavailable", reason="no driver", version=""),
]


def test_the_page_has_a_sign_for_each_dtype_and_a_line_for_each_gap():
    page = capabilities.page(REPORTS, FAMILIES)
    assert "| `ours` 1.0 | ●●● |" in page
    assert "| `lib` 1.0 | ●✗· |" in page
    assert "| `lib` | inaccurate | a\\*b | add forward float16 (1) |" in page
    assert "| `absent` | unavailable | no driver | softmax |" in page


def test_reasons_that_differ_in_sizes_stand_together():
    cells = [cell(f"N{n}", "unsupported", reason=f"no {n} columns") for n in (3, 5, 5)]
    cells += [cell("N7", "unsupported", "float32", reason="another")]
    page = capabilities.page([report("add", "lib", *cells)], FAMILIES)
    assert "| `lib` | unsupported | no 5 columns (and the like) | add forward float16 (3) |" in page
    assert "| `lib` | unsupported | another | add forward float32 (1) |" in page


def test_the_committed_page_is_that_of_the_recorded_run():
    found, families = capabilities.recorded(RECORDED)
    page = (ROOT / "docs/capabilities.md").read_text(encoding="utf-8")
    assert page == capabilities.page(found, families), "run: make capabilities"


def test_an_op_that_a_baseline_lacks_is_in_no_matrix(tmp_path):
    """An old record still has flash-attn's product, which no file offers any more."""
    for op, impl in (("matmul", "flash_attn_2"), ("attention", "flash_attn_2"), ("matmul", "gone")):
        path = tmp_path / "verify" / op / f"{impl}.json"
        text = {"op": op, "impl": impl, "impl_version": "1", "mode": "gpu", "code_sha256": ""}
        text |= {"status": "ok", "reason": "", "cells": []}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(text))
    found = reports.verified((tmp_path / "verify").iterdir())
    assert [(one["op"], one["impl"]) for one in found] == [("attention", "flash_attn_2")]


def test_the_committed_matrix_has_what_the_tree_offers():
    """Each entry of the matrix by family belongs to a baseline with a function of that family."""
    text = (ROOT / "docs/capabilities.md").read_text().partition("## Hostile inputs")[2]
    text = text.partition("## Gaps")[0]
    head, _, *lines = [x.strip("| ").split(" | ") for x in text.splitlines() if x[:1] == "|"]
    families = source_tree.ops(ROOT)
    seen = 0
    for name, *cells in lines:
        impl = name.strip("`").split("`")[0]
        if impl not in source_tree.stems(ROOT, "baselines"):
            continue
        offered = source_tree.public_names(ROOT, f"baselines/{impl}.py") & set(families)
        for family, cell in zip(head[1:], cells, strict=True):
            has = any(families[op] == family for op in offered)
            assert has or cell == "·", f"{impl} {family}"
            seen += 1
    assert seen > 100

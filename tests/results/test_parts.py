"""Check that parts of one measurement are joined cell by cell, and other times are not."""

import copy
import json

import pytest

from harness.cli import UserError
from harness.results import manifest, parts, raw, record, times
from tests.support.raw_files import PLAIN, save

IMPLS = ("ours", "ours_twin", "torch_eager")
CASES = ("M1-N1", "M2-N2", "M3-N3")
PLACE = {"dtype": "float16", "pass": "forward"}
PASSED = [PLACE | {"case": case, "status": "ok", "reason": ""} for case in CASES]
VERDICT = {"impl_version": "3", "code_sha256": "c", "cells": PASSED}
REPORTS = {impl: (VERDICT, VERDICT) for impl in ("ours", "torch_eager")}


def rows_of(board: str, *timed: str, us: float = 10.0) -> list[dict]:
    """The rows of all cases on a board; the cases that are not `timed` were not reached."""
    absent = dict.fromkeys((*raw.TIMES, *raw.READINGS)) | {"status": "unreached"}
    return [
        PLAIN
        | {"case": case, "impl": impl, "board": board, "device_us": us, "sm_mhz": 1980}
        | (absent if case not in timed else {})
        for case in CASES
        for impl in IMPLS
    ]


def sidecar_of(board: str, lacking: int, **changes) -> dict:
    gpu = {"name": "H200", "driver": "580", "uuid": board}
    environment = {"gpu": gpu, "versions": {"torch": "2.11"}, "hashes": {"torch": "1"}}
    rate = {"quantity": "read", "unit": "GB/s", "value": 4000.0 + len(board), "source": "measured"}
    return {
        "op": "softmax",
        "mode": "measured",
        "run_id": f"run-{board}",
        "date": "2000-01-01T00:00:00Z",
        "commit": "0" * 40,
        "dirty": False,
        "environment": environment,
        "environment_sha256": raw.environment_sha256(environment),
        "harness_sha256": "h",
        "tables_sha256": "t",
        "ceilings": [rate],
        "schedule": {"drawn_seed": 7, "min_blocks": 16, "seed": len(board), "cores": len(board)},
        "overhead": {"total_s": 10.0, "timed_s": 6.0, "first_s": 1.0, "share": 0.3},
        "unreached": lacking,
    } | changes


OLD = rows_of("A", "M1-N1", us=11.0), sidecar_of("A", 2)
NEW = rows_of("BB", "M2-N2", "M3-N3", us=12.0), sidecar_of("BB", 1)


def test_a_cell_is_of_the_part_that_timed_it():
    rows, sidecar, reports = parts.joined(OLD, NEW, REPORTS)
    assert reports == {}
    found = [(row["case"], row["board"], row["device_us"]) for row in rows]
    where = {"M1-N1": ("A", 11.0), "M2-N2": ("BB", 12.0), "M3-N3": ("BB", 12.0)}
    assert found == [(case, *where[case]) for case in CASES for _ in IMPLS]
    assert sidecar["unreached"] == 0 and sidecar["run_id"] == "run-BB"
    (earlier,) = sidecar["earlier"]
    assert earlier["run_id"] == "run-A" and not set(parts.OF_WHOLE) & set(earlier)
    assert earlier["cells"] == ["M1-N1 float16 forward"]
    assert [part["run_id"] for part in parts.of(sidecar)] == ["run-A", "run-BB"]
    assert all(part["op"] == "softmax" for part in parts.of(sidecar))


def test_a_cell_that_both_parts_timed_is_of_the_new_one():
    both = rows_of("A", *CASES[:2], us=11.0), sidecar_of("A", 1)
    rows, _, _ = parts.joined(both, NEW, REPORTS)
    assert {row["case"]: row["board"] for row in rows} == {
        "M1-N1": "A", "M2-N2": "BB", "M3-N3": "BB",
    }  # fmt: skip


def test_a_part_that_adds_nothing_leaves_no_trace():
    whole = rows_of("BB", *CASES), sidecar_of("BB", 0)
    rows, sidecar, _ = parts.joined(OLD, whole, REPORTS)
    assert rows == whole[0] and "earlier" not in sidecar


def test_a_third_part_keeps_the_first_two_and_counts_the_cells_that_none_has():
    first = rows_of("A", "M1-N1"), sidecar_of("A", 2)
    second = rows_of("BB", "M2-N2"), sidecar_of("BB", 2)
    two = parts.joined(first, second, REPORTS)[:2]
    assert two[1]["unreached"] == 1
    third = rows_of("CCC", "M3-N3"), sidecar_of("CCC", 2)
    rows, sidecar, _ = parts.joined(two, third, REPORTS)
    assert [part["run_id"] for part in parts.of(sidecar)] == ["run-A", "run-BB", "run-CCC"]
    assert {row["board"] for row in rows} == {"A", "BB", "CCC"} and sidecar["unreached"] == 0
    cells = [part["cells"] for part in sidecar["earlier"]]
    assert cells == [["M1-N1 float16 forward"], ["M2-N2 float16 forward"]]


def changed(sidecar: dict, *way: str) -> dict:
    sidecar = copy.deepcopy(sidecar)
    inner = sidecar
    for key in way[:-1]:
        inner = inner[key]
    inner[way[-1]] = "another"
    return sidecar


@pytest.mark.parametrize(
    ("way", "named"),
    [
        (("environment", "gpu", "name"), "GPU models"),
        (("environment", "gpu", "driver"), "drivers"),
        (("environment", "versions", "torch"), "versions of packages"),
        (("environment", "hashes", "torch"), "files of packages"),
        (("harness_sha256",), "harnesses"),
        (("tables_sha256",), "tuned tables"),
        (("schedule", "drawn_seed"), "drawn shapes"),
        (("schedule", "min_blocks"), "schedules"),
    ],
)
def test_times_of_another_measurement_are_refused(way, named):
    with pytest.raises(UserError, match=f"no parts of one measurement: other .*{named}"):
        parts.joined((OLD[0], changed(OLD[1], *way)), NEW, REPORTS)


@pytest.mark.parametrize("way", ["seed", "cores"])
def test_the_order_and_the_cores_may_differ(way):
    parts.joined((OLD[0], changed(OLD[1], "schedule", way)), NEW, REPORTS)


def test_times_that_other_rules_judged_are_refused():
    reports = REPORTS | {"torch_eager": (VERDICT | {"guard": 1}, VERDICT)}
    with pytest.raises(UserError, match="other rules of the verification of torch_eager"):
        parts.joined(OLD, NEW, reports)


@pytest.mark.parametrize("key", ["code_sha256", "impl_version"])
def test_times_of_other_code_are_refused(key):
    reports = REPORTS | {"torch_eager": (VERDICT | {key: "x"}, VERDICT)}
    with pytest.raises(UserError, match="other code of torch_eager"):
        parts.joined(OLD, NEW, reports)
    with pytest.raises(UserError, match="other code of torch_eager"):
        parts.joined(OLD, NEW, REPORTS | {"torch_eager": (None, VERDICT)})


def test_times_of_other_shapes_are_refused():
    other = [row for row in OLD[0] if row["case"] != "M3-N3"]
    with pytest.raises(UserError, match="other shapes, dtypes or passes"):
        parts.joined((other, OLD[1]), NEW, REPORTS)


def judged(case: str, *verdicts: str | None) -> dict:
    """The reports of PyTorch with these verdicts on a case; None leaves it out."""
    pair = []
    for verdict in verdicts:
        others = [cell for cell in PASSED if cell["case"] != case]
        own = PLACE | {"case": case, "status": verdict, "reason": "a reason"}
        pair.append(VERDICT | {"cells": [*others, own] if verdict else others})
    return REPORTS | {"torch_eager": tuple(pair)}


@pytest.mark.parametrize(
    ("before", "now"),
    [("ok", "inaccurate"), ("ok", None), ("unreached", "unreached"), (None, "unreached")],
)
def test_a_time_that_the_new_verification_does_not_pass_is_not_taken(before, now):
    with pytest.raises(UserError, match="does not pass torch_eager M1-N1 float16 forward"):
        parts.joined(OLD, NEW, judged("M1-N1", before, now))
    # It is no verdict on a cell of the new part.
    parts.joined(OLD, NEW, judged("M2-N2", before, now))


def test_a_cell_that_the_new_verification_had_no_time_for_keeps_its_verdict():
    pair = judged("M1-N1", "ok", "unreached")
    _, _, reports = parts.joined(OLD, NEW, pair)
    assert list(reports) == ["torch_eager"]
    found = {cell["case"]: cell for cell in reports["torch_eager"]["cells"]}
    assert {case: cell["status"] for case, cell in found.items()} == dict.fromkeys(CASES, "ok")
    assert found["M1-N1"] in pair["torch_eager"][0]["cells"]
    assert (reports["torch_eager"]["status"], reports["torch_eager"]["code_sha256"]) == ("ok", "c")
    # A cell of the new part stays as the new verification has it.
    assert parts.joined(OLD, NEW, judged("M2-N2", "ok", "unreached"))[2] == {}


@pytest.mark.parametrize("status", ["ok", "inaccurate", "crashed"])
def test_a_verdict_of_the_verification_of_another_part_stays_with_its_seed(status):
    # An edge case, which neither part times.
    edge = PLACE | {"case": "M0-N1", "kind": "edge", "reason": ""}
    before = VERDICT | {"seed": 5, "cells": [*PASSED, edge | {"status": status}]}
    after = VERDICT | {"seed": 6, "cells": [*PASSED, edge | {"status": "unreached"}]}
    _, _, reports = parts.joined(OLD, NEW, REPORTS | {"torch_eager": (before, after)})
    found = reports["torch_eager"]
    assert found["cells"][-1] == edge | {"status": status, "seed": 5}
    assert (found["status"], found["seed"]) == (status, 6)
    # A third part carries it on, with the seed of the first.
    third = after | {"seed": 7}
    _, _, reports = parts.joined(OLD, NEW, REPORTS | {"torch_eager": (found, third)})
    assert reports["torch_eager"]["cells"][-1] == edge | {"status": status, "seed": 5}
    # A verification that reached it has the last word.
    last = after | {"cells": [*PASSED, edge | {"status": "oom"}]}
    assert parts.joined(OLD, NEW, REPORTS | {"torch_eager": (found, last)})[2] == {}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_joined_report_keeps_the_ledger_of_cells_that_the_new_one_has_not_reached(dtype):
    """If an op has two dtypes, each of two parts may time one alone."""

    def told(case: str, dtype: str, of: int) -> dict:
        return PLACE | {"case": case, "dtype": dtype, "status": "ok", "reason": "", "launches": of}

    edge = PLACE | {"case": "M0-N1", "kind": "edge", "reason": "", "status": "ok"}
    first = PLACE | {"case": "M1-N1", "dtype": dtype, "kind": "sweep", "reason": ""}
    others = [each for each in PASSED if (each["case"], dtype) != ("M1-N1", "float16")]
    before = VERDICT | {
        "cells": [*others, first | {"status": "ok"}, edge | {"status": "unreached"}]
    }
    before |= {"ledger": [told("M1-N1", dtype, 1)]}
    after = VERDICT | {"cells": [*others, first | {"status": "unreached"}, edge]}
    # Its entry is that of an edge case, in float16.
    after |= {"ledger": [told("M0-N1", "float16", 2)]}
    found = parts.joined(OLD, NEW, REPORTS | {"torch_eager": (before, after)})[2]["torch_eager"]
    kept = {"float16": 2} | {dtype: 1}
    assert {each["dtype"]: each["launches"] for each in found["ledger"]} == kept
    # An entry of a timed cell is not replaced, nor does a cell that was reached take a former one.
    swept = first | {"case": "M2-N2", "status": "ok"}
    own = after | {"cells": [*after["cells"], swept], "ledger": [told("M2-N2", dtype, 3)]}
    found = parts.joined(OLD, NEW, REPORTS | {"torch_eager": (before, own)})[2]["torch_eager"]
    assert found["ledger"] == own["ledger"]
    before |= {"ledger": [told("M3-N3", "bfloat16", 1)]}
    found = parts.joined(OLD, NEW, REPORTS | {"torch_eager": (before, after)})[2]["torch_eager"]
    assert found["ledger"] == after["ledger"]


def failed(rows: list[dict], case: str, status: str) -> list[dict]:
    absent = dict.fromkeys((*raw.TIMES, *raw.READINGS)) | {"status": status}
    return [row | absent if row["case"] == case else row for row in rows]


def test_a_cell_that_failed_in_the_new_part_is_not_hidden_by_an_old_time():
    both = rows_of("A", *CASES[:2]), sidecar_of("A", 1)
    rows, sidecar, _ = parts.joined(both, (failed(NEW[0], "M2-N2", "crashed"), NEW[1]), REPORTS)
    found = {row["case"]: (row["board"], row["status"]) for row in rows}
    assert found == {"M1-N1": ("A", "ok"), "M2-N2": ("BB", "crashed"), "M3-N3": ("BB", "ok")}
    assert sidecar["unreached"] == 0


def test_a_cell_that_failed_in_the_old_part_does_not_become_unreached():
    old = failed(rows_of("A", *CASES[:2]), "M1-N1", "oom"), sidecar_of("A", 1)
    new = rows_of("BB", "M3-N3"), sidecar_of("BB", 2)
    rows, sidecar, _ = parts.joined(old, new, REPORTS)
    found = {row["case"]: (row["board"], row["status"]) for row in rows}
    assert found == {"M1-N1": ("A", "oom"), "M2-N2": ("A", "ok"), "M3-N3": ("BB", "ok")}
    assert sidecar["unreached"] == 0


def test_a_cell_that_the_new_verification_bars_takes_no_time_away():
    barred = failed(NEW[0], "M1-N1", "inaccurate"), NEW[1]
    reports = {impl: judged("M1-N1", "ok", "inaccurate")["torch_eager"] for impl in REPORTS}
    with pytest.raises(UserError, match="does not pass ours M1-N1 float16 forward"):
        parts.joined(OLD, barred, reports)


@pytest.mark.parametrize("one", [0, 1])
def test_times_of_other_rivals_are_refused(one):
    pair = [OLD, NEW]
    rows = [row for row in pair[one][0] if row["impl"] != "torch_eager"]
    pair[one] = rows, pair[one][1]
    with pytest.raises(UserError, match="other implementations"):
        parts.joined(*pair, REPORTS)


def test_a_part_that_was_taken_anew_leaves_no_trace():
    """Both parts are of one board, and then the first one is taken once more."""
    first = rows_of("A", "M1-N1"), sidecar_of("A", 2)
    second = rows_of("A", "M2-N2", "M3-N3"), sidecar_of("A", 1, run_id="second")
    two = parts.joined(first, second, REPORTS)[:2]
    again = rows_of("A", "M1-N1", us=13.0), sidecar_of("A", 2, run_id="again")
    rows, sidecar, _ = parts.joined(two, again, REPORTS)
    assert [part["run_id"] for part in parts.of(sidecar)] == ["second", "again"]
    assert [row["device_us"] for row in rows if row["impl"] == "ours"] == [13.0, 10.0, 10.0]
    cells = [(case, "float16", "forward") for case in CASES]
    found = [parts.of_cell(sidecar, cell)["run_id"] for cell in cells]
    assert found == ["again", "second", "second"]


def test_rows_of_two_boards_in_one_cell_are_refused(tmp_path):
    rows, sidecar, _ = parts.joined(OLD, NEW, REPORTS)
    path = tmp_path / "raw/softmax.csv"
    path.parent.mkdir()
    raw.write(path, [rows[0] | {"board": "BB"}, *rows[1:]], sidecar)
    with pytest.raises(UserError, match=r"rows of board BB where softmax\.json says A"):
        raw.read(path, "")


def test_the_files_of_joined_parts_are_read_and_each_board_has_its_ceilings(tmp_path):
    rows, sidecar, _ = parts.joined(OLD, NEW, REPORTS)
    path = tmp_path / "raw/softmax.csv"
    path.parent.mkdir()
    raw.write(path, rows, sidecar)
    found, told = raw.read(path, "")
    assert [row["device_us"] for row in found] == [row["device_us"] for row in rows]
    cells = [(case, "float16", "forward") for case in CASES]
    limits = [times.limits(told, cell)["read"] for cell in (*cells, None)]
    assert limits == [4001.0, 4002.0, 4002.0, 4002.0]
    alone = {key: value for key, value in sidecar.items() if key != "earlier"}
    raw.write(path, rows, alone)
    with pytest.raises(UserError, match=r"rows of board A where softmax\.json says BB"):
        raw.read(path, "")
    part = sidecar["earlier"][0] | {"environment_sha256": "0" * 64}
    raw.write(path, rows, sidecar | {"earlier": [part]})
    with pytest.raises(UserError, match="environment_sha256 is of another environment"):
        raw.read(path, "")


@pytest.mark.parametrize("runs", [(OLD, NEW), (NEW, OLD)])
def test_two_runs_of_parts_become_one_record(tmp_path, capsys, runs):
    """Whichever comes first; the second verification had no time for a cell of PyTorch."""
    into, lacking = tmp_path / "recorded", runs[0][1]["unreached"]
    (late,) = {row["case"] for row in runs[0][0] if row["status"] == "ok"} - {"M2-N2"}
    for name, (rows, sidecar) in zip(("one", "two"), runs, strict=True):
        run = tmp_path / name
        save(run / "raw/softmax.csv", rows, **sidecar)
        for impl in ("ours", "torch_eager"):
            path = run / f"verify/softmax/{impl}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            about = {"op": "softmax", "impl": impl, "mode": "gpu", "status": "ok", "reason": ""}
            verdict = judged(late, "ok", "unreached")[impl][name == "two"]
            path.write_text(json.dumps(verdict | about))
        assert record.record(run, into, allow_dirty=False) == ["softmax"]
    assert capsys.readouterr().err == f"softmax: {lacking} of its cells were not reached\n"
    rows, sidecar = raw.read(into / "raw/softmax.csv", "")
    assert {row["case"]: row["board"] for row in rows} == {
        "M1-N1": "A", "M2-N2": "BB", "M3-N3": "BB",
    }  # fmt: skip
    assert len(parts.of(sidecar)) == 2
    report = json.loads((into / "verify/softmax/torch_eager.json").read_text())
    assert {cell["status"] for cell in report["cells"]} == {"ok"}
    manifest.check(into, ["softmax"])
    # No digit of a row has changed.
    lines = [(tmp_path / f"{name}/raw/softmax.csv").read_text() for name in ("one", "two")]
    kept = (into / "raw/softmax.csv").read_text().splitlines()
    assert set(kept) < {line for text in lines for line in text.splitlines()}


@pytest.mark.parametrize(("set_", "refused"), [("grid", True), ("drawn", False)])
def test_a_part_of_fewer_dtypes_takes_no_times_of_others_away(tmp_path, set_, refused):
    """A part of other dtypes has other shapes, so that it may lack none of its own cells."""
    into = tmp_path / "recorded/raw/softmax.csv"
    save(into, [PLAIN | {"dtype": "bfloat16", "set": set_}])
    rows = rows_of("BB", "M2-N2")
    assert record._lost(into, rows) == refused
    # Other words on a cell that both have are no loss.
    save(into, [PLAIN | {"case": "M2-N2"}])
    assert not record._lost(into, rows)

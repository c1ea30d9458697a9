"""Check that parts of one measurement are joined cell by cell, and other times are not."""

import copy
import json

import pytest

from harness.cli import UserError
from harness.results import parts, raw, record, times
from tests.support.raw_files import PLAIN, save

IMPLS = ("ours", "ours_twin", "torch_eager")
CASES = ("M1-N1", "M2-N2", "M3-N3")
VERDICT = {"impl_version": "3", "code_sha256": "c", "cells": []}
REPORTS = {impl: (VERDICT, VERDICT) for impl in ("ours", "torch_eager")}


def rows_of(board: str, *timed: str, us: float = 10.0) -> list[dict]:
    """The rows of all cases on a board; the cases that are not `timed` were not reached."""
    absent = dict.fromkeys((*raw.TIMES, *raw.READINGS)) | {"status": "unreached"}
    return [
        PLAIN
        | {"case": case, "impl": impl, "board": board, "device_us": us}
        | (absent if case not in timed else {})
        for case in CASES
        for impl in IMPLS
    ]


def sidecar_of(board: str, lacking: int, **changes) -> dict:
    gpu = {"name": "H200", "driver": "580", "uuid": board}
    environment = {"gpu": gpu, "versions": {"torch": "2.11"}}
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
        "ceilings": [rate],
        "schedule": {"drawn_seed": 7, "min_blocks": 16, "seed": len(board), "cores": len(board)},
        "overhead": {"total_s": 10.0, "timed_s": 6.0, "first_s": 1.0, "share": 0.3},
        "unreached": lacking,
    } | changes


OLD = rows_of("A", "M1-N1", us=11.0), sidecar_of("A", 2)
NEW = rows_of("BB", "M2-N2", "M3-N3", us=12.0), sidecar_of("BB", 1)


def test_a_cell_is_of_the_part_that_timed_it():
    rows, sidecar = parts.joined(OLD, NEW, REPORTS)
    found = [(row["case"], row["board"], row["device_us"]) for row in rows]
    where = {"M1-N1": ("A", 11.0), "M2-N2": ("BB", 12.0), "M3-N3": ("BB", 12.0)}
    assert found == [(case, *where[case]) for case in CASES for _ in IMPLS]
    assert sidecar["unreached"] == 0 and sidecar["run_id"] == "run-BB"
    (earlier,) = sidecar["earlier"]
    assert earlier["run_id"] == "run-A" and not set(parts.OF_WHOLE) & set(earlier)
    assert [part["run_id"] for part in parts.of(sidecar)] == ["run-A", "run-BB"]
    assert all(part["op"] == "softmax" for part in parts.of(sidecar))


def test_a_cell_that_both_parts_timed_is_of_the_new_one():
    both = rows_of("A", *CASES[:2], us=11.0), sidecar_of("A", 1)
    rows, _ = parts.joined(both, NEW, REPORTS)
    assert {row["case"]: row["board"] for row in rows} == {
        "M1-N1": "A", "M2-N2": "BB", "M3-N3": "BB",
    }  # fmt: skip


def test_a_part_that_adds_nothing_leaves_no_trace():
    whole = rows_of("BB", *CASES), sidecar_of("BB", 0)
    rows, sidecar = parts.joined(OLD, whole, REPORTS)
    assert rows == whole[0] and "earlier" not in sidecar


def test_a_third_part_keeps_the_first_two_and_counts_the_cells_that_none_has():
    first = rows_of("A", "M1-N1"), sidecar_of("A", 2)
    second = rows_of("BB", "M2-N2"), sidecar_of("BB", 2)
    two = parts.joined(first, second, REPORTS)
    assert two[1]["unreached"] == 1
    rows, sidecar = parts.joined(two, (rows_of("CCC", "M3-N3"), sidecar_of("CCC", 2)), REPORTS)
    assert [part["run_id"] for part in parts.of(sidecar)] == ["run-A", "run-BB", "run-CCC"]
    assert {row["board"] for row in rows} == {"A", "BB", "CCC"} and sidecar["unreached"] == 0


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
        (("harness_sha256",), "harnesses"),
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


def test_a_time_that_the_new_verification_refuses_is_not_taken():
    cell = {"dtype": "float16", "pass": "forward", "status": "inaccurate"}

    def reports(case: str, status: str = "inaccurate") -> dict:
        verdict = VERDICT | {"cells": [cell | {"case": case, "status": status}]}
        return REPORTS | {"torch_eager": (VERDICT, verdict)}

    with pytest.raises(UserError, match="refuses torch_eager M1-N1 float16 forward"):
        parts.joined(OLD, NEW, reports("M1-N1"))
    # It is no verdict on the recorded time, or on a cell of the new part.
    parts.joined(OLD, NEW, reports("M1-N1", "unreached"))
    parts.joined(OLD, NEW, reports("M2-N2"))


def test_the_files_of_joined_parts_are_read_and_each_board_has_its_ceilings(tmp_path):
    rows, sidecar = parts.joined(OLD, NEW, REPORTS)
    path = tmp_path / "raw/softmax.csv"
    path.parent.mkdir()
    raw.write(path, rows, sidecar)
    found, told = raw.read(path, "")
    assert [row["device_us"] for row in found] == [row["device_us"] for row in rows]
    limits = [times.limits(told, board)["read"] for board in ("A", "BB", "")]
    assert limits == [4001.0, 4002.0, 4002.0]
    alone = {key: value for key, value in sidecar.items() if key != "earlier"}
    raw.write(path, rows, alone)
    with pytest.raises(UserError, match=r"rows of board A where softmax\.json says BB"):
        raw.read(path, "")
    part = sidecar["earlier"][0] | {"environment_sha256": "0" * 64}
    raw.write(path, rows, sidecar | {"earlier": [part]})
    with pytest.raises(UserError, match="environment_sha256 is of another environment"):
        raw.read(path, "")


def test_two_runs_of_parts_become_one_record(tmp_path, capsys):
    into = tmp_path / "recorded"
    for name, (rows, sidecar) in {"one": OLD, "two": NEW}.items():
        run = tmp_path / name
        save(run / "raw/softmax.csv", rows, **sidecar)
        for impl in ("ours", "torch_eager"):
            path = run / f"verify/softmax/{impl}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            about = {"op": "softmax", "impl": impl, "mode": "gpu", "status": "ok", "reason": ""}
            path.write_text(json.dumps(VERDICT | about))
        assert record.record(run, into, allow_dirty=False) == ["softmax"]
    assert capsys.readouterr().err == "softmax: 2 of its cells were not reached\n"
    rows, sidecar = raw.read(into / "raw/softmax.csv", "")
    assert {row["case"]: row["board"] for row in rows} == {
        "M1-N1": "A", "M2-N2": "BB", "M3-N3": "BB",
    }  # fmt: skip
    assert len(parts.of(sidecar)) == 2

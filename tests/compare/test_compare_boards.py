"""Check how far times on two GPUs are said to lie apart, and how long measuring took."""

import csv
import functools
import math
import shutil
import sys

import pytest

from harness.cli import UserError
from harness.compare import boards, changes
from harness.compare.changes import Run
from harness.results import raw
from harness.summarize import inference
from tests.support import networks_run, synthetic

OPS = ("softmax", "layer_norm")
CELLS = 8
HERE, THERE = "GPU-00000000", "GPU-11111111"


times = functools.cache(synthetic.rows_of)


def cell(row):
    return row["case"], row["dtype"], row["pass"]


def rows(op, seed, factor=1.0, impl_version=None):
    """Times of a run in a few cells, those of all implementations multiplied."""
    cells = list(dict.fromkeys(map(cell, times(op, seed))))[:CELLS]
    found = [dict(row) for row in times(op, seed) if cell(row) in cells]
    for row in found:
        if row["device_us"]:
            row["device_us"] = repr(float(row["device_us"]) * factor)
        if impl_version and row["impl"] == "torch_eager":
            row["impl_version"] = impl_version
    return found


def span(began, ended):
    times = {"began": began, "ended": ended}
    return {"span": {key: f"2026-11-25T10:{at}Z" for key, at in times.items()}}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    synthetic.write_raw(folder, OPS[0], rows(OPS[0], 1), **span("00:00", "03:00"))
    synthetic.write_raw(folder, OPS[1], rows(OPS[1], 1), **span("03:10", "05:00"))
    return folder


@pytest.fixture
def two(tmp_path):
    """Write a second run: the first op on another board, slower by a factor; the second on the
    same.
    """

    def make(factor=1.0, **changes):
        synthetic.write_raw(
            tmp_path,
            OPS[0],
            rows(OPS[0], 2, factor, **changes),
            board=THERE,
            **span("00:00", "02:30"),
        )
        synthetic.write_raw(tmp_path, OPS[1], rows(OPS[1], 2), **span("00:00", "01:50"))
        return tmp_path

    return make


def found(one, two):
    return {(row["boards"], row["op"]): row for row in boards.rows(Run.read(one), Run.read(two))}


def test_boards_that_agree_are_the_same(one, two):
    rows = found(one, two())
    assert set(rows) == {("two", OPS[0]), ("one", OPS[1])}
    for row in rows.values():
        assert row["verdict"] in ("same", "undecided") and row["beyond"] == 0
        assert row["ci_lo"] < 1 < row["ci_hi"] or abs(row["ratio"] - 1) < 0.01
        assert row["apart_median"] <= row["apart_most"] < 0.1


def test_a_board_that_is_slower_is_seen_and_the_other_op_is_not(one, two):
    same, rows = found(one, two()), found(one, two(1.5))
    slow, control = rows["two", OPS[0]], rows["one", OPS[1]]
    before = same["two", OPS[0]]["ratio"]
    assert slow["ratio"] == pytest.approx(before / 1.5) and slow["verdict"] == "two slower"
    assert slow["apart_median"] == pytest.approx(math.log(1.5), abs=0.05)
    assert slow["beyond"] > 0.8 * slow["cells"]
    assert (slow["board_one"], slow["board_two"]) == (HERE, THERE)
    assert (control["verdict"], control["ratio"]) == ("same", same["one", OPS[1]]["ratio"])


@pytest.mark.parametrize("unsteady", ["one", "two", "both"])
def test_a_cell_that_is_unsteady_in_a_run_has_its_own_offset(one, two, unsteady):
    """Its processes differ more than those of other cells, also where runs are compared."""
    first, second = Run.read(one), Run.read(two())
    key = changes.shared(first, second)[0]
    usual = boards.differences(first, second), changes.times(first, second)
    own = {"one": inference.Offset(0.02, 6.0, 6.0), "two": inference.Offset(0.01, 5.0, 5.0)}
    for name, run in (("one", first), ("two", second)):
        if unsteady in (name, "both"):
            run.known = inference.Offsets([], [], {key: own[name]})
    wider = own["one" if unsteady == "both" else unsteady]
    found = boards.differences(first, second), changes.times(first, second)
    processes = [run.counted[key]["ours"].processes for run in (first, second)]
    expected = wider._replace(variance=wider.variance * sum(1 / n for n in processes) / 2)
    assert found[0][key, "ours"].offset == found[1][key].offset == expected
    for now, before, mine in zip(found, usual, ((key, "ours"), key), strict=True):
        others = {at for at in now if key not in (at, at[0])}
        assert others and all(now[at].offset == before[at].offset for at in others)
        assert now[mine].offset != before[mine].offset


def test_an_op_in_two_parts_is_compared_by_the_board_of_each_cell(one, two):
    folder = two()
    path = folder / f"raw/{OPS[0]}.csv"
    read, sidecar = raw.read(path, "")
    keys = list(dict.fromkeys(map(cell, read)))
    for row in read:
        row["board"] = HERE if cell(row) in keys[:3] else THERE
    taken = sidecar["environment"] | {"gpu": sidecar["environment"]["gpu"] | {"uuid": HERE}}
    part = {key: sidecar[key] for key in ("run_id", "date", "commit", "dirty", "ceilings")}
    part |= {"environment": taken, "environment_sha256": raw.environment_sha256(taken)}
    part |= {"overhead": {"total_s": 50.0}} | span("04:00", "05:00")
    part |= {"run_id": "earlier", "cells": [" ".join(key) for key in keys[:3]]}
    raw.write(path, read, sidecar | {"earlier": [part]})
    rows = found(one, folder)
    apart = rows["two", OPS[0]], rows["one", OPS[0]]
    assert [(row["board_one"], row["board_two"]) for row in apart] == [(HERE, THERE), (HERE, HERE)]
    whole = found(one, two())["two", OPS[0]]["cells"]
    assert sum(row["cells"] for row in apart) == whole and min(row["cells"] for row in apart) > 2
    raw.write(path, read, sidecar | {"earlier": [part]})
    run = Run.read(folder)
    assert f"; {sidecar['run_id']}, earlier; " in run.origin()
    said = "2 ops on 2 GPUs, jobs of 250 s in all, 300 s from the first to the last"
    assert boards.stage(folder, run) == f"{folder}: {said}"


def test_networks_are_left_out_and_teach_no_noise(one, two, tmp_path):
    folder, alone = two(), boards.rows(Run.read(one), Run.read(two()))
    both = networks_run.write_run(shutil.copytree(one, tmp_path / "both"))
    assert boards.rows(Run.read(both), Run.read(networks_run.write_run(folder))) == alone


def test_the_order_of_the_runs_inverts_the_ratio_and_changes_nothing_else(one, two):
    there, back = found(one, two(1.5)), found(two(1.5), one)
    for at, row in there.items():
        assert row["ratio"] == pytest.approx(1 / back[at]["ratio"])
        for name in ("noise", "p", "apart_median", "apart_most", "beyond"):
            assert row[name] == pytest.approx(back[at][name])


def test_all_implementations_of_the_same_version_count(one, two):
    every = found(one, two())["two", OPS[0]]["cells"]
    impls = {row["impl"] for row in rows(OPS[0], 1) if row["device_us"]} - {"ours_twin"}
    times = {(*cell(row), row["impl"]) for row in rows(OPS[0], 1) if row["impl"] in impls}
    assert every == len(times)
    fewer = found(one, two(impl_version="other"))["two", OPS[0]]["cells"]
    timed = {
        cell(row) for row in rows(OPS[0], 1) if row["impl"] == "torch_eager" and row["device_us"]
    }
    assert len(impls) > 2 and every - fewer == len(timed)


def run(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["boards", *map(str, words)])
    boards.main()
    return capsys.readouterr().out


def test_the_command_says_it_and_keeps_it(one, two, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.csv"
    said = run(monkeypatch, capsys, one, two(1.5), "--csv", out)
    first, second, wall, *lines = said.splitlines()
    assert first.endswith(
        ": 2 ops on 1 GPUs, jobs of 200 s in all, 300 s from the first to the last"
    )
    assert second.endswith(
        ": 2 ops on 2 GPUs, jobs of 200 s in all, 150 s from the first to the last"
    )
    assert wall == "Measuring took 2.00 times as long in the first as in the second."
    assert len(lines) == 2 and "two slower" in lines[0] and "on one board" in lines[1]
    with out.open(newline="") as file:
        kept = list(csv.DictReader(file))
    assert [row["op"] for row in kept] == list(OPS)
    assert ",".join(kept[0]) == boards.COLUMNS


def test_a_noise_that_no_twin_tells_is_unknown(one, two):
    row = found(one, two())["two", OPS[0]]
    assert f"noise {row['noise']:.2%}, " in boards.line(row)
    assert "noise unknown, undecided;" in boards.line(
        row | {"noise": math.nan, "verdict": "undecided"}
    )


def test_wall_times_that_do_not_compare_are_not_compared(one, two, monkeypatch, capsys):
    folder = two()
    (folder / f"raw/{OPS[1]}.csv").unlink()
    assert "measured different ops" in run(monkeypatch, capsys, one, folder)
    synthetic.write_raw(folder, OPS[0], rows(OPS[0], 2), board=THERE)
    said = run(monkeypatch, capsys, one, folder)
    assert "is not told" in said and "times as long" not in said
    synthetic.write_raw(
        folder, OPS[0], rows(OPS[0], 2), board=THERE, resumed=1, **span("00:00", "02:30")
    )
    assert "1 ops were interrupted" in run(monkeypatch, capsys, one, folder)


def test_runs_that_share_nothing_are_refused(one, tmp_path, monkeypatch, capsys):
    synthetic.write_raw(tmp_path, OPS[0], rows(OPS[0], 2), gpu="Another GPU")
    with pytest.raises(UserError, match="not of one GPU model"):
        run(monkeypatch, capsys, one, tmp_path)

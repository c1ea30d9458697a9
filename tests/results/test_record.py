"""Check that whole, measured, committed ops are recorded, and that replays return them."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import UserError
from harness.results import manifest, raw, record, replay
from harness.results.columns import DISSECTED
from harness.summarize import capabilities
from tests.support.raw_files import PLAIN, save

ROOT = Path(__file__).resolve().parents[2]
ROWS = [PLAIN | {"impl": impl} for impl in ("ours", "ours_twin", "torch_eager")]
REPORT = dict.fromkeys(("impl_version", "reason", "code_sha256"), "")
REPORT |= {"op": "softmax", "mode": "gpu", "status": "ok", "cells": []}


@pytest.fixture
def run(tmp_path) -> Path:
    """A run that measured softmax: ours, its twin and PyTorch eager."""
    folder = tmp_path / "study"
    save(folder / "raw/softmax.csv", ROWS)
    for impl in ("ours", "torch_eager"):
        report = folder / f"verify/softmax/{impl}.json"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps(REPORT | {"impl": impl}))
    return folder


@pytest.fixture
def recorded(run, tmp_path) -> Path:
    """Record the run."""
    record.record(run, tmp_path / "recorded", allow_dirty=False)
    return tmp_path / "recorded"


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    # The digests are checked by another test.
    found.pop(manifest.NAME, None)
    return found


def test_an_op_is_recorded_whole(run, tmp_path):
    into = tmp_path / "recorded"
    assert record.record(run, into, allow_dirty=False) == ["softmax"]
    assert tree(into) == tree(run)


@pytest.mark.parametrize("known", [True, False])
def test_a_commit_that_was_told_by_its_first_digits_is_written_out(
    run, tmp_path, monkeypatch, known
):
    path = run / "raw/softmax.json"
    sidecar = json.loads(path.read_text())
    sidecar["commit"] = sidecar["environment"]["commit"] = "abcdef1"
    sidecar["environment_sha256"] = raw.environment_sha256(sidecar["environment"])
    path.write_text(json.dumps(sidecar))
    calls = []

    def git(call, **options):
        calls.append(call[-1])
        if not known:
            raise subprocess.CalledProcessError(1, call)
        return subprocess.CompletedProcess(call, 0, stdout="abcdef1" + 33 * "0" + "\n")

    monkeypatch.setattr(record.subprocess, "run", git)
    record.record(run, tmp_path / "recorded", allow_dirty=False)
    _, found = raw.read(tmp_path / "recorded/raw/softmax.csv", "")
    whole = "abcdef1" + 33 * "0" if known else "abcdef1"
    assert found["commit"] == found["environment"]["commit"] == whole
    assert calls == ["abcdef1^{commit}"]
    rest = ("commit", "environment", "environment_sha256")
    assert all(found[key] == value for key, value in sidecar.items() if key not in rest)


@pytest.mark.parametrize(
    "rows", [[], [PLAIN | {"status": "crashed", "device_us": None, "call_us": None}]]
)
def test_an_op_without_a_time_takes_no_record_away(run, recorded, capsys, rows):
    before = tree(recorded)
    save(run / "raw/softmax.csv", rows, op="softmax")
    with pytest.raises(UserError, match="raw: holds no time"):
        record.record(run, recorded, allow_dirty=False)
    assert capsys.readouterr().err == "softmax: not recorded, it has no time\n"
    assert tree(recorded) == before


def closed(run) -> None:
    """Make the run one that was closed before its only cell."""
    times = {name: None for name in (*raw.TIMES, *raw.READINGS)}
    rows = [row | times | {"status": "unreached"} for row in ROWS]
    other = [row | {"case": "M2-N2"} for row in ROWS]
    save(run / "raw/softmax.csv", [*other, *rows], unreached=1)


def test_a_measurement_that_was_closed_is_recorded_with_a_line(run, tmp_path, capsys):
    closed(run)
    record.record(run, tmp_path / "recorded", allow_dirty=False)
    assert capsys.readouterr().err == "softmax: 1 of its cells were not reached\n"


def test_a_measurement_that_was_closed_takes_no_times_away(run, recorded):
    before = tree(recorded)
    closed(run)
    with pytest.raises(UserError, match="no parts of one measurement: other shapes"):
        record.record(run, recorded, allow_dirty=False)
    assert tree(recorded) == before
    (recorded / "raw/softmax.csv").unlink()
    assert record.record(run, recorded, allow_dirty=False) == ["softmax"]


def test_reports_of_the_sanitizer_are_recorded_too(run, tmp_path):
    (run / "sanitize").mkdir()
    (run / "sanitize/softmax.json").write_text("{}")
    record.record(run, tmp_path / "recorded", allow_dirty=False)
    assert tree(tmp_path / "recorded") == tree(run)


SEEN = dict.fromkeys(DISSECTED["step_parts"].header, "")
SEEN |= {"part": "loss", "status": "ok", "gpu": "H100", "commit": "a" * 40}


def seen(folder: Path, *rows: dict[str, str]) -> Path:
    """Write what was seen within a step into a run; return the run."""
    (folder / "dissect").mkdir(parents=True)
    with (folder / "dissect/step_parts.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, SEEN, lineterminator="\n")
        writer.writeheader()
        writer.writerows(SEEN | row for row in rows)
    return folder


def test_a_cut_or_unknown_file_of_a_dissection_is_not_recorded(tmp_path, recorded):
    path = seen(tmp_path / "alone", {}) / "dissect/step_parts.csv"
    path.write_text(path.read_text().removesuffix("a\n"))
    with pytest.raises(UserError, match="is truncated; make it again"):
        record.record(tmp_path / "alone", recorded, allow_dirty=False)
    path.rename(path.with_name("notes.csv"))
    with pytest.raises(UserError, match="no file of a run; remove it"):
        record.record(tmp_path / "alone", recorded, allow_dirty=False)
    assert not (recorded / "dissect").exists()


def test_a_folder_that_cannot_be_sealed_keeps_its_manifest(recorded):
    before = (recorded / manifest.NAME).read_bytes()
    (recorded / "raw/softmax.json").unlink()
    with pytest.raises(FileNotFoundError):
        manifest.seal(recorded)
    assert (recorded / manifest.NAME).read_bytes() == before


def test_a_run_may_hold_only_what_was_seen_within_a_step(tmp_path, recorded):
    before, alone = tree(recorded), seen(tmp_path / "alone", {}, {"status": "oom"})
    assert record.record(alone, recorded, allow_dirty=False) == ["dissect/step_parts.csv"]
    assert tree(recorded) == before | tree(alone)
    manifest.check_file(recorded, "dissect/step_parts.csv")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"commit": "a" * 40 + "-dirty"}, "made of uncommitted code"),
        ({"commit": ""}, "a row without its commit"),
        ({"gpu": ""}, "was not made on a GPU"),
        ({"status": "oom"}, "holds no row that is right"),
    ],
)
def test_a_step_that_must_not_be_recorded_is_refused(run, tmp_path, row, problem):
    seen(run, row)
    with pytest.raises(UserError, match=rf"step_parts\.csv: {problem}"):
        record.record(run, tmp_path / "recorded", allow_dirty=False)
    assert not (tmp_path / "recorded").exists()


def test_uncommitted_code_of_a_step_may_be_allowed(tmp_path):
    alone = seen(tmp_path / "alone", {"commit": "a" * 40 + "-dirty"})
    assert record.record(alone, tmp_path / "recorded", allow_dirty=True)


def test_a_rival_that_is_gone_leaves_no_report(run, tmp_path):
    into = tmp_path / "recorded"
    stale = into / "verify/softmax/retired.json"
    stale.parent.mkdir(parents=True)
    stale.write_text("{}")
    other = into / "raw/matmul.csv"
    other.parent.mkdir()
    other.write_text("kept")
    record.record(run, into, allow_dirty=False)
    assert tree(into) == tree(run) | {"raw/matmul.csv": b"kept"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mode": "replayed"}, "was replayed, not measured"),
        ({"dirty": True}, "uncommitted code"),
        ({"rows": 9}, "says 9"),
        ({"csv_sha256": "0" * 64}, "SHA-256"),
    ],
)
def test_a_run_that_must_not_be_recorded_is_refused(run, tmp_path, changes, problem):
    save(run / "raw/softmax.csv", ROWS, **changes)
    with pytest.raises(UserError, match=problem):
        record.record(run, tmp_path / "recorded", allow_dirty=False)
    assert not (tmp_path / "recorded").exists()


def test_uncommitted_code_may_be_allowed(run, tmp_path):
    save(run / "raw/softmax.csv", ROWS, dirty=True)
    assert record.record(run, tmp_path / "recorded", allow_dirty=True) == ["softmax"]


def test_a_missing_report_stops_it(run, tmp_path):
    (run / "verify/softmax/torch_eager.json").unlink()
    with pytest.raises(UserError, match=r"torch_eager\.json: missing; verify it again"):
        record.record(run, tmp_path / "recorded", allow_dirty=False)
    assert not (tmp_path / "recorded").exists()


def test_one_broken_op_stops_all(run, tmp_path):
    save(run / "raw/matmul.csv", ROWS, rows=9)
    with pytest.raises(UserError, match=r"matmul\.csv"):
        record.record(run, tmp_path / "recorded", allow_dirty=False)
    assert not (tmp_path / "recorded").exists()


def test_an_empty_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no measurement"):
        record.record(tmp_path, tmp_path / "recorded", allow_dirty=False)


def test_the_manifest_holds_the_digest_of_each_file(run, recorded):
    (run / "sanitize").mkdir()
    (run / "sanitize/softmax.json").write_text("{}")
    record.record(run, recorded, allow_dirty=False)
    files = json.loads((recorded / manifest.NAME).read_text())["files"]
    assert files == {name: raw.sha256(content) for name, content in tree(recorded).items()}
    before = (recorded / manifest.NAME).read_bytes()
    manifest.seal(recorded)
    assert (recorded / manifest.NAME).read_bytes() == before


def test_recording_an_op_vouches_for_no_other(run, recorded):
    save(run / "raw/matmul.csv", [row | {"op": "matmul"} for row in ROWS], op="matmul")
    for impl in ("ours", "torch_eager"):
        path = run / f"verify/matmul/{impl}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(REPORT | {"op": "matmul", "impl": impl}))
    (recorded / "verify/softmax/ours.json").write_text("{}")
    (run / "raw/softmax.csv").unlink()
    record.record(run, recorded, allow_dirty=False)
    manifest.check(recorded, ["matmul"])
    with pytest.raises(UserError, match=r"softmax/ours\.json: its SHA-256"):
        manifest.check(recorded, ["matmul", "softmax"])
    with pytest.raises(UserError, match=r"recorded: has no times of relu; measure and record it"):
        manifest.check(recorded, ["matmul", "relu"])
    (recorded / "raw/relu.csv").write_text("")
    with pytest.raises(
        UserError, match=r"relu\.csv: manifest\.json does not list it; git checkout"
    ):
        manifest.check(recorded, ["matmul", "relu"])


def test_a_report_without_its_fields_is_not_recorded(run, tmp_path):
    (run / "verify/softmax/ours.json").write_text("{}")
    with pytest.raises(UserError, match=r"ours\.json: has no 'op'; verify it again"):
        record.record(run, tmp_path / "recorded", allow_dirty=False)


def test_a_folder_is_sealed_by_the_command(recorded):
    (recorded / manifest.NAME).unlink()
    call = [sys.executable, "-m", "harness.results.record", "--seal", str(recorded)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "sealed softmax\n")
    manifest.check(recorded, ["softmax"])
    (done,) = [subprocess.run([*call[:-1], "nowhere"], cwd=ROOT, capture_output=True, text=True)]
    assert done.returncode == 2 and "nowhere/raw: holds no measurement" in done.stderr


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda path: path.unlink(), r"eager\.json: missing"),
        (lambda path: path.write_text("{}"), "SHA-256"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"ok", b"no")), "SHA-256"),
        (lambda path: path.with_name("more.json").write_text("{}"), "more.json: .*not list it"),
        (lambda path: (path.parents[2] / manifest.NAME).unlink(), "record one: python -m"),
    ],
)
def test_no_replay_without_the_reports_that_were_recorded(recorded, tmp_path, change, problem):
    change(recorded / "verify/softmax/torch_eager.json")
    out = tmp_path / "again/raw/softmax.csv"
    with pytest.raises(UserError, match=problem):
        replay.replay("softmax", recorded, out)
    assert not out.parent.exists()


def test_a_timed_implementation_without_a_report_is_refused_though_sealed(recorded, tmp_path):
    path = recorded / "verify/softmax/torch_eager.json"
    path.write_text(json.dumps(REPORT | {"impl": "ours"}))
    manifest.seal(recorded)
    with pytest.raises(UserError, match=r"eager\.json: is about softmax of ours"):
        replay.replay("softmax", recorded, tmp_path / "again.csv")
    path.unlink()
    manifest.seal(recorded)
    with pytest.raises(UserError, match=r"eager\.json: missing; git checkout"):
        replay.replay("softmax", recorded, tmp_path / "again.csv")


def test_a_replay_says_so_and_changes_nothing_else(recorded, tmp_path):
    out = tmp_path / "again/raw/softmax.csv"
    replay.replay("softmax", recorded, out)
    assert out.read_bytes() == (recorded / "raw/softmax.csv").read_bytes()
    before = json.loads((recorded / "raw/softmax.json").read_text())
    assert raw.read(out, "")[1] == before | {"mode": "replayed"}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def head(path: Path) -> None:
    path.write_text(path.read_text().replace("device_us", "seconds", 1))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [(Path.unlink, "missing"), (cut, "truncated"), (head, "header")],
)
def test_a_bad_recording_is_named_with_its_remedy(recorded, tmp_path, spoil, problem):
    spoil(recorded / "raw/softmax.csv")
    if recorded.joinpath("raw/softmax.csv").exists():
        manifest.seal(recorded)
    out = tmp_path / "again/softmax.csv"
    call = ["--op", "softmax", "--recorded", str(recorded), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "harness.results.replay", *call],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    for words in ("raw/softmax.csv", problem, "git checkout"):
        assert words in done.stderr
    assert not out.parent.exists()


def test_a_recording_of_another_op_is_refused(recorded, tmp_path):
    save(recorded / "raw/matmul.csv", ROWS)
    (recorded / "verify/softmax").rename(recorded / "verify/matmul")
    (recorded / "raw/softmax.csv").unlink()
    manifest.seal(recorded)
    with pytest.raises(UserError, match="about another op than matmul"):
        replay.replay("matmul", recorded, tmp_path / "out.csv")


def test_a_report_that_is_carried_over_is_listed_anew_and_a_forged_one_is_not(recorded):
    path = recorded / "verify/softmax/ours.json"
    manifest.rewrite(recorded, path, REPORT | {"code_sha256": "new"})
    manifest.check(recorded, ["softmax"])
    path.write_text(json.dumps(REPORT | {"status": "forged"}))
    with pytest.raises(UserError, match=r"ours\.json: its SHA-256"):
        manifest.rewrite(recorded, path, REPORT)
    assert json.loads(path.read_text())["status"] == "forged"


def test_the_matrix_is_made_of_recorded_reports_alone(recorded):
    assert len(capabilities.recorded(recorded)[0]) == 2
    (recorded / "verify/softmax/ours.json").write_text(json.dumps(REPORT | {"impl": "ours"}) + " ")
    with pytest.raises(UserError, match=r"ours\.json: its SHA-256"):
        capabilities.recorded(recorded)

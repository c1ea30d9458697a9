"""Recording takes whole, measured, committed ops; replaying gives them back as they are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_raw import PLAIN, save

from harness import raw, record, replay
from harness.command import UserError

ROOT = Path(__file__).resolve().parents[1]
ROWS = [PLAIN | {"impl": impl} for impl in ("ours", "ours_twin", "torch_eager")]


@pytest.fixture
def run(tmp_path) -> Path:
    """A run that measured softmax: ours, its twin and PyTorch eager."""
    folder = tmp_path / "study"
    save(folder / "raw/softmax.csv", ROWS)
    for impl in ("ours", "torch_eager"):
        report = folder / f"verify/softmax/{impl}.json"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps({"impl": impl}))
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_an_op_is_recorded_whole(run, tmp_path):
    into = tmp_path / "recorded"
    assert record.record(run, into, allow_dirty=False) == ["softmax"]
    assert tree(into) == tree(run)


def test_what_the_sanitizer_said_goes_along(run, tmp_path):
    (run / "sanitize").mkdir()
    (run / "sanitize/softmax.json").write_text("{}")
    record.record(run, tmp_path / "recorded", allow_dirty=False)
    assert tree(tmp_path / "recorded") == tree(run)


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
        ({"csv_sha256": "0"}, "SHA-256"),
    ],
)
def test_what_must_not_be_recorded_is_refused(run, tmp_path, changes, problem):
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


def test_a_replay_says_so_and_changes_nothing_else(run, tmp_path):
    out = tmp_path / "again/raw/softmax.csv"
    replay.replay("softmax", run, out)
    assert out.read_bytes() == (run / "raw/softmax.csv").read_bytes()
    before = json.loads((run / "raw/softmax.json").read_text())
    assert raw.read(out, "")[1] == before | {"mode": "replayed"}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def head(path: Path) -> None:
    path.write_text(path.read_text().replace("device_us", "seconds", 1))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [(Path.unlink, "missing"), (cut, "truncated"), (head, "header")],
)
def test_a_bad_recording_is_named_with_its_remedy(run, tmp_path, spoil, problem):
    spoil(run / "raw/softmax.csv")
    out = tmp_path / "again/softmax.csv"
    call = ["--op", "softmax", "--recorded", str(run), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "harness.replay", *call], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    for words in ("raw/softmax.csv", problem, "record softmax on a GPU", "config/config.yaml"):
        assert words in done.stderr
    assert not out.parent.exists()


def test_a_recording_of_another_op_is_refused(run, tmp_path):
    save(run / "raw/matmul.csv", ROWS)
    with pytest.raises(UserError, match="about another op than matmul"):
        replay.replay("matmul", run, tmp_path / "out.csv")

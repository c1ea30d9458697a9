"""Check the journal: an interrupted measurement continues from it, and from no other file."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys

import pytest

from harness.cli import UserError
from harness.measure import checkpoint
from harness.measure.checkpoint import Journal

RECORD = {"rows": [{"device_us": 0.1 + 0.2, "status": "ok", "reason": "é"}], "stopped": "time"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "raw/.fake.journal"


def kept(path, digest="d", seed=None):
    """Return the finished cells, the seed and the count of resumptions of a journal."""
    with Journal(path, digest, seed) as found:
        return dict(found.cells), found.seed, found.resumed


def write(path, *names):
    with Journal(path, "d", 7) as new:
        for name in names:
            new.add(name, RECORD)


def test_cells_and_the_drawn_seed_are_taken_over(path):
    with Journal(path, "d", None) as new:
        seed = new.seed
        new.add("one", RECORD)
        assert (new.cells, new.resumed) == ({"one": RECORD}, 0)
    assert kept(path) == ({"one": RECORD}, seed, 1)
    with Journal(path, "d", None) as again:
        again.add("two", RECORD)
        assert again.resumed == 2
    assert kept(path) == ({"one": RECORD, "two": RECORD}, seed, 3)


def test_a_seed_is_drawn_unless_it_is_wished(tmp_path):
    seeds = {kept(tmp_path / str(n))[1] for n in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert kept(tmp_path / "chosen", seed=5)[1] == 5


def test_a_journal_of_another_plan_is_discarded_with_a_line(path, capsys):
    write(path, "one")
    capsys.readouterr()
    assert kept(path, digest="other", seed=3) == ({}, 3, 0)
    assert capsys.readouterr().err == f"{path}: of another plan, machine or code; discarded\n"
    assert kept(path, digest="other") == ({}, 3, 1)


def test_whatever_is_torn_is_cut_off(path, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    write(path, "one", "two")
    content = path.read_bytes()
    header, one, two = content.splitlines(keepends=True)
    for size in range(len(content)):
        torn = tmp_path / "torn"
        torn.write_bytes(content[:size])
        names = ["one"] * (size >= len(header + one)) + ["two"] * (size >= len(header + one + two))
        with Journal(torn, "d", 7) as found:
            assert list(found.cells) == names
            found.add("three", RECORD)
        assert list(kept(torn)[0]) == [*names, "three"]


@pytest.mark.parametrize("garbage", [b"\0" * 64, b"\0" * 64 + b"\n", b"{}\n", b"[]\n", b"\xff\n"])
def test_a_file_that_is_no_journal_is_discarded(path, garbage):
    path.parent.mkdir()
    path.write_bytes(garbage)
    assert kept(path)[0] == {}
    write(path.with_name("good"), "one")
    good = path.with_name("good")
    good.write_bytes(good.read_bytes() + garbage)
    assert list(kept(good)[0]) in (["one"], [])


def test_two_jobs_do_not_share_a_journal(path):
    with Journal(path, "d", 7), pytest.raises(UserError, match="another job is measuring this"):
        Journal(path, "d", 7)
    kept(path)


def test_a_record_is_on_the_disk_when_add_returns(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    with Journal(path, "d", 7) as new:
        new.add("one", RECORD)
        assert synced[-1] == path.stat().st_size


def test_a_nan_is_refused(path):
    with Journal(path, "d", 7) as new, pytest.raises(ValueError):
        new.add("one", {"device_us": float("nan")})
    assert kept(path)[0] == {}


def test_a_full_disk_keeps_what_was_written(path):
    """A limit on the size of a file stops a write half-way, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(path, "d", 7) as new:
        new.add("one", RECORD)
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
        try:
            with pytest.raises(OSError, match=r"\.fake\.journal"):
                new.add("two", RECORD)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.stat().st_size == size + 10
    assert list(kept(path)[0]) == ["one"]


@pytest.fixture
def tiny(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    call = ["mount", "-t", "tmpfs", "-o", "size=64k", "tiny", str(folder)]
    if shutil.which("mount") is None or subprocess.run(call, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system, which this user or container lacks")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_keeps_what_was_written(tiny):
    path = tiny / ".fake.journal"
    with Journal(path, "d", 7) as new:
        with pytest.raises(OSError, match=r"No space left on device.*\.fake\.journal") as caught:
            for number in range(10**4):
                new.add(str(number), RECORD)
        assert caught.value.errno == errno.ENOSPC
        count = len(new.cells)
    assert count > 10
    roomy = tiny.parent / "copy"
    roomy.write_bytes(path.read_bytes())
    assert list(kept(roomy)[0]) == [str(number) for number in range(count)]


def test_a_job_that_ends_while_the_next_one_begins_leaves_it_a_journal(tmp_path, monkeypatch):
    path, lock = tmp_path / ".op.journal", checkpoint.fcntl.flock
    ended = []

    def flock(*arguments):
        if not ended:
            # The other job held this lock until now.
            path.unlink()
            ended.append(True)
        lock(*arguments)

    monkeypatch.setattr(checkpoint.fcntl, "flock", flock)
    with checkpoint.Journal(path, "digest", 1) as kept:
        kept.add("a cell", {"rows": []})
        with pytest.raises(UserError, match="another job is measuring this"):
            checkpoint.Journal(path, "digest", 1)
    with checkpoint.Journal(path, "digest", 1) as kept:
        assert list(kept.cells) == ["a cell"]
        path.unlink()
        kept.remove()


CODE = (
    "harness/a.py",
    "harness/room/a.py",
    "ops/a.py",
    "kernels/b.py",
    "kernels/b_details/a.py",
    "kernels/tuned/h200.json",
    "baselines/c.py",
)


@pytest.fixture
def code(tmp_path):
    for name in CODE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_the_digest_stays_the_same(code, monkeypatch):
    before = checkpoint.digest(code, {"seed": None})
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    (code / "tests").mkdir()
    (code / "tests/d.py").write_text("")
    assert checkpoint.digest(code, {"seed": None}) == before


@pytest.mark.parametrize("name", CODE)
def test_the_digest_knows_the_code(code, name):
    before = checkpoint.digest(code, {})
    (code / name).write_text("changed")
    changed = checkpoint.digest(code, {})
    (code / name).unlink()
    assert len({before, changed, checkpoint.digest(code, {})}) == 3


def test_the_digest_knows_the_parts_and_the_environment(code, monkeypatch, tmp_path):
    found = {checkpoint.digest(code, {"seed": seed}) for seed in (None, 1, 2)}
    for name in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.setenv(name, "1")
        found.add(checkpoint.digest(code, {"seed": None}))
    tables = tmp_path / "tables"
    tables.mkdir()
    for value in ("", str(tables)):
        monkeypatch.setenv("TILEWRIGHT_TUNED", value)
        found.add(checkpoint.digest(code, {"seed": None}))
    (tables / "h200.json").write_text("{}")
    found.add(checkpoint.digest(code, {"seed": None}))
    assert len(found) == 9


def test_the_digest_is_the_same_in_another_process(code):
    words = "from harness.measure import checkpoint; from pathlib import Path;"
    words += f" p = Path({str(code)!r});"
    call = [sys.executable, "-c", f"{words} print(checkpoint.digest(p, {json.dumps({'a': [1]})}))"]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == checkpoint.digest(code, {"a": [1]})

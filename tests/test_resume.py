"""A measurement that is interrupted in whatever way loses no finished cell and repeats none."""

# ruff: noqa: F811, fixtures are arguments by the names under which they are imported
import collections
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_lease import driver  # noqa: F401, a fixture
from test_measure import BLOCKS, CELLS, ROOT, run, timed  # noqa: F401, a fixture
from test_measure_command import arguments, command, wait_until  # noqa: F401, fixtures

from harness import load, raw
from harness.cell import sweep

IMPLS = ("ours", "slow")
TIMED = 3  # with the twin
# Cells that last long enough to be interrupted.
MANY = {"max-cases": 5, "dtypes": "float32,float16", "min-blocks": 20, "max-blocks": 20}
MANY |= {"seed": "fresh"}
SCALE, _ = load.op("scale")
COUNT = len(list(sweep(SCALE, ["float32", "float16"], SCALE.passes, 5)))


def prepared(log: Path) -> collections.Counter:
    """How often each implementation prepared each cell."""
    return collections.Counter(tuple(line.split()[2:]) for line in log.read_text().splitlines())


def finished(journal: Path) -> list[str]:
    """The names of the cells that a journal holds whole."""
    lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
    cells = (re.match(r'{"what": "cell", "name": "([^"]+)".*\n', line) for line in lines)
    return [found[1] for found in cells if found]


def test_a_parent_killed_again_and_again_loses_and_repeats_nothing(command, tmp_path):
    journal, log = tmp_path / "raw/.scale.journal", tmp_path / "prepared"
    kills = 0
    while kills < 3:
        before = len(finished(journal))
        job = command(*IMPLS, **MANY)
        wait_until(lambda before=before: len(finished(journal)) > before)
        job.send_signal(signal.SIGKILL)
        job.communicate()
        kills += 1
        done = finished(journal)
        assert done, "killed too late"
        # As if the kill had come in the midst of the next record.
        with journal.open("a") as file:
            file.write('{"what": "cell", "name": "M')
        seed = json.loads(journal.read_text().splitlines()[0])["seed"]
    counts = prepared(log)
    job = command(*IMPLS, **MANY)
    _, words = job.communicate()
    assert job.returncode == 0, words
    assert f"{len(done)} cells taken over" in words
    rows, sidecar = raw.read(tmp_path / "raw/scale.csv", "")
    keys = collections.Counter(
        tuple(row[key] for key in ("case", "dtype", "pass", "impl")) for row in rows
    )
    assert set(keys.values()) == {20}
    assert len(keys) == COUNT * TIMED
    assert sidecar["resumed"] == kills
    assert sidecar["schedule"]["seed"] == seed
    assert sum(sidecar["schedule"]["stopped"].values()) == COUNT
    assert not journal.exists()
    # No cell that was finished when a kill came was prepared again after it.
    again = prepared(log) - counts
    assert {" ".join(cell) for _, *cell in again}.isdisjoint(done)
    assert len(again) == (COUNT - len(done)) * TIMED


RULES = """
rule all:
    input: "out/a.csv"

rule measure:
    output: "out/a.csv"
    shell: "echo cell >> out/.a.journal; echo $$ > pid; touch out/a.csv; {config[then]};"
        " cp out/.a.journal out/a.csv; rm out/.a.journal"
"""


def test_snakemake_leaves_the_journal_alone(tmp_path):
    """It deletes the outputs of a failed or killed job; the journal is none of them."""
    (tmp_path / "Snakefile").write_text(RULES)
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    journal = tmp_path / "out/.a.journal"

    def start(*words) -> subprocess.Popen:
        call = [sys.executable, "-m", "snakemake", *words]
        return subprocess.Popen(call, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    start("--config", "then=exit 1").communicate()
    assert journal.read_text() == "cell\n"
    job = start("--config", "then=exec sleep 600")
    wait_until(lambda: journal.read_text() == "cell\n" * 2 and (tmp_path / "out/a.csv").exists())
    job.kill()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    job.communicate()
    assert start("--unlock").wait() == 0
    job = start("--config", "then=true")
    _, words = job.communicate()
    assert job.returncode == 0, words
    assert (tmp_path / "out/a.csv").read_text() == "cell\n" * 3
    assert not journal.exists()


def test_another_plan_starts_anew(command, tmp_path):
    job = command(*IMPLS, **MANY)
    wait_until(lambda: finished(tmp_path / "raw/.scale.journal"))
    job.send_signal(signal.SIGKILL)
    job.communicate()
    (tmp_path / "prepared").unlink()
    job = command(*IMPLS, **MANY | {"block-ms": 2})
    _, words = job.communicate()
    assert words.count("of another plan, machine or code; discarded") == 1
    assert raw.read(tmp_path / "raw/scale.csv", "")[1]["resumed"] == 0
    assert len(prepared(tmp_path / "prepared")) == COUNT * TIMED


def test_a_disk_full_at_the_end_costs_no_cell(timed, tmp_path, monkeypatch):
    log = tmp_path / "prepared"
    monkeypatch.setenv("FAKE_LOG", str(log))

    def fail(row):
        raise OSError(errno.ENOSPC, "disk full")

    with monkeypatch.context() as patch:
        patch.setattr(raw, "line", fail)
        with pytest.raises(OSError, match=r"disk full"):
            timed(["ours"])
    assert [path.name for path in (tmp_path / "raw").iterdir()] == [".fake.journal"]
    counts = prepared(log)
    rows, sidecar = raw.read(run(tmp_path, ["ours"]), "")
    assert prepared(log) == counts
    assert len(rows) == BLOCKS * len(CELLS)
    assert sidecar["resumed"] == 1
    assert sidecar["overhead"]["timed_s"] > 0


def test_a_number_survives_the_journal_bit_by_bit(timed, tmp_path, monkeypatch):
    whole = timed(["ours", "noisy"])
    write = raw.line
    monkeypatch.setattr(raw, "line", lambda row: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        timed(["ours", "noisy"])
    monkeypatch.setattr(raw, "line", write)
    assert timed(["ours", "noisy"]) == whole


def test_two_measurements_at_once_take_turns(command, tmp_path, monkeypatch):
    """However Snakemake was called: the lock is that of the GPU, not of a rule."""
    jobs, logs = [], [tmp_path / name for name in ("a.log", "b.log")]
    for log in logs:
        monkeypatch.setenv("FAKE_LOG", str(log))
        jobs.append(command(*IMPLS, **MANY | {"out": tmp_path / log.stem / "scale.csv"}))
    began = time.monotonic()
    assert [job.wait(120) for job in jobs] == [0, 0]
    spans = sorted(
        (min(times), max(times))
        for log in logs
        if (times := [float(line.split()[1]) for line in log.read_text().splitlines()])
    )
    assert began - 120 < spans[0][1] < spans[1][0]

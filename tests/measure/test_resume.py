"""Check that an interrupted measurement loses no finished cell and repeats none."""

import collections
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.calls.cell import sweep
from harness.machine import gpu_lock
from harness.measure import close
from harness.project import registry
from harness.results import raw
from tests.support.fake_nvml import FAKE
from tests.support.measuring import BLOCKS, CELLS, ROOT, run
from tests.support.patience import PATIENCE_S, wait_until

IMPLS = ("ours", "slow")
TIMED = 3  # with the twin
# The cells last long enough to be interrupted.
MANY = {"max-cases": 5, "dtypes": "float32,float16", "min-blocks": 20, "max-blocks": 20}
MANY |= {"seed": "fresh"}
SCALE, _ = registry.op("scale")
COUNT = len(list(sweep(SCALE, ["float32", "float16"], SCALE.passes, 5)))


def prepared(log: Path) -> collections.Counter:
    """Count how often each implementation prepared each cell."""
    return collections.Counter(tuple(line.split()[2:]) for line in log.read_text().splitlines())


def finished(journal: Path) -> list[str]:
    """Return the names of the cells that are complete in a journal."""
    lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
    cells = (re.match(r'{"what": "cell", "name": "([^"]+)".*\n', line) for line in lines)
    return [found[1] for found in cells if found]


@pytest.mark.slow
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
        # A kill in the middle of the next record leaves such a line.
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
    # No cell that was finished at a kill was prepared again after it.
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
    """Snakemake deletes the outputs of a failed or killed job; the journal is no output."""
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
    # Until it has ended, Snakemake would see its job fail and clear away what it left.
    job.wait()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    job.communicate()
    assert start("--unlock").wait() == 0
    job = start("--config", "then=true")
    _, words = job.communicate()
    assert job.returncode == 0, words
    assert (tmp_path / "out/a.csv").read_text() == "cell\n" * 3
    assert not journal.exists()


SHARED = """
rule all:
    input: "a", "b"

rule timed:
    output: "{name,[ab]}"
    resources: gpu=1
    shell: "touch {output}.asked; python job.py {output}"
"""
JOB = """
import sys, time
from pathlib import Path
from harness.machine import gpu_lock

other = Path("b.asked" if sys.argv[1] == "a" else "a.asked")
with gpu_lock.hold(exclusive=True):
    began = time.time()
    # The lease alone keeps the other from its turn.
    while not other.exists():
        assert time.time() < began + 300
        time.sleep(0.01)
    time.sleep(0.2)
    Path(sys.argv[1]).write_text(f"{began} {time.time()}")
"""


@pytest.mark.parametrize("flags", [["--resources", "mem_mb=9000"], ["--resources", "gpu=2"]])
def test_no_resources_on_the_command_line_let_two_time_at_once(tmp_path, flags):
    """Amounts of the command line go before those of the study, so both jobs start."""
    (tmp_path / "Snakefile").write_text(SHARED)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "pynvml.py").write_text(FAKE)
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    environment |= {gpu_lock.LOCKS: str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}
    call = [sys.executable, "-m", "snakemake", "--cores", "2", *flags]
    limit = 2 * PATIENCE_S
    done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, timeout=limit)
    assert done.returncode == 0, done.stderr
    spans = sorted([float(word) for word in (tmp_path / name).read_text().split()] for name in "ab")
    assert spans[0][1] <= spans[1][0]


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

    write, (soft, hard) = close.write, resource.getrlimit(resource.RLIMIT_FSIZE)

    def write_to_a_full_disk(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            write(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with monkeypatch.context() as patch:
        patch.setattr(close, "write", write_to_a_full_disk)
        with pytest.raises(OSError, match=r"File too large.*fake\.csv"):
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
    logs = [tmp_path / name for name in ("a.log", "b.log")]

    def start(log):
        monkeypatch.setenv("FAKE_LOG", str(log))
        return command(*IMPLS, **MANY | {"out": tmp_path / log.stem / "scale.csv"})

    first = start(logs[0])
    wait_until(logs[0].exists)
    # Wait until the other job has met the lock.
    first.send_signal(signal.SIGSTOP)
    second = start(logs[1])
    said = second.stderr.readline()
    first.send_signal(signal.SIGCONT)
    assert f"held by process {first.pid}" in said
    for job in (first, second):
        job.communicate(timeout=PATIENCE_S)
        assert job.returncode == 0
    spans = sorted(
        (min(times), max(times))
        for log in logs
        if (times := [float(line.split()[1]) for line in log.read_text().splitlines()])
    )
    assert spans[0][1] < spans[1][0]

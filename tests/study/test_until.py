"""Check that a study ends in time, that nothing of it goes on, and that its journals are closed."""

import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from harness.cli import UserError
from harness.measure.checkpoint import Journal
from harness.results import raw
from harness.study import until
from tests.support.measuring import interrupted
from tests.support.patience import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
# A job with a child; both write their numbers. `deaf` ignores the interrupt.
JOB = """
import os, signal, subprocess, sys, time
deaf, folder = sys.argv[1] == "deaf", sys.argv[2]
if deaf:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if len(sys.argv) == 3:
    subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "child"])
open(os.path.join(folder, f"{os.getpid()}.pid"), "w").close()
try:
    time.sleep(600)
except KeyboardInterrupt:
    open(os.path.join(folder, f"{os.getpid()}.interrupted"), "w").close()
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    return lambda word: [sys.executable, str(tmp_path / "job.py"), word, str(tmp_path)]


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """A journal with one of two cells."""
    return interrupted(tmp_path_factory.mktemp("measured"), ["ours", "ours_twin"])


def numbers(folder):
    return [int(path.stem) for path in folder.glob("*.pid")]


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that has ended waits for its parent.
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def test_a_command_that_ends_by_itself_tells_its_code(tmp_path):
    for code in (0, 3):
        assert until.ended([sys.executable, "-c", f"raise SystemExit({code})"], 60.0) == code


def test_a_command_that_a_signal_has_ended_tells_it_as_a_shell_does():
    end = "import os; os.kill(os.getpid(), 9)"
    call = [sys.executable, "-m", "harness.study.until", "1", "--", sys.executable, "-c", end]
    assert subprocess.run(call, cwd=ROOT).returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize(("code", "expected"), [(1, None), (0, 0)])
def test_a_command_that_ends_with_the_process_that_was_to_end_it_was_interrupted(
    monkeypatch, code, expected
):
    """A batch system sends its signal to both; work that is done is not interrupted."""
    wait, pid = subprocess.Popen.wait, os.getpid()

    def ends(process, limit_s=None):
        os.kill(pid, signal.SIGTERM)
        return wait(process, PATIENCE_S)

    monkeypatch.setattr(subprocess.Popen, "wait", ends)
    assert until.ended([sys.executable, "-c", f"raise SystemExit({code})"], 600.0) == expected


def test_a_study_ends_with_its_terminal(left, job, tmp_path):
    """Nothing can be written there any more, and the journals are closed all the same."""
    folder = tmp_path / "run/raw"
    folder.mkdir(parents=True)
    shutil.copy(left, folder)
    words = ["10", "--run", str(folder.parent), "--", *job("polite")]
    pid, terminal = pty.fork()
    if pid == 0:
        # Tests may run under nohup.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "harness.study.until", *words])
    wait_until(lambda: len(numbers(tmp_path)) == 2)
    os.close(terminal)
    ended = []
    wait_until(lambda: ended.append(os.waitpid(pid, os.WNOHANG)) or ended[-1][0])
    assert os.waitstatus_to_exitcode(ended[-1][1]) == until.ENDED
    assert not any(map(lives, numbers(tmp_path)))
    assert [path.name for path in sorted(folder.iterdir())] == ["fake.csv", "fake.json"]


@pytest.mark.parametrize("word", ["polite", "deaf"])
def test_nothing_of_a_command_goes_on(job, tmp_path, monkeypatch, word):
    monkeypatch.setattr(until, "PATIENCE_S", 1.0 if word == "deaf" else PATIENCE_S)
    began = time.monotonic()
    # The limit of the study ends as soon as both processes are there.
    late = mock.Mock(side_effect=lambda: began + 601 * (len(numbers(tmp_path)) == 2))
    monkeypatch.setattr(until, "time", mock.Mock(monotonic=late))
    # In the background of a shell the interrupt is ignored, and commands inherit that.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert until.ended(job(word), 600.0) is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until(lambda: not any(map(lives, numbers(tmp_path))))
    assert bool(list(tmp_path.glob("*.interrupted"))) == (word == "polite")


@pytest.mark.parametrize("number", until.SIGNALS)
def test_a_study_ends_with_the_process_that_was_to_end_it(left, job, tmp_path, number):
    folder = tmp_path / "run/raw"
    folder.mkdir(parents=True)
    shutil.copy(left, folder)
    words = ["10", "--run", str(folder.parent), "--", *job("polite")]
    call = [sys.executable, "-m", "harness.study.until", *words]
    # Tests may run under nohup, or in the background of a shell.
    heeded = partial(signal.signal, number, signal.SIG_DFL)
    ways = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True, "preexec_fn": heeded}
    with subprocess.Popen(call, **ways) as process:
        wait_until(lambda: len(numbers(tmp_path)) == 2)
        # Twice, as an impatient person does.
        process.send_signal(number)
        process.send_signal(number)
        try:
            _, told = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == until.ENDED, told
    assert told.endswith(f"tilewright: interrupted; closed in {folder.parent}: fake\n")
    assert not any(map(lives, numbers(tmp_path)))


def test_a_study_that_must_end_has_its_journals_closed(left, job, tmp_path):
    folder = tmp_path / "run/raw"
    folder.mkdir(parents=True)
    shutil.copy(left, folder)
    words = ["0.05", "--run", str(folder.parent), "--", *job("polite")]
    call = [sys.executable, "-m", "harness.study.until", *words]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == until.ENDED, done.stderr
    assert done.stderr.endswith(f"interrupted; closed in {folder.parent}: fake\n")
    rows, sidecar = raw.read(folder / "fake.csv", "")
    assert (len(rows), sidecar["unreached"]) == (10, 1)


def test_a_journal_that_cannot_be_closed_is_named_and_the_others_are_closed(left, tmp_path, capsys):
    shutil.copy(left, tmp_path / ".fake.journal")
    (tmp_path / ".empty.journal").touch()
    # It has no lines to read, as on a disk that fails.
    (tmp_path / ".a_folder.journal").mkdir()
    assert until.close_all(tmp_path) == ["fake"]
    told = [x for x in capsys.readouterr().err.splitlines() if x.startswith("tilewright")]
    assert len(told) == 2 and ".a_folder.journal" in told[0]
    assert ".empty.journal: no journal of a measurement" in told[1]


def test_a_job_that_ends_a_moment_later_is_waited_for(left, tmp_path):
    path = Path(shutil.copy(left, tmp_path))
    held = Journal.found(path)
    threading.Timer(0.5, held.__exit__).start()
    assert until.close_all(tmp_path) == ["fake"]


def test_a_command_that_is_none_is_named():
    with pytest.raises(UserError, match="no-such-command: No such file"):
        until.ended(["no-such-command"], 1.0)

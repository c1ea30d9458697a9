"""Check that a study prints its progress and the paths of its documents."""

import enum
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.study import progress
from tests.support.workflows import RECORDED, REPLAY, ROOT, interruptible, small, snakemake

Event = enum.Enum("Event", ["PROGRESS", "JOB_FINISHED", "RESOURCES_INFO", "JOB_INFO"])


def said(words, message, level=logging.INFO, **extra):
    """Return the message for a record, or None if it is left out."""
    record = logging.LogRecord("", level, "", 0, message, None, None)
    vars(record).update(extra)
    return record.msg if words.filter(record) else None


@pytest.mark.parametrize(
    ("done", "total", "spent_s", "text"),
    [
        (0, 134, 3, "0 of 134 jobs done (0 %)"),
        (1, 134, 2, "1 of 134 jobs done (0 %), about 4 min left"),
        (67, 134, 60, "67 of 134 jobs done (50 %), about 60 s left"),
        (100, 134, 300, "100 of 134 jobs done (74 %), about 2 min left"),
        (134, 134, 300, "134 of 134 jobs done (100 %)"),
    ],
)
def test_a_line_tells_how_many_jobs_are_done_and_how_long_the_others_may_take(
    done, total, spent_s, text
):
    assert progress.line(done, total, spent_s) == text


def test_events_become_words_and_the_rest_stays_as_it_is(tmp_path):
    clock = iter([100.0, 160.0])
    words = progress.Words(tmp_path, lambda: next(clock))
    shown = said(words, None, event=Event.PROGRESS, done=2, total=4)
    assert shown == "2 of 4 jobs done (50 %), about 60 s left"
    for event in (Event.JOB_FINISHED, Event.RESOURCES_INFO):
        assert said(words, "x", event=event) is None
    assert said(words, "Select jobs to execute...") is said(words, "Execute 3 jobs...") is None
    assert said(words, "Job 1: Verify", event=Event.JOB_INFO) == "Job 1: Verify"
    assert said(words, "Elapsed time: 1") == "Elapsed time: 1"


@pytest.mark.parametrize("last", progress.LAST)
def test_the_last_words_name_the_documents_unless_a_job_failed(tmp_path, last):
    (tmp_path / "report.html").touch()
    words = progress.Words(tmp_path)
    assert said(words, last) == f"{last}\nWritten: {tmp_path}/report.html"
    (tmp_path / "paper.pdf").touch()
    assert said(words, last).endswith(f"{tmp_path}/paper.pdf, {tmp_path}/report.html")
    said(words, "a job failed", logging.ERROR)
    assert said(words, last) == last


def test_after_an_interrupt_no_job_is_told_as_an_error(tmp_path):
    (tmp_path / "report.html").touch()
    words = progress.Words(tmp_path)
    assert said(words, "Error in rule build", logging.ERROR) == "Error in rule build"
    stopped = said(words, f"{progress.STOPPED}, this might take some time.")
    assert stopped == progress.INTERRUPTED
    assert said(words, "Error in rule verify", logging.ERROR) is None
    assert said(words, "Elapsed time: 1") == "Elapsed time: 1"


def test_ctrl_c_ends_a_study_in_a_few_lines(tmp_path):
    tree = small(tmp_path)
    shutil.copytree(ROOT / RECORDED, tree / RECORDED, dirs_exist_ok=True)
    script = tree / "harness/survey.py"
    script.write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    log = tree / "results/study/logs/survey.log"
    command = [sys.executable, "-m", "snakemake", "--nocolor", "results/study/survey.csv", *REPLAY]
    with (tmp_path / "said").open("w+") as text:
        study = subprocess.Popen(
            command, cwd=tree, stdout=text, stderr=text, start_new_session=True,
            preexec_fn=interruptible,
        )  # fmt: skip
        try:
            while study.poll() is None and not (log.is_file() and log.read_text()):
                time.sleep(0.1)
            os.killpg(study.pid, signal.SIGINT)
            assert study.wait(60) != 0
        finally:
            if study.poll() is None:
                os.killpg(study.pid, signal.SIGKILL)
        text.seek(0)
        lines = text.read().splitlines()
    after = lines[lines.index(progress.INTERRUPTED) :]
    assert len(after) <= 4, after
    assert not any("Error in rule" in line or "Exception" in line for line in lines)
    assert not (tree / ".snakemake/locks").is_dir() or not any(
        (tree / ".snakemake/locks").iterdir()
    )


def test_snakemake_prints_the_progress_and_the_documents(tmp_path):
    tree = small(tmp_path)
    shutil.copytree(ROOT / RECORDED, tree / RECORDED, dirs_exist_ok=True)
    wanted = [f"results/study/raw/{op}.csv" for op in ("dot", "scale")]
    Path(tree / "results/study").mkdir()
    (tree / "results/study/paper.pdf").touch()
    for found in ("2 of 2 jobs done (100 %)", "Nothing to be done"):
        done = snakemake(tree, *wanted, *REPLAY)
        assert done.returncode == 0, done.stderr
        assert f"\n{found}" in done.stderr
        assert done.stderr.splitlines()[-1] == "Written: results/study/paper.pdf"
        assert "Select jobs" not in done.stderr and "Finished job" not in done.stderr

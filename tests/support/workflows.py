"""Make copies of this project in which Snakemake runs."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.once import made_once

ROOT = Path(__file__).parents[2]
CODE = (
    "workflow", "profiles", "config", "harness", "network", "ops", "kernels", "baselines", "paper",
)  # fmt: skip
RECORDED = "results/recorded/hopper"
MEASURE = ("--config", "measure=True")
REPLAY = ("--config", "measure=False")
# Snakemake collects little garbage, but looks for it a hundred times; and where it touches files,
# it sleeps for a tenth of a second at each job.
SNAKEMAKE = """
import gc
from snakemake.executors import touch
from snakemake.cli import main
gc.disable()
touch.Executor.SLEEPING_TIME = 0
main()
"""


def interruptible():
    """Let a new process end by Ctrl-C, also if these tests run in the background of a shell.

    A shell lets its background jobs ignore that signal, and their processes inherit it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def copied(folder):
    """Copy the code, without history, results or Snakemake's memory."""
    for name in CODE:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Snakefile", folder)
    # Make a recorded run of nothing: a replay finds out that its files are missing.
    (folder / RECORDED).mkdir(parents=True)
    (folder / RECORDED / "manifest.json").write_text('{"files": {}}')
    return folder


@pytest.fixture
def tree(tmp_path):
    """Make a tree that has never run, in a folder whose name has a blank."""
    return copied(tmp_path / "a tree")


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory):
    """Make the tree of `finished`, once for all processes of the test run: it takes a while."""
    return made_once(tmp_path_factory, "finished", lambda folder: _finish(copied(folder)))


def _finish(tree):
    listed = snakemake(tree, "--summary", *MEASURE).stdout.splitlines()
    outputs = [tree / line.split("\t")[0] for line in listed if line.startswith("results/")]
    assert outputs
    for path in outputs:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.suffix:
            path.mkdir(exist_ok=True)
        path.touch()
    touched(tree, *MEASURE)


def touched(tree, *words):
    """Make all outputs up to date, with the parameters of each job on record."""
    # With many cores Snakemake plans few rounds of jobs.
    done = snakemake(tree, "--touch", "--forceall", "--cores", "100", *words)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def finished(finished_once, tmp_path):
    """Make a tree with every output up to date, as after a whole run that measured."""
    return Path(shutil.copytree(finished_once, tmp_path, dirs_exist_ok=True))


def snakemake(tree, *words, **environment):
    command = [sys.executable, "-c", SNAKEMAKE, "--nocolor", *words]
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True)


def jobs(tree, *words, **environment):
    """Return the messages of the jobs of a dry run."""
    done = snakemake(tree, "--dry-run", *words, **environment)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"^Job \d+: (.+)$", done.stdout + done.stderr, re.MULTILINE))


def edit(path, line="# edited"):
    path.write_text(f"{path.read_text()}\n{line}\n")
    later = time.time() + 10
    os.utime(path, (later, later))

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

from tests.support import preloaded
from tests.support.once import made_once

ROOT = Path(__file__).parents[2]
CODE = (
    "workflow", "profiles", "config", "harness", "network", "ops", "kernels", "baselines", "paper",
)  # fmt: skip
# Families and baselines that stand for all of them: one is planned as another.
FAMILIES = ("attention", "decode_attention", "matmul", "softmax", "vector")
BASELINES = (
    "flash_attn_2", "liger", "quack", "sdpa_flash", "torch_compile", "torch_compile_max",
    "torch_eager", "xformers",
)  # fmt: skip
RECORDED = "results/recorded/hopper"
MEASURE = ("--config", "measure=True")
REPLAY = ("--config", "measure=False")


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


def small(folder):
    """Copy the code as `copied` does, with a few families: Snakemake plans fewer jobs sooner."""
    copied(folder)
    for room, kept in (("ops", FAMILIES), ("kernels", FAMILIES), ("baselines", BASELINES)):
        for path in (folder / room).glob("[!_]*.py"):
            if path.stem not in kept:
                path.unlink()
    return folder


@pytest.fixture
def whole_tree(tmp_path):
    """Make a tree with all families that has never run."""
    return copied(tmp_path / "a tree")


@pytest.fixture
def tree(tmp_path):
    """Make a tree of a few families that has never run, in a folder whose name has a blank."""
    return small(tmp_path / "a tree")


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory):
    """Make the tree of `finished`, once for all processes of the test run: it takes a while."""
    return made_once(tmp_path_factory, "finished", lambda folder: _finish(small(folder)))


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
    """Run Snakemake in a tree; `environment`: variables besides those of this process."""
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment
    call = ["--nocolor", *words]
    if "PYTHONPATH" in environment:
        command = [sys.executable, "-m", "snakemake", *call]
        return subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True)
    return preloaded.run("snakemake", call, tree, variables)


def jobs(tree, *words, **environment):
    """Return the messages of the jobs of a dry run."""
    done = snakemake(tree, "--dry-run", *words, **environment)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"^Job \d+: (.+)$", done.stdout + done.stderr, re.MULTILINE))


def edit(path, line="# edited"):
    path.write_text(f"{path.read_text()}\n{line}\n")
    later = time.time() + 10
    os.utime(path, (later, later))

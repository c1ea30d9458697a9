"""Libraries that tune themselves do so alone, and nothing is measured before they did."""

import json
import os
import re
import subprocess
import sys

import pytest
from patience import PATIENCE_S
from test_lease import FAKE
from test_measure import BENCH, ROOT

from harness import autotune, digests, lease, process
from harness.command import UserError
from harness.sources import self_tuned

OP, FAMILY = "scale", "vector"
UUID = "GPU-00-fake"


@pytest.fixture
def command(tmp_path):
    """Runs `python -m harness.autotune` with a fake driver for two cells of scale; its report."""
    (tmp_path / "pynvml.py").write_text(FAKE)

    def run(impl) -> dict:
        out = tmp_path / "autotune" / OP / f"{impl}.json"
        environment = os.environ | {lease.LOCKS: str(tmp_path), "PYTHONPATH": str(tmp_path)}
        environment["FAKE_LOG"] = str(tmp_path / "prepared")
        for name in ("CUDA_VISIBLE_DEVICES", *process.KEEP, *autotune.ANEW):
            environment.pop(name, None)
        call = [sys.executable, "-m", "harness.autotune", "--op", OP, "--impl", impl]
        call += ["--out", str(out), "--bench", BENCH, "--dtypes", "bfloat16"]
        call += ["--max-cases", "1", "--cell-timeout-s", str(PATIENCE_S)]
        subprocess.run(call, cwd=ROOT, env=environment, check=True)
        return json.loads(out.read_text())

    return run


def test_a_library_meets_each_cell_told_to_choose_anew_and_to_keep_it(command):
    found = command("says_how_it_tunes")
    assert found["gpu"] == {"name": "NVIDIA H200", "uuid": UUID}
    assert found["code_sha256"] == digests.implementation(ROOT, FAMILY, found["impl"])
    assert [cell["cell"].split()[-1] for cell in found["cells"]] == ["forward", "backward"]
    assert {cell["reason"] for cell in found["cells"]} == {"anew, kept"}


def test_a_library_that_falls_while_it_tunes_meets_the_next_cell_nevertheless(command):
    found = command("segfaults_at_once")
    assert [cell["status"] for cell in found["cells"]] == ["crashed", "crashed"]
    assert {cell["reason"] for cell in found["cells"]} == {"died by SIGSEGV"}


@pytest.mark.parametrize(("impl", "workers"), [("slow", 1), ("keeps_memory", 2)])
def test_a_worker_that_cannot_give_memory_back_is_replaced(command, tmp_path, impl, workers):
    assert [cell["status"] for cell in command(impl)["cells"]] == ["ok", "ok"]
    prepared = (tmp_path / "prepared").read_text().splitlines()
    assert len({line.split()[0] for line in prepared}) == workers


def test_a_library_that_is_not_here_has_nothing_to_tune(command):
    assert [cell["status"] for cell in command("absent")["cells"]] == ["unavailable"]


@pytest.fixture
def tree(tmp_path):
    """A tree with one baseline that tunes itself for one op, and its report."""
    (tmp_path / "baselines").mkdir()
    (tmp_path / "baselines/tunes.py").write_text('AUTOTUNES = ("matmul",)\n')
    (tmp_path / "baselines/plain.py").write_text("LIBRARY = 'plain'\n")
    (tmp_path / "matmul").mkdir()
    gpu = {"name": "NVIDIA H200", "uuid": UUID}
    content = {"code_sha256": "tunes", "date": "2026-11-22T00:00:00Z", "gpu": gpu, "cells": []}
    (tmp_path / "matmul/tunes.json").write_text(json.dumps(content))
    return tmp_path


def required(tree, op="matmul", gpu="NVIDIA H200"):
    impls = ["ours", "ours_twin", "plain", "tunes"]
    return autotune.required(tree, tree, op, impls, lambda impl: impl, gpu)


def test_what_a_library_chose_is_named_with_its_board(tree):
    assert required(tree) == {"tunes": {"date": "2026-11-22T00:00:00Z", "gpu": UUID}}
    assert required(tree, op="softmax") == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"code_sha256": "older"}, "is of other code or another version; make it with"),
        ({"gpu": {"name": "NVIDIA A100", "uuid": UUID}}, "is of another GPU, NVIDIA A100"),
        ({"date": None}, "has no 'date'; make it with python -m harness.autotune --op matmul"),
    ],
)
def test_a_report_that_does_not_fit_is_named(tree, changes, message):
    path = tree / "matmul/tunes.json"
    content = json.loads(path.read_text()) | changes
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept))
    with pytest.raises(UserError, match=rf"{re.escape(str(path))}: {message}"):
        required(tree)


def test_a_report_that_is_missing_is_named(tree):
    (tree / "matmul/tunes.json").unlink()
    with pytest.raises(UserError, match=r"tunes.json: missing; make it with .* --impl tunes"):
        required(tree)


def test_what_files_declare_is_found():
    baselines = ["flash_attn_2", "quack", "torch_eager", "xformers"]
    assert self_tuned(ROOT, "matmul", baselines) == ["quack", "xformers"]
    assert self_tuned(ROOT, "rms_norm", baselines) == ["flash_attn_2"]
    assert self_tuned(ROOT, "softmax", baselines) == []

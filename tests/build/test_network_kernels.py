"""Kernels of a decoded token, and of a step without its update, compile for Hopper at real sizes.

The interpreter does not look at types, and the builds of single ops have sizes of their own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import network_build

ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.slow
CALLS = [
    ("token", "llama-1b", "1", "1024"),
    ("token", "llama-1b", "64", "1024"),
    ("token", "gpt2-124m", "16", "512"),
    pytest.param(("logits", "llama-1b", "64", "1024"), marks=SLOW),
    pytest.param(("logits", "gpt2-124m", "16", "512"), marks=SLOW),
    pytest.param(("step", "llama-1b", "4", "4096"), marks=SLOW),
    pytest.param(("step", "gpt2-124m", "16", "1024"), marks=SLOW),
]


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_the_kernels_of_a_network_compile_for_hopper(call):
    # That process interprets no kernel.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.network_build", *call], cwd=ROOT, env=environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(run.stdout)
    assert len(found["kernels"]) >= 4 and found["failed"] == {}


def test_a_failure_is_not_hidden_by_a_launch_of_the_same_name(monkeypatch):
    def row(launch, arch):
        return {"status": launch.status, "fits": True, "reason": launch.status}

    monkeypatch.setattr(network_build.compiler, "row", row)
    found = [SimpleNamespace(name="k", config="c", status=each) for each in ("a fault", "ok")]
    assert network_build.failures(found) == {"k c": "a fault"}

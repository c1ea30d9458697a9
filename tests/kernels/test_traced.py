"""Check without a GPU that torch.compile takes each op as one graph, forward and backward."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton.language as tl

from harness.study import jobs
from tests.support import kernel_files

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_each_op_is_one_graph():
    # In this process the kernels are the interpreter's, which cannot be traced.
    command = [sys.executable, str(ROOT / "tests/support/traced.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    counts = {name: int(said.pop(name).split()[0]) for name in jobs.ops(ROOT)}
    assert said == {}
    assert min(counts.values()) >= 2


def test_strings_of_kernels_are_of_one_line():
    """Inductor (torch 2.11) writes strings into generated source, where a line break ends them."""
    found = 0
    for module in kernel_files.modules():
        for name, value in vars(module).items():
            if isinstance(value, tl.constexpr) and isinstance(value.value, str):
                assert value.value.isprintable(), f"{module.__name__}: {name}"
                found += 1
    assert found

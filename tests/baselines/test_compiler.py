"""A machine without a compiler: torch.compile cannot run, and the message says what to install."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import status

ROOT = Path(__file__).parents[2]


def test_torch_compile_without_a_compiler_is_two_lines(tmp_path):
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "harness.verify", "--op", "add", "--impl", "torch_compile"]
    command += ["--seed", "1", "--dtypes", "float32", "--passes", "forward", "--out", str(out)]
    lacking = {"CXX": "/absent/c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    # Neither is asked for where a GPU compiles through Triton.
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | lacking | hidden, capture_output=True, text=True
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("tilewright: ")]
    assert done.returncode == 2
    assert said == [
        "tilewright: verify add torch_compile: needs a C++ compiler and finds none; run: apt-get"
        " install g++, or leave it out of `baselines` in config/config.yaml"
    ]
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.parametrize(
    "message",
    [
        "No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')",
        "Failed to find C compiler. Please specify via CC environment variable.",
    ],
)
def test_the_messages_of_both_compilers_are_known(message):
    assert status.no_compiler(RuntimeError(f"InvalidCxxCompiler: {message}"))
    assert not status.no_compiler(RuntimeError("the compiler found an error"))

"""The survey finds the kernels that a library ships, by its syntax trees alone."""

import csv
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from harness import survey

ROOT = Path(__file__).resolve().parents[1]
SOURCE = """
import triton
import triton.language as tl
from triton import jit as compiled
from triton.experimental import gluon


@triton.jit
def plain(x):
    return x


@triton.autotune(configs=[], key=[])
@triton.jit(noinline=True)
def tuned(
    x,
):
    return x


@compiled
def renamed(x): return x


@gluon.jit
def lower(x): return x


@torch.jit
def other(x): return x


def undecorated(x): return x
"""


def found(source, path="library/ops.py"):
    return {row["kernel"]: row for row in survey.kernels(source, PurePosixPath(path))}


def test_decorated_functions_are_kernels():
    rows = found(SOURCE)
    assert list(rows) == ["plain", "tuned", "renamed", "lower"]
    assert [row["lines"] for row in rows.values()] == [2, 4, 1, 1]
    assert [name for name, row in rows.items() if row["autotuned"]] == ["tuned"]


@pytest.mark.parametrize(
    ("line", "decorator"),
    [
        ("import triton as t", "t.jit"),
        ("from .compat import triton", "triton.jit"),
        ("from ..runtime.jit import jit", "jit"),
        ("from triton.experimental.gluon import jit", "jit"),
    ],
)
def test_the_decorator_has_many_names(line, decorator):
    assert list(found(f"{line}\n@{decorator}\ndef kernel(x): pass\n")) == ["kernel"]


@pytest.mark.parametrize(
    "source",
    [
        "from numba import jit\n@jit\ndef kernel(x): pass\n",
        "import torch\n@torch.jit.script\ndef kernel(x): pass\n",
        "template = '''\n@triton.jit\ndef kernel(x): pass\n'''\n",
        "@triton.jit\ndef broken(:\n",
    ],
)
def test_other_functions_are_not(source):
    assert found(source) == {}


@pytest.mark.parametrize(
    ("path", "kernel", "category"),
    [
        ("flash_attn/flash_attn_triton.py", "_fwd_kernel", "attention"),
        ("liger_kernel/ops/rms_norm.py", "_rms_norm_forward_kernel", "norm"),
        ("liger_kernel/ops/fused_linear_cross_entropy.py", "element_mul_kernel", "loss"),
        ("liger_kernel/ops/swiglu.py", "_swiglu_forward_kernel", "activation"),
        ("triton/language/standard.py", "argmax", "search"),
        ("triton/language/random.py", "philox", "random"),
        ("torch/sparse/_triton_ops.py", "_scatter_mm2_kernel", "matmul"),
        ("torch/testing/_internal/triton_utils.py", "add_kernel", "test"),
        ("triton/language/standard.py", "operand", "other"),
    ],
)
def test_categories(path, kernel, category):
    assert survey.category(PurePosixPath(path), kernel) == category


def test_libraries_are_those_of_the_baselines(tmp_path):
    (tmp_path / "one.py").write_text('import absent\nLIBRARY = "some-library"\n')
    (tmp_path / "two.py").write_text('LIBRARY = "some-library"\n')
    (tmp_path / "_shared.py").write_text('LIBRARY = "hidden"\n')
    assert survey.libraries(tmp_path) == ["some-library", "triton"]


def test_an_absent_library_has_no_rows():
    assert survey.survey("a-library-that-is-not-here") == []


def test_the_command_writes_the_kernels_of_this_environment(tmp_path):
    out = tmp_path / "survey.csv"
    # Fails if a library is imported: torch, by a name that hides it, is none.
    script = "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
    script += f"sys.argv[1:] = ['--out', {str(out)!r}]\n"
    script += "from harness import survey; survey.main()"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(out.open()))
    assert tuple(rows[0]) == survey.COLUMNS
    names = {row["kernel"] for row in rows if row["library"] == "triton"}
    assert {"softmax", "cdiv", "randn"} <= names
    assert all(row["version"] and int(row["lines"]) > 0 for row in rows)

"""Make a small project whose implementations the command verifies."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import kernel_files

ROOT = Path(__file__).resolve().parents[2]

OPS = """
from ops._spec import Cost, Op, Tensor, make_case


def double_reference(x):
    return x * 2


EDGE = (make_case(N=100), make_case(N=1000))
MIXED = (make_case(N=0), make_case(N=100, values="large"), make_case(N=100), make_case(N=1000))
DOUBLE = Op("double", double_reference, {"x": Tensor("N")}, lambda *a: Cost(0, 0, 0), EDGE, ())
MIXED = Op("mixed", double_reference, {"x": Tensor("N")}, lambda *a: Cost(0, 0, 0), MIXED, ())
BROKEN = Op("broken", double_reference, {"x": Tensor("N")}, lambda *a: Cost(0, 0, 0), EDGE, ())
"""
KERNELS = """
import torch, triton, triton.language as tl


@triton.jit
def _double_kernel(x_ptr, out_ptr, N, BLOCK_N: tl.constexpr):
    offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < N) * 2, mask=offs < N)


def double(x):
    out = torch.empty_like(x)
    _double_kernel[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), BLOCK_N=128)
    return out


mixed = double


def broken(x):
    out = torch.empty_like(x)
    _double_kernel[(x.numel() // 128,)](x, out, x.numel(), BLOCK_N=128)
    return out
"""
PICKY = """
import os
LIBRARY = "torch"

def double(x):
    if x.numel() == 100:
        if x.element_size() == 4:
            os.abort()
        raise MemoryError("no room")
    if x.element_size() == 4:
        raise ValueError("only halves\\nand other words")
    return x + x
"""
SUSPECT_OPS = """
from ops._faults import FAULTS, HANGS, small
from ops._spec import Cost, Op, Tensor, make_case

def op(name, sizes):
    edge = tuple(make_case(N=size, dtypes=("float32",)) for size in sizes)
    return Op(name, small, {"x": Tensor("N")}, lambda *a: Cost(0, 0, 0), edge, ())

FAULTY = op("faulty", [size for size in FAULTS if size != HANGS])
STUCK = op("stuck", [HANGS, 120])
"""
SUSPECT = """
from kernels._faults import faulty

stuck = faulty
"""
SUSPECT_TOO = """
from kernels._faults import faulty

LIBRARY = "torch"
stuck = faulty
"""
SKEWED = """
LIBRARY = "torch"

def double(x):
    return x * (2.06 if x.numel() == 1000 else 2)
"""
SLOW = """
import time
LIBRARY = "torch"

def double(x):
    time.sleep(0.05)
    return x * (2 if x.numel() == 100 else 2.06)


mixed = double
"""
ABSENT = (
    "import a_library_that_is_not_here\n\nLIBRARY = 'nothing'\n\ndef double(x):\n    return x\n"
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Make a small project: this harness, two ops, one broken, and baselines with faults."""
    root = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "harness", root / "harness", ignore=ignore)
    for path, text in {
        "ops/__init__.py": "",
        "ops/toy.py": OPS,
        "ops/_faults.py": (ROOT / "tests/support/faults.py").read_text(),
        "ops/suspect.py": SUSPECT_OPS,
        "kernels/__init__.py": "",
        "ops/_spec.py": (ROOT / "ops/_spec.py").read_text(),
        "kernels/toy.py": KERNELS,
        "baselines/__init__.py": "",
        "baselines/picky.py": PICKY,
        "baselines/absent.py": ABSENT,
        "baselines/skewed.py": SKEWED,
        "baselines/slow.py": SLOW,
        "kernels/_faults.py": (ROOT / "tests/support/faults.py").read_text(),
        "kernels/suspect.py": SUSPECT,
        "baselines/suspect.py": SUSPECT_TOO,
    }.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text)
    # The harness knows the cache of launches.
    kernel_files.copy_shared(root / "kernels")
    return root


def verify(tree, op, impl, *more):
    report = tree / f"{op}-{impl}.json"
    report.unlink(missing_ok=True)
    call = [sys.executable, "-m", "harness.verify", "--op", op, "--impl", impl, *more]
    done = subprocess.run(
        [*call, "--out", report.name],
        cwd=tree,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    return done, json.loads(report.read_text()) if report.exists() else None

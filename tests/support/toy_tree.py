"""Make a project with one small kernel file."""

import json
import os
import shutil
from pathlib import Path

from tests.support import kernel_files, preloaded

ROOT = Path(__file__).resolve().parents[2]
OPS = """
from ops._spec import Cost, Op, Tensor, make_case

OP = Op(
    "double", lambda x: x * 2, {"x": Tensor("N")}, lambda *a: Cost(0, 0, 0),
    (make_case(N=3),), (make_case(N=4096), make_case(N=10000)), ("forward", "backward"),
)
"""
KERNELS = """
import torch, triton, triton.language as tl
from kernels._runtime.configs import Configs


@triton.jit
def _twice(x):
    return x * 2


@triton.jit
def _double_kernel(x_ptr, out_ptr, N, BLOCK_N: tl.constexpr):
    offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + offs, _twice(tl.load(x_ptr + offs, mask=offs < N)), mask=offs < N)


@triton.jit
def _small_kernel(x_ptr, out_ptr, N):
    for i in range(N):
        tl.store(out_ptr + i, _twice(tl.load(x_ptr + i)))


DEFAULT = {"BLOCK_N": 512, "num_warps": 4}
CONFIGS = Configs(
    _double_kernel,
    (DEFAULT, {"BLOCK_N": 1024, "num_warps": 8}, {"BLOCK_N": 1000, "num_warps": 4}),
    lambda n: DEFAULT,
)


def _launch(x):
    out = torch.empty_like(x)
    n = x.numel()
    if n < 10:
        _small_kernel[(1,)](x, out, n)
    else:
        config = CONFIGS.pick(x.device, n=n)
        _double_kernel[(triton.cdiv(n, config["BLOCK_N"]),)](x, out, N=n, **config)
    return out


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _launch(x)

    @staticmethod
    def backward(ctx, dy):
        return _launch(dy)


def double(x):
    return _Double.apply(x)
"""


def make_tree(root, kernels=KERNELS, ops=OPS):
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "harness", root / "harness", ignore=ignore)
    for name in ("ops", "kernels", "baselines"):
        (root / name).mkdir()
        (root / name / "__init__.py").write_text("")
    kernel_files.copy_shared(root / "kernels")
    shutil.copy(ROOT / "ops/_spec.py", root / "ops")
    (root / "ops/toy.py").write_text(ops)
    (root / "kernels/toy.py").write_text(kernels)
    return root


def build(root, *words, file="toy"):
    """words: architectures, then options."""
    out = root / "results" / "toy.json"
    call = ["--file", file, "--archs", *words]
    # TRITON_INTERPRET must not be inherited, and each tree has a compiler cache of its own.
    own = {"TRITON_CACHE_DIR": str(root / "cache"), "TRITON_INTERPRET": "1"}
    call += ["--out", str(out), "--ir", str(root / "results/toy")]
    done = preloaded.run("harness.build", call, root, os.environ | own)
    return done, json.loads(out.read_text()) if out.exists() else None

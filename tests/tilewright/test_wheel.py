"""The wheel: its content, what it depends on, and calls from an environment that has only that."""

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from harness.machine import nvml
from harness.project import source_tree
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
INIT = "src/tilewright/__init__.py"

# Runs in the fresh environment: calls each kind of kernel and says what was imported for it.
PROGRAM = """
import json, sys
import torch
import tilewright
from tilewright import attention, matmul, rms_norm, softmax

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

def randn(*shape):
    return torch.randn(*shape, device=device)

def error(ours, theirs):
    return (ours - theirs).abs().max().item()

x, weight = randn(5, 300).requires_grad_(), randn(300)
functional = torch.nn.functional
q, k, v = (randn(1, 2, 20, 32) for _ in range(3))
a, b = randn(33, 20), randn(20, 17)
told = {
    "softmax": error(softmax(x), functional.softmax(x, -1)),
    "rms_norm": error(rms_norm(x, weight, eps=1e-6), functional.rms_norm(x, (300,), weight, 1e-6)),
    "attention": error(attention(q, k, v), functional.scaled_dot_product_attention(q, k, v)),
    "matmul": error(matmul(a, b), a @ b),
}
(ours,) = torch.autograd.grad(softmax(x).square().sum(), x)
(theirs,) = torch.autograd.grad(functional.softmax(x, -1).square().sum(), x)
told["softmax backward"] = error(ours, theirs)
told = {"errors": told, "file": tilewright.__file__, "kernels": "kernels" in sys.modules}
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this tree, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, ROOT], check=True, timeout=PATIENCE_S)
    (found,) = folder.glob("tilewright-*.whl")
    return found


@pytest.fixture(scope="module")
def fresh(wheel, tmp_path_factory):
    """The Python of a new environment that has the wheel, PyTorch and Triton."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--no-index", wheel], check=True, timeout=PATIENCE_S)
    # To download PyTorch again would take minutes: the new environment reads that of the tests.
    (place,) = folder.glob("lib/python*/site-packages")
    (place / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(python, program, folder, **variables):
    """The JSON that a program prints in another environment, away from the source tree."""
    device = {} if nvml.gpus() else {"TRITON_INTERPRET": "1"}
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    done = subprocess.run(
        [python, "-c", program],
        cwd=folder,
        env=environment | device | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_wheel_holds_the_kernels_and_their_tables_only(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert "tilewright/__init__.py" in names
    assert {name.split("/")[0] for name in names} == {"tilewright"}
    kernels = {name for name in names if name.startswith("tilewright/kernels/")}
    here = (path for path in (ROOT / "kernels").rglob("*") if path.suffix in (".py", ".json"))
    assert kernels == {f"tilewright/{path.relative_to(ROOT).as_posix()}" for path in here}


def test_the_wheel_depends_on_torch_and_triton_alone(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    metadata = message_from_bytes(archive.read(name))
    needed = {line.split(">")[0] for line in metadata.get_all("Requires-Dist")}
    assert needed == {"torch", "triton"}


def test_a_fresh_environment_computes_from_the_wheel(fresh, tmp_path):
    told = run(fresh, PROGRAM, tmp_path)
    assert Path(told["file"]).is_relative_to(fresh.parents[1])
    assert not told["kernels"]
    assert max(told["errors"].values()) < 1e-4, told["errors"]


def test_the_first_example_of_the_readme_runs(fresh, tmp_path):
    """Fewer rows, because the interpreter is slow; float32, which it does not round."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert 'device="cuda"' in code and "4096" in code and "bfloat16" in code
    code = code.replace("4096", "3").replace("bfloat16", "float32")
    if not nvml.gpus():
        code = code.replace('device="cuda"', 'device="cpu"')
    code += "\nassert torch.allclose(y, torch.softmax(x, -1))\nprint(list(x.grad.shape))"
    assert run(fresh, code, tmp_path) == [3, 8192]


def test_the_package_imports_torch_and_triton_alone(wheel):
    archive = zipfile.ZipFile(wheel)
    imported = set()
    for name in (name for name in archive.namelist() if name.endswith(".py")):
        for node in ast.walk(ast.parse(archive.read(name))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"torch", "triton"}


def test_every_recorded_op_is_exported():
    """An op that was just added need not be, so that its author can try it first."""
    tree = source_tree.parsed(ROOT, INIT)
    exported = source_tree.literal(ROOT, INIT, "__all__", ())
    imported = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert sorted(imported) == sorted(exported)
    recorded = {path.stem for path in (ROOT / "results/recorded/hopper/raw").glob("*.csv")}
    # A class stands beside the function of its op. A whole network is no function of the package.
    assert recorded - source_tree.network_ops(ROOT).keys() <= set(exported)
    others = {name for name in exported if name.lower() not in source_tree.ops(ROOT)}
    assert others == {"BlockMask"}, "neither an op nor the class of an argument"

"""What is said of a machine is true of it, whether it has a GPU and a history or neither."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from harness import ceilings, environment
from harness.command import UserError

ROOT = Path(__file__).resolve().parents[1]
RECORD = [
    "run_id",
    "date",
    "commit",
    "dirty",
    "python",
    "platform",
    "cpu",
    "cores",
    "memory_gib",
    "gpu",
    "versions",
    "config_sha256",
]


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    call = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(call, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tree(tmp_path) -> Path:
    """A committed tree with two baselines of one library."""
    (tmp_path / "baselines").mkdir()
    (tmp_path / "baselines/__init__.py").touch()
    for stem in ("sdpa", "eager"):
        (tmp_path / f"baselines/{stem}.py").write_text('import nowhere\nLIBRARY = "hypothesis"\n')
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


@pytest.fixture
def no_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.fixture
def driver(monkeypatch):
    """A fake driver of one H200 that keeps its VBIOS to itself."""

    class NVMLError(Exception):
        pass

    def secret(device):
        raise NVMLError

    answers = {
        "DeviceGetCount": 1,
        "DeviceGetHandleByIndex": 5,
        "DeviceGetHandleByUUID": 5,
        "DeviceGetUUID": "GPU-1",
        "DeviceGetName": "NVIDIA H200",
        "DeviceGetCudaComputeCapability": (9, 0),
        "DeviceGetMemoryInfo": types.SimpleNamespace(total=140 * 2**30),
        "DeviceGetEnforcedPowerLimit": 700_000,
        "DeviceGetEccMode": [1, 1],
        "DeviceGetMigMode": [0, 0],
        "DeviceGetMaxClockInfo": 1980,
        "SystemGetCudaDriverVersion_v2": 13000,
        "SystemGetDriverVersion": "580.1",
        "Init": None,
    }
    module = types.ModuleType("pynvml")
    module.NVMLError, module.NVML_CLOCK_SM, module.NVML_CLOCK_MEM = NVMLError, 1, 2
    module.nvmlDeviceGetVbiosVersion = secret
    for name, value in answers.items():
        setattr(module, f"nvml{name}", lambda *_, value=value: value)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_without_a_gpu_it_says_so(tree, no_driver):
    found = environment.describe(tree, "c0ffee")
    assert list(found) == RECORD
    assert found["gpu"] is None
    assert found["config_sha256"] == "c0ffee"
    commit = git(tree, "rev-parse", "HEAD")
    assert found["commit"] == commit
    assert found["run_id"].endswith(f"Z-{commit[:7]}-nogpu")
    assert found["cores"] > 0 and found["memory_gib"] > 0


def test_with_a_gpu_it_describes_it(tree, driver):
    found = environment.describe(tree, "")
    assert found["run_id"].endswith("-h200")
    assert found["gpu"] == {
        "name": "NVIDIA H200",
        "uuid": "GPU-1",
        "sm": "sm_90",
        "memory_gib": 140.0,
        "driver": "580.1",
        "vbios": None,
        "cuda": "13.0",
        "power_limit_w": 700.0,
        "max_sm_mhz": 1980,
        "max_mem_mhz": 1980,
        "ecc": True,
        "mig": False,
    }


@pytest.mark.parametrize("new", ["baselines/eager.py", "baselines/fresh.py"])
def test_a_changed_or_new_file_makes_the_tree_dirty(tree, new):
    assert environment.revision(tree)[1] is False
    (tree / new).write_text("LIBRARY = 'x'\n")
    assert environment.revision(tree) == (git(tree, "rev-parse", "HEAD"), True)


def test_without_history_the_variable_is_the_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_COMMIT", "abc1234")
    assert environment.revision(tmp_path) == ("abc1234", False)
    monkeypatch.delenv("TILEWRIGHT_COMMIT")
    assert environment.revision(tmp_path) == ("unknown", True)


def test_the_history_around_a_tree_is_not_its_own(tree, monkeypatch):
    monkeypatch.delenv("TILEWRIGHT_COMMIT", raising=False)
    assert environment.revision(tree / "baselines") == ("unknown", True)


def test_libraries_are_read_without_importing_them(tree, no_driver):
    versions = environment.describe(tree, "")["versions"]
    assert list(versions) == ["torch", "triton", "hypothesis"]
    assert versions["hypothesis"] == environment.version("hypothesis")


def test_an_absent_library_has_no_version():
    assert environment.version("no-such-distribution") is None


def test_a_baseline_without_a_library_is_named(tree):
    (tree / "baselines/mute.py").write_text("x = 1\n")
    with pytest.raises(UserError, match=r"baselines/mute\.py: has no LIBRARY"):
        environment.libraries(tree)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
    ],
)
def test_the_model_fits_a_file_name(name, model):
    assert environment.model(name) == model


def test_it_needs_neither_torch_nor_triton(tmp_path):
    code = (
        "import sys; sys.modules |= {'torch': None, 'triton': None};"
        "sys.argv = ['environment', '--out', sys.argv[1], '--config-sha256', 'x'];"
        "import runpy; runpy.run_module('harness.environment', run_name='__main__')"
    )
    out = tmp_path / "environment.json"
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=ROOT, check=True)
    assert list(json.loads(out.read_text())) == RECORD


def test_ceilings_without_a_gpu_are_a_header(tmp_path, no_driver, monkeypatch):
    out = tmp_path / "ceilings.csv"
    monkeypatch.setattr(sys, "argv", ["ceilings", "--out", str(out)])
    ceilings.main()
    assert out.read_text() == "quantity,unit,value,source\n"
    assert ceilings.read(out) == []


def test_ceilings_are_read_as_written(tmp_path):
    out = tmp_path / "ceilings.csv"
    ceilings.write(out, [("read", "GB/s", 4380.5, "measured")])
    row = {"quantity": "read", "unit": "GB/s", "value": 4380.5, "source": "measured"}
    assert ceilings.read(out) == [row]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n",
        "quantity,unit,value,source\nread,GB/s\n",
        "quantity,unit,value,source\nread,GB/s,x,y\n",
    ],
)
def test_alien_ceilings_are_refused(tmp_path, text):
    out = tmp_path / "ceilings.csv"
    out.write_text(text)
    with pytest.raises(UserError, match=r"ceilings\.csv.*make it with"):
        ceilings.read(out)
    out.unlink()
    with pytest.raises(UserError, match="missing"):
        ceilings.read(out)

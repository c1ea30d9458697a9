"""Check the description of a machine, with and without a GPU or a git history."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from harness.cli import UserError
from harness.machine import environment
from harness.project import libraries

ROOT = Path(__file__).resolve().parents[2]
POWER_LIMIT = "nvmlDeviceGetEnforcedPowerLimit"
DRIVER = "nvmlSystemGetDriverVersion"
RECORD = [
    "run_id",
    "date",
    "commit",
    "dirty",
    "image",
    "python",
    "platform",
    "kernel",
    "cpu",
    "cores",
    "memory_gib",
    "gpu",
    "gpus",
    "versions",
    "hashes",
    "config_sha256",
]


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    call = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(call, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tree(tmp_path) -> Path:
    """Make a committed tree with two baselines of one library."""
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


@pytest.fixture(autouse=True)
def _no_commit_is_stated(monkeypatch):
    """Forget the commit that an image tells; the trees here have histories of their own."""
    monkeypatch.delenv("TILEWRIGHT_COMMIT", raising=False)


@pytest.fixture
def driver(monkeypatch):
    """Imitate a driver of one H200 that does not report its VBIOS."""

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
        "DeviceGetEnforcedPowerLimit": 650_000,
        "DeviceGetPowerManagementDefaultLimit": 700_000,
        "DeviceGetPersistenceMode": 0,
        "DeviceGetClockInfo": 345,
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
        "power_limit_w": 650.0,
        "power_default_w": 700.0,
        "sm_mhz": 345,
        "mem_mhz": 345,
        "max_sm_mhz": 1980,
        "max_mem_mhz": 1980,
        "ecc": True,
        "mig": False,
        "persistence": False,
    }


@pytest.mark.parametrize("new", ["baselines/eager.py", "baselines/fresh.py"])
def test_a_changed_or_new_file_makes_the_tree_dirty(tree, new):
    assert environment.revision(tree)[1] is False
    (tree / new).write_text("LIBRARY = 'x'\n")
    assert environment.revision(tree) == (git(tree, "rev-parse", "HEAD"), True)


def test_without_history_the_variable_is_the_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_COMMIT", "abc1234")
    assert environment.revision(tmp_path) == ("abc1234", False)
    monkeypatch.setenv("TILEWRIGHT_COMMIT", "abc1234-dirty")
    assert environment.revision(tmp_path) == ("abc1234", True)
    monkeypatch.delenv("TILEWRIGHT_COMMIT")
    assert environment.revision(tmp_path) == ("unknown", True)


def test_a_history_of_another_commit_than_the_variable_says_is_refused(tree, monkeypatch):
    commit = git(tree, "rev-parse", "HEAD")
    for stated in (commit, commit[:9], f"{commit}-dirty"):
        monkeypatch.setenv("TILEWRIGHT_COMMIT", stated)
        assert environment.revision(tree) == (commit, False)
    monkeypatch.setenv("TILEWRIGHT_COMMIT", "abc1234")
    with pytest.raises(UserError, match=f"is abc1234, and the history here is at {commit[:12]}"):
        environment.revision(tree)


def test_the_history_around_a_tree_is_not_its_own(tree, monkeypatch):
    monkeypatch.delenv("TILEWRIGHT_COMMIT", raising=False)
    assert environment.revision(tree / "baselines") == ("unknown", True)


def test_libraries_are_read_without_importing_them(tree, no_driver):
    versions = environment.describe(tree, "")["versions"]
    assert list(versions) == ["torch", "triton", "hypothesis"]
    assert versions["hypothesis"] == libraries.version("hypothesis")


def test_an_absent_library_has_no_version_and_no_hash():
    assert libraries.version("no-such-distribution") is None
    assert libraries.content_hash("no-such-distribution") is None


def installed(folder: Path, record: str, monkeypatch) -> str | None:
    """Return the hash of a distribution with this RECORD."""
    notes = folder / "fake_wheel-1.0.dist-info"
    notes.mkdir(parents=True)
    (notes / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-wheel\nVersion: 1.0\n")
    (notes / "RECORD").write_text(record)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        return libraries.content_hash("fake-wheel")


def test_a_hash_tells_builds_apart_and_installations_not(tmp_path, monkeypatch):
    wheel = "fake/__init__.py,sha256=aa,1\nfake/core.so,sha256=bb,2\n"
    added = (
        "fake_wheel-1.0.dist-info/RECORD,,\n"
        "fake_wheel-1.0.dist-info/INSTALLER,sha256=cc,3\n"
        "fake_wheel-1.0.dist-info/REQUESTED,sha256=dd,0\n"
        "fake/__pycache__/core.cpython-311.pyc,sha256=ee,9\n"
        "../../../bin/fake,sha256=ff,4\n"
    )
    plain = installed(tmp_path / "a", wheel, monkeypatch)
    assert len(plain) == 64
    turned = "".join(reversed(wheel.splitlines(keepends=True)))
    assert installed(tmp_path / "b", added + turned, monkeypatch) == plain
    assert installed(tmp_path / "c", wheel.replace("bb", "b0"), monkeypatch) != plain
    assert installed(tmp_path / "d", "", monkeypatch) is None


def test_every_library_has_its_version_and_hash(tree, no_driver):
    found = environment.describe(tree, "")
    assert list(found["hashes"]) == list(found["versions"])
    assert all(len(digest) == 64 for digest in found["hashes"].values())


def test_the_image_is_what_is_stated(tree, no_driver, monkeypatch):
    monkeypatch.delenv("TILEWRIGHT_IMAGE", raising=False)
    assert environment.describe(tree, "")["image"] is None
    monkeypatch.setenv("TILEWRIGHT_IMAGE", "sha256:1234")
    assert environment.describe(tree, "")["image"] == "sha256:1234"


def test_a_baseline_without_a_library_is_named(tree):
    (tree / "baselines/mute.py").write_text("x = 1\n")
    with pytest.raises(UserError, match=r"baselines/mute\.py: has no LIBRARY"):
        libraries.libraries(tree)


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


def test_the_description_needs_neither_torch_nor_triton(tmp_path):
    code = (
        "import sys; sys.modules |= {'torch': None, 'triton': None};"
        "sys.argv = ['environment', '--out', sys.argv[1], '--config-sha256', 'x'];"
        "import runpy; runpy.run_module('harness.machine.environment', run_name='__main__')"
    )
    out = tmp_path / "environment.json"
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=ROOT, check=True)
    assert list(json.loads(out.read_text())) == RECORD


def test_a_description_is_kept_as_long_as_it_holds(tree, driver, monkeypatch):
    nvml = sys.modules["pynvml"]
    path = tree.parent / f"{tree.name}.json"
    first = environment.ensure(path, tree, "c0ffee")
    assert json.loads(path.read_text()) == first
    # A clock that changes by itself does not make it another machine.
    monkeypatch.setattr(nvml, "nvmlDeviceGetClockInfo", lambda *_: 1980)
    monkeypatch.setattr(environment, "cpu", lambda: "the same by another name")
    assert environment.ensure(path, tree, "c0ffee") == first
    changes = {
        "config": lambda: None,
        "gpu": lambda: monkeypatch.setattr(nvml, "nvmlDeviceGetUUID", lambda *_: "GPU-2"),
        "power": lambda: monkeypatch.setattr(nvml, POWER_LIMIT, lambda *_: 300_000),
        "edit": lambda: (tree / "baselines/eager.py").write_text('LIBRARY = "pytest"\n'),
        "commit": lambda: git(tree, "commit", "-qam", "more"),
        "image": lambda: monkeypatch.setenv("TILEWRIGHT_IMAGE", "sha256:1"),
        "driver": lambda: monkeypatch.setattr(nvml, DRIVER, lambda *_: "590.1"),
        "vbios": lambda: monkeypatch.setattr(nvml, "nvmlDeviceGetVbiosVersion", lambda *_: "96"),
        "ecc": lambda: monkeypatch.setattr(nvml, "nvmlDeviceGetEccMode", lambda *_: [0, 0]),
        "mig": lambda: monkeypatch.setattr(nvml, "nvmlDeviceGetMigMode", lambda *_: [1, 1]),
        "version": lambda: monkeypatch.setattr(libraries, "version", lambda _: "9.9"),
        "wheel": lambda: monkeypatch.setattr(libraries, "content_hash", lambda _: "0" * 64),
        "torn": lambda: path.write_text(path.read_text()[:-5]),
    }
    for name, change in changes.items():
        change()
        before = path.read_text()
        found = environment.ensure(path, tree, "decaf")
        assert path.read_text() != before, name
        assert json.loads(path.read_text()) == found == environment.ensure(path, tree, "decaf")

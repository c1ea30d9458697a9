"""The machine, as text: what a reader needs to know to judge or repeat a measurement.

`python -m harness.machine.environment --out environment.json --config-sha256 …`; imports neither
torch nor Triton nor a baseline. A description that still holds is kept, run id and date included:
so all ops of a run state the same, whoever asked first. With several GPUs it has all of them under
`gpus`. A measurement keeps the one GPU that took its times (`on_board`).
"""

import argparse
import contextlib
import datetime
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from harness import cli, files
from harness.cli import UserError
from harness.machine import nvml
from harness.project import libraries

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
DIRTY = "-dirty"
NO_MODEL = {"nvidia", "geforce", "tesla"}
# A description holds as long as these do; what else it says follows from them or moves by itself.
LASTING = ("commit", "dirty", "image", "python", "kernel", "versions", "hashes", "config_sha256")
LASTING_OF_GPU = ("uuid", "driver", "vbios", "power_limit_w", "ecc", "mig")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config-sha256", required=True, help="digest of the configuration")
    options = parser.parse_args()
    ensure(options.out, ROOT, options.config_sha256)


def ensure(path: Path, root: Path, config_sha256: str) -> dict[str, object]:
    """Return the content of the file at `path` if it still holds, else write `describe` there."""
    fresh = describe(root, config_sha256)
    # Jobs on several GPUs begin at the same time.
    with files.locked(path):
        with contextlib.suppress(UserError):
            known = files.read_json(path, "")
            if _holds(known, fresh):
                path.touch()
                return known
        files.write_json(path, fresh)
    return fresh


def on_board(environment: Mapping[str, object], uuid: str) -> dict[str, object]:
    """Return a description whose `gpu` is the board with this UUID, and which names no other."""
    gpu = next(gpu for gpu in _gpus(environment) if gpu.get("uuid") == uuid)
    return {key: value for key, value in environment.items() if key != "gpus"} | {"gpu": gpu}


def _holds(known: dict, fresh: dict) -> bool:
    """Whether a description is true of all that is here; a GPU that has left takes nothing away."""
    if any(known.get(key) != fresh.get(key) for key in LASTING):
        return False
    here, then = (
        [[g.get(key) for key in LASTING_OF_GPU] for g in _gpus(e)] for e in (fresh, known)
    )
    return bool(here) == bool(then) and all(gpu in then for gpu in here)


def _gpus(environment: Mapping[str, object]) -> list[dict]:
    """The GPUs of a description; older ones have the first alone."""
    return environment.get("gpus") or [gpu for gpu in [environment.get("gpu")] if gpu]


def describe(root: Path, config_sha256: str) -> dict[str, object]:
    """The record of docs/formats.md for the tree at `root` and this machine."""
    now = datetime.datetime.now(datetime.UTC)
    commit, dirty = revision(root)
    gpus = [described(gpu) for gpu in nvml.gpus()]
    gpu = gpus[0] if gpus else None
    machine = model(gpu["name"]) if gpu else "nogpu"
    distributions = [*libraries.ALWAYS, *libraries.libraries(root)]
    return {
        "run_id": f"{now:%Y%m%dT%H%MZ}-{commit[:7]}-{machine}",
        "date": cli.utc(now),
        "commit": commit,
        "dirty": dirty,
        "image": os.environ.get("TILEWRIGHT_IMAGE") or None,
        "python": platform.python_version(),
        "platform": "-".join((platform.system(), platform.machine(), *platform.libc_ver())),
        "kernel": platform.release(),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "gpu": gpu,
        "gpus": gpus,
        "versions": {name: libraries.version(name) for name in distributions},
        "hashes": {name: libraries.content_hash(name) for name in distributions},
        "config_sha256": config_sha256,
    }


def revision(root: Path) -> tuple[str, bool]:
    """The commit of the tree, and whether files differ from it.

    Without history the commit is that of TILEWRIGHT_COMMIT, which ends in "-dirty" for a tree that
    differed. Without that it is "unknown", which counts as dirty: nothing shows that the tree is as
    committed. Raises UserError where the history is at another commit than the variable says: one
    of the two came along with files of the other.
    """
    stated = os.environ.get("TILEWRIGHT_COMMIT", "")
    named = stated.removesuffix(DIRTY)
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is not None and Path(top).resolve() == root.resolve():
        commit, status = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain")
        if commit is not None:
            if not commit.startswith(named):
                raise UserError(
                    f"TILEWRIGHT_COMMIT is {named}, and the history here is at {commit[:12]}:"
                    " unset the variable, or take .git away if it is not of these files"
                )
            return commit, status != ""
    return (named, named != stated) if named else ("unknown", True)


def _git(root: Path, *arguments: str) -> str | None:
    call = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def model(name: str) -> str:
    """The GPU's model as part of a file name: "NVIDIA H200" is "h200"."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join(word for word in words if word not in NO_MODEL)


def described(gpu: nvml.Gpu) -> dict[str, object]:
    """A GPU by NVML; a value that its driver does not tell is null."""
    driver = nvml.driver()
    device = nvml.ask(driver, "nvmlDeviceGetHandleByUUID", gpu.uuid)

    def ask(function: str, *arguments):
        return nvml.ask(driver, function, device, *arguments)

    capability = ask("nvmlDeviceGetCudaComputeCapability")
    memory = ask("nvmlDeviceGetMemoryInfo")
    power = ask("nvmlDeviceGetEnforcedPowerLimit")
    default = ask("nvmlDeviceGetPowerManagementDefaultLimit")
    ecc, mig = ask("nvmlDeviceGetEccMode"), ask("nvmlDeviceGetMigMode")
    persistence = ask("nvmlDeviceGetPersistenceMode")
    cuda = nvml.ask(driver, "nvmlSystemGetCudaDriverVersion_v2")
    return {
        "name": gpu.name,
        "uuid": gpu.uuid,
        "sm": capability and "sm_{}{}".format(*capability),
        "memory_gib": memory and round(memory.total / GIB, 1),
        "driver": nvml.ask(driver, "nvmlSystemGetDriverVersion"),
        "vbios": ask("nvmlDeviceGetVbiosVersion"),
        "cuda": cuda and f"{cuda // 1000}.{cuda % 1000 // 10}",
        "power_limit_w": power and power / 1000,
        "power_default_w": default and default / 1000,
        "sm_mhz": ask("nvmlDeviceGetClockInfo", driver.NVML_CLOCK_SM),
        "mem_mhz": ask("nvmlDeviceGetClockInfo", driver.NVML_CLOCK_MEM),
        "max_sm_mhz": ask("nvmlDeviceGetMaxClockInfo", driver.NVML_CLOCK_SM),
        "max_mem_mhz": ask("nvmlDeviceGetMaxClockInfo", driver.NVML_CLOCK_MEM),
        "ecc": ecc and bool(ecc[0]),
        "mig": mig and bool(mig[0]),
        "persistence": None if persistence is None else bool(persistence),
    }


if __name__ == "__main__":
    cli.run(main)

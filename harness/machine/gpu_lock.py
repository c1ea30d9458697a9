"""One GPU for one job: an advisory lock per device, held for as long as the job runs.

The kernel drops the lock when its holder dies, so a crash never leaves a GPU locked. Timing holds
it alone; verification shares it. The lock binds all Tilewright jobs of a machine, however they
were started; programs that know nothing of it are found by asking the driver.
"""

import contextlib
import fcntl
import json
import os
import random
import re
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from harness.cli import UserError
from harness.machine import nvml
from harness.machine.nvml import Gpu, gpus

# Names another folder than /tmp for the locks. TMPDIR does not: where a batch system gives each job
# one of its own, no job would see the lock of another.
LOCKS = "TILEWRIGHT_LOCKS"
# Longest wait for other Tilewright jobs.
WAIT_S = 4 * 3600.0
# The driver lists a process for a moment after its death.
SETTLE_S = 5.0
PAUSE_S = (0.02, 0.2)


@contextlib.contextmanager
def hold(exclusive: bool, wait_s: float = WAIT_S, uuid: str | None = None) -> Iterator[Gpu]:
    """Lock a free GPU; meanwhile the processes started from here see that GPU alone.

    - exclusive: True to have the GPU alone, for timing; False to share it with other such holders,
      for verifying.
    - wait_s: the longest wait for other jobs of this project.
    - uuid: the board that it must be, None for any.

    Raises UserError if no GPU or not that board is visible, if another program uses every visible
    GPU (for an exclusive lock), or if the wait was in vain.
    """
    lock, gpu = _acquire(exclusive, wait_s, uuid)
    wanted = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu.uuid}
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield gpu
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        os.close(lock)


@contextlib.contextmanager
def serialize(gpu: Gpu) -> Iterator[None]:
    """Admit one holder of a shared lock at a time, while holders that do not wait here go on."""
    descriptor = _open(_path(gpu).with_suffix(".turn"))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class GpuMonitor:
    """Asks the driver about a locked GPU while workers use it."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu
        self._driver = nvml.driver()
        self._device = self._driver.nvmlDeviceGetHandleByUUID(gpu.uuid)

    def used_bytes(self) -> int | None:
        """Return the memory in use by all programs; None if the driver does not tell."""
        memory = nvml.ask(self._driver, "nvmlDeviceGetMemoryInfo", self._device)
        return None if memory is None else memory.used

    def users(self) -> set[int]:
        """Return the numbers of the processes that use it, as far as the driver tells."""
        return {pid for pid, _ in _users(self._gpu)}

    def foreign_processes(self, workers: Collection[int]) -> list[str]:
        """Return the programs on this GPU that are not workers.

        workers: process groups of the workers, all of which must be using the GPU. If the driver
        does not list them, its numbers are those of another namespace, as in some containers. The
        list is then empty.
        """
        users = dict(_users(self._gpu))
        if not set(workers) <= set(users):
            return []
        return [
            f"process {pid} ({name})" for pid, name in users.items() if _group(pid) not in workers
        ]


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _acquire(exclusive: bool, wait_s: float, uuid: str | None) -> tuple[int, Gpu]:
    devices = gpus()
    if not devices:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = "" if hidden is None else f" with CUDA_VISIBLE_DEVICES={hidden!r}"
        raise UserError(f"no GPU is visible{where}; set measure to false to replay a recorded run")
    if uuid is not None:
        devices = [gpu for gpu in devices if gpu.uuid == uuid]
        if not devices:
            raise UserError(f"board {uuid} is not visible; work on the machine that has it")
    began, told, free_of_strangers = time.monotonic(), False, time.monotonic()
    while True:
        strangers = {}
        for gpu in devices:
            lock = _try_lock(gpu, exclusive)
            if lock is None:
                continue
            users = _users(gpu) if exclusive else []
            if not users:
                return lock, gpu
            os.close(lock)
            strangers[gpu] = users
        now = time.monotonic()
        if len(strangers) < len(devices):
            free_of_strangers = now
        elif now - free_of_strangers > SETTLE_S:
            raise UserError(_complaint(strangers))
        if now - began > wait_s:
            raise UserError(
                f"{devices[0]}: still held by {_holder(devices[0])} after {wait_s:g} s; "
                "wait for that job or end it"
            )
        if not told and not strangers:
            print(f"waiting for {devices[0]}, held by {_holder(devices[0])}", file=sys.stderr)
            told = True
        time.sleep(random.uniform(*PAUSE_S))


def _complaint(strangers: dict[Gpu, list[tuple[int, str]]]) -> str:
    used = (
        f"{gpu}: process {pid} ({program}) is using it"
        for gpu, users in strangers.items()
        for pid, program in users[:1]
    )
    return f"{', '.join(used)}; end it, or choose another GPU by CUDA_VISIBLE_DEVICES"


def _users(gpu: Gpu) -> list[tuple[int, str]]:
    """Process number and program of everything that computes on a GPU, except this process."""
    driver = nvml.driver()
    device = driver.nvmlDeviceGetHandleByUUID(gpu.uuid)
    found = nvml.ask(driver, "nvmlDeviceGetComputeRunningProcesses", device) or []
    return [(each.pid, _program(driver, each.pid)) for each in found if each.pid != os.getpid()]


def _program(driver, pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return nvml.ask(driver, "nvmlSystemGetProcessName", pid) or "unknown program"


def _path(gpu: Gpu) -> Path:
    safe = re.sub(r"[^\w-]", "_", gpu.uuid)
    return Path(os.environ.get(LOCKS, "/tmp")) / f"tilewright-{safe}.lock"


def _try_lock(gpu: Gpu, exclusive: bool) -> int | None:
    """A descriptor that holds the device's lock, with this process named in the file."""
    descriptor = _open(_path(gpu))
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    # The file of another user may be readable only; the lock holds all the same.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid()}).encode(), 0)
    return descriptor


def _open(path: Path) -> int:
    """Opens the lock file, made on first use and writable by every user of the machine."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        os.fchmod(descriptor, 0o666)
        return descriptor
    except FileExistsError:
        pass
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def _holder(gpu: Gpu) -> str:
    try:
        return f"process {json.loads(_path(gpu).read_text())['pid']}"
    except (OSError, ValueError, LookupError):
        return "another job"

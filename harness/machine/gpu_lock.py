"""One GPU for one job: an advisory lock per device, held for as long as the job runs.

The kernel drops the lock when its holder dies, so a crash never leaves a GPU locked. Timing holds
it alone; verification shares it, and begins on no GPU that a job waits to have alone. The lock
binds all Tilewright jobs of a machine, however they were started; programs that know nothing of it
are found by asking the driver. With the GPU a job holds its share of the host's cores, so that jobs
on two GPUs do not meet on a core.

A compile phase shares the GPU too, and keeps it to its end, which may take many minutes. No waiting
job can begin before that end. Verifications therefore go on, and may begin, while a compile phase
is in progress. No further compile phase begins on a GPU that a job waits to have alone, so the wait
is bounded. A job marks a GPU as awaited, or as compiling, by a shared lock on a file of its own.
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
from harness.machine import affinity, nvml
from harness.machine.nvml import Gpu, gpus

# Names another folder than /tmp for the locks. TMPDIR does not: where a batch system gives each job
# one of its own, no job would see the lock of another.
LOCKS = "TILEWRIGHT_LOCKS"
# Longest wait for other Tilewright jobs.
WAIT_S = 4 * 3600.0
# The driver lists a process for a moment after its death.
SETTLE_S = 5.0
PAUSE_S = (0.02, 0.2)
# The suffix of the file by whose lock a job marks a GPU.
AWAITED, COMPILING = ".awaited", ".compiling"
# How often a job asks whether a GPU is marked until it believes so, and the longest pause between.
ASKED, ASKING_S = 4, 0.002
# The word of an option in place of the UUID of a board.
ANY = "any"
ELSEWHERE = "start the study again: it goes on with the GPUs that are left"


@contextlib.contextmanager
def hold(
    exclusive: bool,
    wait_s: float = WAIT_S,
    uuid: str | None = None,
    rather: str | None = None,
    compiles: bool = False,
) -> Iterator[Gpu]:
    """Lock a free GPU; meanwhile the processes started from here see that GPU alone, and run on
    its share of the cores.

    - exclusive: True to have the GPU alone, for timing; False to share it with other such holders,
      for verifying.
    - wait_s: the longest wait for other jobs of this project.
    - uuid: the board that it must be, None for any of the first one's model.
    - rather: the board that it should be if it is there and free, None for none.
    - compiles: True for a compile phase, which shares the GPU and does not give way.

    Raises UserError if no GPU or not that board is visible, if another program uses every visible
    GPU (for an exclusive lock), or if the wait was in vain. It is raised too if the GPU is gone at
    the end, because the body has then found nothing that counts.
    """
    lock, gpu = _acquire(exclusive, wait_s, uuid, rather, compiles)
    with contextlib.ExitStack() as held:
        held.callback(os.close, lock)
        if compiles:
            # The stack drops the mark before the lock, so the mark is never beside a job alone.
            _mark(gpu, COMPILING, held)
        share = affinity.share(gpu.uuid, nvml.near(gpus()))
        wanted = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu.uuid}
        before = {key: os.environ.get(key) for key in wanted}
        os.environ.update(wanted)
        try:
            with affinity.on(share):
                yield gpu
            refuse_vanished(gpu)
        finally:
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value


def named(text: str) -> str | None:
    """Return the board that an option asks for, None for any."""
    return None if text == ANY else text


def refuse_vanished(gpu: Gpu) -> None:
    """Raise UserError if the driver no longer reaches a GPU."""
    if not nvml.present(gpu):
        raise UserError(
            f"{gpu}, board {gpu.uuid}: gone from the driver while this job used it, which proves"
            f" nothing of the code; {ELSEWHERE}"
        )


def strangers(gpu: Gpu, wait_s: float = SETTLE_S) -> list[str]:
    """Return the programs on a GPU that no job of this project holds, for as long as they stay.

    wait_s: how long a program may take to end, such as one of a study that was just interrupted.
    """
    began = time.monotonic()
    while True:
        lock = _try_lock(gpu, exclusive=True)
        if lock is None:
            return []
        users = _users(gpu)
        os.close(lock)
        if not users or time.monotonic() - began > wait_s:
            return [f"process {pid} ({program})" for pid, program in users]
        time.sleep(random.uniform(*PAUSE_S))


@contextlib.contextmanager
def turn(gpu: Gpu) -> Iterator[bool]:
    """Yield whether it is the turn of this job, which goes on to the end of the body.

    One of those that ask has the turn of a GPU at a time; other holders of a shared lock go on.
    """
    descriptor = _open(_path(gpu).with_suffix(".turn"))
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
            return
        yield False
    finally:
        os.close(descriptor)


class GpuMonitor:
    """Asks the driver about a locked GPU while workers use it."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu
        self._driver = nvml.driver()
        self._device = nvml.ask(self._driver, "nvmlDeviceGetHandleByUUID", gpu.uuid)

    @property
    def board(self) -> str:
        """The UUID of the GPU."""
        return self._gpu.uuid

    def refuse_vanished(self) -> None:
        """Raise UserError if the driver no longer reaches the GPU."""
        refuse_vanished(self._gpu)

    def used_bytes(self) -> int | None:
        """Return the memory in use by all programs; None if the driver does not tell."""
        memory = self._ask_memory()
        return None if memory is None else memory.used

    def free_bytes(self) -> int | None:
        """Return the memory that no program uses; None if the driver does not tell."""
        memory = self._ask_memory()
        return None if memory is None else memory.total - memory.used

    def _ask_memory(self):
        return nvml.ask(self._driver, "nvmlDeviceGetMemoryInfo", self._device)

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


def _acquire(
    exclusive: bool,
    wait_s: float,
    uuid: str | None,
    rather: str | None = None,
    compiles: bool = False,
) -> tuple[int, Gpu]:
    with contextlib.ExitStack() as announced:
        return _await(exclusive, wait_s, uuid, rather, compiles, announced)


def _await(
    exclusive: bool,
    wait_s: float,
    uuid: str | None,
    rather: str | None,
    compiles: bool,
    announced: contextlib.ExitStack,
) -> tuple[int, Gpu]:
    """announced: holds the mark of this job while it waits to have a GPU alone."""
    began, told, free_of_strangers = time.monotonic(), False, time.monotonic()
    # A compile phase beside others would put off a waiting job anew.
    closed, awaited = _is_announced if compiles else is_awaited, None
    while True:
        # One may vanish while others are waited for.
        devices = _wanted(uuid)
        if not exclusive:
            # Holders that share spread over the GPUs.
            random.shuffle(devices)
        devices.sort(key=lambda gpu: gpu.uuid != rather)
        used = {}
        for gpu in devices:
            if not exclusive and closed(gpu):
                continue
            lock = _try_lock(gpu, exclusive)
            if lock is None:
                continue
            users = _users(gpu) if exclusive else []
            if not users:
                return lock, gpu
            os.close(lock)
            used[gpu] = users
        now = time.monotonic()
        if len(used) < len(devices):
            free_of_strangers = now
        elif now - free_of_strangers > SETTLE_S:
            raise UserError(_complaint(used))
        if now - began > wait_s:
            raise UserError(
                f"{devices[0]}: still held by {_holder(devices[0])} after {wait_s:g} s; "
                "wait for that job or end it"
            )
        if not told and not used:
            print(f"waiting for {devices[0]}, held by {_holder(devices[0])}", file=sys.stderr)
            told = True
        if exclusive and len(used) < len(devices) and awaited not in devices:
            # One of several, and the same for all such jobs: on the others, verifications go on.
            # Verifications give way soon. A compile phase does not, nor a job that is alone.
            free = [gpu for gpu in devices if gpu not in used]
            free = list(filter(_is_shared, free)) or free
            free = [gpu for gpu in free if not _is_marked(gpu, COMPILING)] or free
            awaited = next(filter(_is_announced, free), None) or random.choice(free)
            # Jobs that share it and come one after the other would never end.
            _mark(awaited, AWAITED, announced)
        time.sleep(random.uniform(*PAUSE_S))


def _wanted(uuid: str | None) -> list[Gpu]:
    """The GPUs of which a job may take one."""
    visible = gpus()
    if not visible:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = "" if hidden is None else f" with CUDA_VISIBLE_DEVICES={hidden!r}"
        raise UserError(f"no GPU is visible{where}; set measure to false to replay a recorded run")
    if uuid is None:
        return nvml.alike(visible)
    if found := [gpu for gpu in visible if gpu.uuid == uuid]:
        return found
    raise UserError(f"board {uuid} is not visible; work on the machine that has it, or {ELSEWHERE}")


def _complaint(used: dict[Gpu, list[tuple[int, str]]]) -> str:
    named = (
        f"{gpu}: process {pid} ({program}) is using it"
        for gpu, users in used.items()
        for pid, program in users[:1]
    )
    return f"{', '.join(named)}; end it, or choose another GPU by CUDA_VISIBLE_DEVICES"


def _users(gpu: Gpu) -> list[tuple[int, str]]:
    """Process number and program of everything that computes on a GPU, except this process."""
    driver = nvml.driver()
    device = nvml.ask(driver, "nvmlDeviceGetHandleByUUID", gpu.uuid)
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


def _is_shared(gpu: Gpu) -> bool:
    """Whether no job has the GPU alone."""
    descriptor = _open(_path(gpu))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


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


def is_awaited(gpu: Gpu) -> bool:
    """Return whether jobs that share a GPU are to give way to one that waits to have it alone.

    They need not while a compile phase keeps the GPU shared anyway.
    """
    return _is_announced(gpu) and not _is_marked(gpu, COMPILING)


def _is_announced(gpu: Gpu) -> bool:
    """Whether a job waits to have a GPU alone."""
    return _is_marked(gpu, AWAITED)


def _mark(gpu: Gpu, suffix: str, held: contextlib.ExitStack) -> None:
    """Mark a GPU until `held` is closed."""
    descriptor = _open(_path(gpu).with_suffix(suffix))
    held.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def _is_marked(gpu: Gpu, suffix: str) -> bool:
    descriptor = _open(_path(gpu).with_suffix(suffix))
    try:
        for _ in range(ASKED):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            # Another that asks at the same moment holds the mark until it has its answer.
            time.sleep(random.uniform(0.0, ASKING_S))
        return True
    finally:
        os.close(descriptor)


def _holder(gpu: Gpu) -> str:
    try:
        return f"process {json.loads(_path(gpu).read_text())['pid']}"
    except (OSError, ValueError, LookupError):
        return "another job"

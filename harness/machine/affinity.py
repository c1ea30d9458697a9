"""Which cores a job has, and which of them a process works on while its calls are timed.

The cores of a machine are not alike: what else runs beside them is not, nor does it stay where it
is, while a process does. So the times of two processes may be those of two cores. Held to cores by
the number of a block, all implementations take it on the same ones. If a host has several GPUs, the
job of each has cores of its own.
"""

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def share(board: str, near: Mapping[str, Collection[int]]) -> set[int]:
    """Return the cores of one of several boards: an equal part of those that this process may use.

    The threads of a core stay together, and each board gets what is near it first. All cores are
    returned for a board that is alone or not among them, and if there are fewer cores than boards.

    near: by board, in an order that is the same in all jobs, the numbers of the cores near it.
    """
    left = _siblings(sorted(os.sched_getaffinity(0)))
    own = len(left) // max(1, len(near))
    if board not in near or own == 0:
        return set().union(*left)
    for name, cores in near.items():
        ordered = sorted(left, key=lambda threads, near=cores: threads.isdisjoint(near))
        if name == board:
            break
        left = [threads for threads in left if threads not in ordered[:own]]
    return set().union(*ordered[:own])


@contextlib.contextmanager
def on(cores: Collection[int]) -> Iterator[None]:
    """Within the body this thread, and processes that it starts, run on these cores alone."""
    before = _bind(0, set(cores))
    try:
        yield
    finally:
        if before is not None:
            _bind(0, before)


def _siblings(cores: Collection[int]) -> list[frozenset[int]]:
    """The cores in groups of those that are threads of one; each alone where Linux does not say."""
    groups: dict[str, set[int]] = {}
    for core in cores:
        path = Path(TOPOLOGY.format(core))
        groups.setdefault(path.read_text() if path.is_file() else str(core), set()).add(core)
    return [frozenset(group) for group in groups.values()]


@contextlib.contextmanager
def held(turn: int) -> Iterator[None]:
    """Within the body the calling thread has one core, all others of the process the next one.

    turn: the cores that the process may use are walked in a circle. Other threads, since autograd
    computes the gradients of a GPU's tensors in one of its own, which works while the caller waits.
    """
    allowed = sorted(os.sched_getaffinity(0))
    own, other = ({allowed[(turn + step) % len(allowed)]} for step in (0, 1))
    before = {thread: _bind(thread, other) for thread in _threads()}
    try:
        _bind(threading.get_native_id(), own)
        yield
    finally:
        for thread in _threads():
            # One that began meanwhile has the cores of the thread that began it.
            _bind(thread, before.get(thread) or set(allowed))


def count() -> int:
    """On how many cores `held` takes turns here: none where a container forbids it."""
    allowed = os.sched_getaffinity(0)
    return 0 if _bind(0, allowed) is None else len(allowed)


def _threads() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def _bind(thread: int, cores: set[int]) -> set[int] | None:
    """The cores that a thread could use until now; None if it has ended or may not be bound."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        before = os.sched_getaffinity(thread)
        os.sched_setaffinity(thread, cores)
        return before
    return None

"""Which cores a process works on while its calls are timed.

The cores of a machine are not alike: what else runs beside them is not, nor does it stay where it
is, while a process does. So the times of two processes may be those of two cores. Held to cores by
the number of a block, all implementations take it on the same ones.
"""

import contextlib
import os
import threading
from collections.abc import Iterator


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

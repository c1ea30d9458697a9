"""Follows the GPU memory of the workers, and waits until that of a dead worker has come back."""

import time
from collections.abc import Callable, Collection

from harness.cli import UserError

# For each process: buffers of the survivors come and go, and they load code; too strict a limit
# would end good jobs.
TOLERANCE_BYTES = 256 << 20
# A worker may keep this much after it has released its cell: workspaces of libraries.
KEPT_BYTES = 256 << 20
LIMIT_S = 20.0
PAUSE_S = 0.05


class Memory:
    """The memory of the GPU during one cell after another.

    - used: returns the bytes in use by all programs, None if the driver does not tell.
    - users: returns the numbers of the processes that use the GPU, as far as the driver tells.

    If the driver has listed a dead process, `settle` waits until it is listed no more. Otherwise
    the bytes in use must go down.
    """

    def __init__(self, used: Callable[[], int | None], users: Callable[[], Collection[int]]):
        self._used, self._users = used, users
        self._rest: int | None = None
        self._held: dict[str, int] = {}
        self._seen: set[int] = set()
        self._gone: dict[str, int | None] = {}
        self._least: int | None = None

    def idle(self) -> None:
        """Note that the workers of a cell have started, and hold nothing of it yet."""
        self._held, self._gone, self._rest = {}, {}, self._used()
        self._seen = set(self._users())

    def holds(self, impl: str, held_bytes: int) -> None:
        """Note the bytes that a worker says it holds for the cell that it has prepared."""
        self._held[impl] = held_bytes

    def ready(self) -> None:
        """Note the memory in use as all workers are ready, or as a round of blocks begins.

        The memory of the survivors is compared with it.
        """
        used = self._used()
        self._rest = None if used is None else used - sum(self._held.values())
        self._seen = set(self._users())

    def joined(self) -> None:
        """Note that more processes may use the GPU, and may be ended before all are ready."""
        self._seen |= set(self._users())

    def lost(self, impl: str, pid: int | None) -> None:
        """Note that a worker was ended: the memory that it held is to come back."""
        self.released(impl)
        self._gone[impl] = pid

    def released(self, impl: str) -> None:
        """Note that a living worker has given its cell back; it is trusted to have done so."""
        self._held.pop(impl, None)

    def settle(self) -> None:
        """Wait until all lost memory is back; raise UserError if it does not come."""
        if not self._gone:
            return
        deadline = time.monotonic() + LIMIT_S
        while missing := self._missing():
            if time.monotonic() > deadline:
                raise UserError(
                    f"{', '.join(self._gone)}: ended, but {missing} of GPU memory have not come"
                    f" back in {LIMIT_S:g} s; end the process that nvidia-smi names and start"
                    " again: finished cells are kept"
                )
            time.sleep(PAUSE_S)
        self._gone = {}

    def _missing(self) -> str:
        """Return in words the memory that dead workers still hold, "" once all of it is back."""
        if self._seen.issuperset(self._gone.values()):
            listed = self._seen.intersection(self._gone.values(), self._users())
            return f"all bytes of process {min(listed)}" if listed else ""
        used = self._used()
        if used is None or self._rest is None:
            return ""
        tolerance = TOLERANCE_BYTES * (1 + len(self._held))
        beyond = used - self._rest - sum(self._held.values()) - tolerance
        return f"{beyond / 2**20:.0f} MiB" if beyond > 0 else ""

    def leaks(self, held_bytes: int) -> bool:
        """Return whether a worker holds clearly more after a release than other workers do."""
        self._least = held_bytes if self._least is None else min(self._least, held_bytes)
        return held_bytes > self._least + KEPT_BYTES

"""What the workers hold of the GPU's memory, and whether that of a dead one has come back."""

import time
from collections.abc import Callable

from harness.command import UserError

# Buffers of the survivors come and go, and they load code; too strict a limit would end good jobs.
TOLERANCE_BYTES = 512 << 20
# What a worker may keep of a cell it has released: workspaces of libraries.
KEPT_BYTES = 256 << 20
LIMIT_S = 20.0
PAUSE_S = 0.05


class Memory:
    """The memory of the GPU during one cell after another.

    used: gives the bytes in use by all programs, None where the driver does not tell; then nothing
    is waited for.
    """

    def __init__(self, used: Callable[[], int | None]):
        self._used = used
        self._rest: int | None = None
        self._held: dict[str, int] = {}
        self._gone: list[str] = []
        self._least: int | None = None

    def idle(self) -> None:
        """The workers of a cell have started, and hold nothing of it yet."""
        self._held, self._gone, self._rest = {}, [], self._used()

    def holds(self, impl: str, held_bytes: int) -> None:
        """What a worker says it holds for the cell that it has prepared."""
        self._held[impl] = held_bytes

    def ready(self) -> None:
        """All that can be timed are ready, or a round of blocks begins: the memory as it is now is
        what that of the survivors is compared with.
        """
        used = self._used()
        self._rest = None if used is None else used - sum(self._held.values())

    def lost(self, impl: str) -> None:
        """A worker was ended: what it held is to come back."""
        self.released(impl)
        self._gone.append(impl)

    def released(self, impl: str) -> None:
        """A living worker has given its cell back, and is trusted to have done so."""
        self._held.pop(impl, None)

    def settle(self) -> None:
        """Waits until all that was lost is back; UserError where it does not come."""
        if not self._gone or self._rest is None:
            return
        wanted = self._rest + sum(self._held.values()) + TOLERANCE_BYTES
        deadline = time.monotonic() + LIMIT_S
        while (used := self._used()) is not None and used > wanted:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{', '.join(self._gone)}: ended, but {(used - wanted) / 2**20:.0f} MiB of GPU"
                    f" memory have not come back in {LIMIT_S:g} s; end the process that nvidia-smi"
                    " names and start again: finished cells are kept"
                )
            time.sleep(PAUSE_S)
        self._gone = []

    def leaks(self, held_bytes: int) -> bool:
        """Whether a worker that has released its cell holds clearly more than others then do."""
        self._least = held_bytes if self._least is None else min(self._least, held_bytes)
        return held_bytes > self._least + KEPT_BYTES

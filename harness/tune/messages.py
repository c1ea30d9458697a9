"""Messages between the search and the worker that times candidates."""

from dataclasses import dataclass
from typing import ClassVar

from harness.workers.messages import Answer, Done, Request


@dataclass(frozen=True)
class Device(Answer):
    """The GPU of the worker.

    device: its name. arch: its architecture, such as "90" or "gfx942". limits: what launchers ask
    of it, such as `sm_count`.
    """

    device: str
    arch: str
    limits: dict[str, int | bool]


@dataclass(frozen=True)
class LaunchTime(Answer):
    """us: the median GPU time in µs of the kernel's launches in one call of the op."""

    us: float


@dataclass(frozen=True)
class DescribeDevice(Request):
    """Describe the GPU."""

    do: ClassVar[str] = "describe"
    answer: ClassVar[type[Answer]] = Device


@dataclass(frozen=True)
class PrepareCandidate(Request):
    """Run, check and capture one candidate of a kernel in a cell.

    index: the number of the candidate. config: its configuration.
    """

    do: ClassVar[str] = "prepare"
    answer: ClassVar[type[Answer]] = Done
    op: str
    case: str
    dtype: str
    pass_: str
    kernel: str
    index: int
    config: dict[str, float | bool]


@dataclass(frozen=True)
class TimeCandidate(Request):
    """Time `calls` calls of the prepared candidate of this number."""

    do: ClassVar[str] = "block"
    answer: ClassVar[type[Answer]] = LaunchTime
    index: int
    calls: int


REQUESTS = (DescribeDevice, PrepareCandidate, TimeCandidate)

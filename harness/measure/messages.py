"""Messages between the schedule and the timing workers."""

from dataclasses import dataclass
from typing import ClassVar

from harness.workers.messages import Answer, Request


@dataclass(frozen=True)
class GpuWork(Answer):
    """An answer after work on the GPU.

    busy_s: the seconds in which the GPU was timed or warmed up, until it had done that work.
    """

    busy_s: float


@dataclass(frozen=True)
class Prepared(GpuWork):
    """A cell is compiled, warmed up and captured.

    - first_s: the seconds of the first calls, in which a library compiles and tunes.
    - remark: why events time the calls and no graph does, "" if a graph does.
    - peak_mem_bytes: inputs, tensors saved by the forward pass, outputs and workspace of one call.
    - held_bytes: the GPU memory that the process keeps from the others.
    - l2_bytes: the size of the L2.
    """

    first_s: float
    remark: str
    peak_mem_bytes: int
    held_bytes: int
    l2_bytes: int


@dataclass(frozen=True)
class BlockTimes(GpuWork):
    """The times of one call in a block, in µs, and readings of the GPU while the block ran.

    - device_us: the median GPU time on a cold L2.
    - call_us: the host time of an eager call.
    - sm_mhz, temp_c, power_w: clock, temperature and power, None if the driver does not tell.
    - throttle: the clock events that the driver named.
    """

    device_us: float
    call_us: float
    sm_mhz: float | None = None
    temp_c: float | None = None
    power_w: float | None = None
    throttle: str = ""


@dataclass(frozen=True)
class Energy(GpuWork):
    """The energy of one call in µJ, and the half-width of its 95 % interval.

    Both are None if the driver does not count energy, and for a function that computes in place.
    """

    energy_uj: float | None
    energy_pm_uj: float | None


@dataclass(frozen=True)
class Checked(Answer):
    """The timed calls gave the expected outputs.

    leaked_bytes: the growth of memory, if memory grew in each block after the first; else 0.
    """

    leaked_bytes: int


@dataclass(frozen=True)
class Released(Answer):
    """The memory of a cell is given back. held_bytes: what the process keeps nevertheless."""

    held_bytes: int


@dataclass(frozen=True)
class Compiled(Answer):
    """A cell has been called once. candidates: the most that a tuner of Triton's has in it."""

    candidates: int


@dataclass(frozen=True)
class Prepare(Request):
    """Prepare a cell: the name of a case, a dtype and a pass."""

    do: ClassVar[str] = "prepare"
    answer: ClassVar[type[Answer]] = Prepared
    case: str
    dtype: str
    pass_: str


@dataclass(frozen=True)
class TimeBlock(Request):
    """Time a block of `calls` calls. turn: the number of the block, which chooses the CPU cores."""

    do: ClassVar[str] = "block"
    answer: ClassVar[type[Answer]] = BlockTimes
    calls: int
    turn: int


@dataclass(frozen=True)
class MeasureEnergy(Request):
    """Measure the energy of a call. window_ms: the length of the measurement."""

    do: ClassVar[str] = "energy"
    answer: ClassVar[type[Answer]] = Energy
    window_ms: float


@dataclass(frozen=True)
class Check(Request):
    """Compare the outputs of the timed calls with those from before the timing."""

    do: ClassVar[str] = "check"
    answer: ClassVar[type[Answer]] = Checked


@dataclass(frozen=True)
class Release(Request):
    """Give the memory of the cell back."""

    do: ClassVar[str] = "release"
    answer: ClassVar[type[Answer]] = Released


@dataclass(frozen=True)
class Compile(Prepare):
    """Call a cell once. candidate: that of each tuner of Triton's; None for its last one."""

    do: ClassVar[str] = "compile"
    answer: ClassVar[type[Answer]] = Compiled
    candidate: int | None


REQUESTS = (Prepare, TimeBlock, MeasureEnergy, Check, Release)

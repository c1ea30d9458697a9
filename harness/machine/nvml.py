"""Asks the driver about the GPUs through NVML; there is no answer without driver and library."""

import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EVENTS = {
    "nvmlClocksEventReasonSwPowerCap": "power cap",
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "thermal slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksEventReasonSyncBoost": "sync boost",
    "nvmlClocksEventReasonApplicationsClocksSetting": "application clocks",
}
# Reasons that make a time unfit for comparison; a power cap is how the board always works.
SLOWDOWNS = {"hardware slowdown", "thermal slowdown", "hardware thermal slowdown", "power brake"}
SEPARATOR = "; "
# NVML gives a set of cores as words of so many bits; no host has more cores than this.
WORD, CORES = 64, 4096


@dataclass(frozen=True)
class Gpu:
    """One device: its number in PCI order, its UUID and its marketing name."""

    index: int
    uuid: str
    name: str

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


def driver():
    """The pynvml module, ready for use; None where the module or the driver is absent."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def gpus() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES lets through, in its order; all where it is not set."""
    nvml = driver()
    if nvml is None:
        return []
    listed = (_listed(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    found = [gpu for gpu in listed if gpu]
    wish = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wish is None:
        return found
    return [gpu for entry in wish.split(",") if (gpu := _named(nvml, entry.strip(), found))]


def alike(visible: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs of the first one's model: times and choices of another say nothing of it."""
    return [gpu for gpu in visible if gpu.name == visible[0].name]


def boards(visible: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that may time side by side: alike, and of a board in slices one slice alone.

    The slices of a board share its clock and its power.
    """
    chosen: dict[int, Gpu] = {}
    for gpu in alike(visible):
        chosen.setdefault(gpu.index, gpu)
    return list(chosen.values())


def near(visible: Sequence[Gpu]) -> dict[str, set[int]]:
    """The cores of the host that are near each of `boards(visible)`, as far as the driver tells."""
    nvml = driver()
    found = {}
    for gpu in boards(visible):
        handle = ask(nvml, "nvmlDeviceGetHandleByUUID", gpu.uuid)
        words = ask(nvml, "nvmlDeviceGetCpuAffinity", handle, CORES // WORD) or []
        bits = enumerate(bit for word in words for bit in f"{int(word):0{WORD}b}"[::-1])
        found[gpu.uuid] = {core for core, bit in bits if bit == "1"}
    return found


def present(gpu: Gpu) -> bool:
    """Whether the driver still reaches a GPU that it has listed before."""
    nvml = driver()
    if nvml is None:
        return False
    try:
        nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
    except nvml.NVMLError as error:
        # A driver that does not tell the memory of a GPU may well reach it.
        return _code(error) in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION)
    return True


def _code(error: Exception) -> int | None:
    return getattr(error, "value", None)


def _listed(nvml, index: int) -> Gpu | None:
    """The GPU of this number; None for one that has fallen off the bus."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        return Gpu(index, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError:
        return None


def _named(nvml, entry: str, found: list[Gpu]) -> Gpu | None:
    if entry.startswith("MIG-"):
        return _slice(nvml, entry)
    if entry.isdigit():
        return next((gpu for gpu in found if gpu.index == int(entry)), None)
    return next((gpu for gpu in found if entry and gpu.uuid.startswith(entry)), None)


def _slice(nvml, uuid: str) -> Gpu | None:
    """A slice of a GPU, which the driver does not list but knows by its full name."""
    handle = ask(nvml, "nvmlDeviceGetHandleByUUID", uuid)
    if handle is None:
        return None
    whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return Gpu(nvml.nvmlDeviceGetIndex(whole), uuid, nvml.nvmlDeviceGetName(handle))


def ask(nvml, function: str, *arguments):
    """The answer of an NVML function, None where this device or driver has none."""
    try:
        return getattr(nvml, function)(*arguments)
    except nvml.NVMLError:
        return None


class NvmlSampler:
    """Readings of the first visible GPU while it works; empty where NVML does not know it."""

    def __init__(self):
        visible = gpus()
        self._nvml = driver() if visible else None
        self._handle = self._nvml and self._nvml.nvmlDeviceGetHandleByUUID(visible[0].uuid)

    def sample(self) -> dict[str, object]:
        """`sm_mhz`, `temp_c`, `power_w` and `throttle`, the text of the clock event reasons."""
        nvml, device = self._nvml, self._handle
        if nvml is None:
            return {}
        power = ask(nvml, "nvmlDeviceGetPowerUsage", device)
        return {
            "sm_mhz": ask(nvml, "nvmlDeviceGetClockInfo", device, nvml.NVML_CLOCK_SM),
            "temp_c": ask(nvml, "nvmlDeviceGetTemperature", device, nvml.NVML_TEMPERATURE_GPU),
            "power_w": None if power is None else power / 1000,
            "throttle": self._events(),
        }

    def energy_mj(self) -> int | None:
        """The energy used since the driver was loaded, in millijoules."""
        if self._nvml is None:
            return None
        return ask(self._nvml, "nvmlDeviceGetTotalEnergyConsumption", self._handle)

    def _events(self) -> str:
        bits = ask(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", self._handle) or 0
        named = (text for name, text in EVENTS.items() if bits & getattr(self._nvml, name))
        return SEPARATOR.join(named)


def digest(samples: Sequence[dict[str, object]]) -> dict[str, object]:
    """Return one reading for several of `NvmlSampler.sample`, or {} if none holds a value.

    It has the median clock and power, the highest temperature, and every event that a reading
    names. A value that no reading has is None.

    The events of one moment say little of a block. The driver's counters of throttled time take
    longer to read than many a block lasts. A reading takes microseconds, so there are many.
    """
    if not any(samples):
        return {}
    middle = {name: _median(sample[name] for sample in samples) for name in ("sm_mhz", "power_w")}
    named = {event for sample in samples for event in sample["throttle"].split(SEPARATOR)}
    hottest = max((s["temp_c"] for s in samples if s["temp_c"] is not None), default=None)
    throttle = SEPARATOR.join(text for text in EVENTS.values() if text in named)
    return {**middle, "temp_c": hottest, "throttle": throttle}


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median_low(known) if known else None


def slowed(throttle: str) -> bool:
    """Whether the text of `NvmlSampler.sample` names a slowdown by heat or hardware."""
    return not SLOWDOWNS.isdisjoint(throttle.split(SEPARATOR))

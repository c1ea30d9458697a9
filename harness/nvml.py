"""What the driver says of the GPUs, through NVML; nothing where there is no driver or library."""

import os
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


@dataclass(frozen=True)
class Gpu:
    """One device: its number in PCI order, its UUID and its marketing name."""

    index: int
    uuid: str
    name: str

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


def library():
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
    nvml = library()
    if nvml is None:
        return []
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        found.append(Gpu(index, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)))
    wish = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wish is None:
        return found
    return [gpu for entry in wish.split(",") if (gpu := _named(entry.strip(), found))]


def _named(entry: str, found: list[Gpu]) -> Gpu | None:
    if entry.isdigit():
        return next((gpu for gpu in found if gpu.index == int(entry)), None)
    return next((gpu for gpu in found if entry and gpu.uuid.startswith(entry)), None)


def ask(nvml, function: str, *arguments):
    """The answer of an NVML function, None where this device or driver has none."""
    try:
        return getattr(nvml, function)(*arguments)
    except nvml.NVMLError:
        return None


class Probe:
    """Readings of the first visible GPU while it works; empty where NVML does not know it."""

    def __init__(self):
        visible = gpus()
        self._nvml = library() if visible else None
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


def slowed(throttle: str) -> bool:
    """Whether the text of `Probe.sample` names a slowdown by heat or hardware."""
    return not SLOWDOWNS.isdisjoint(throttle.split(SEPARATOR))

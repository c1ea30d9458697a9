"""What a launcher may ask of the device, with an answer where there is none."""

import contextlib
import functools
from collections.abc import Iterator

import torch

# Tensors without a device (ahead-of-time builds, the interpreter) are planned for as on an H200.
_plan = {"sm_count": 132, "shared_bytes": 232448, "hip": torch.version.hip is not None}


# PyTorch looks the device up anew each time, which takes a tenth of a launch.
_remembered = functools.cache(torch.cuda.get_device_properties)


def _properties(device: torch.device):
    # A graph is traced once, and cannot look into what remembers.
    if torch.compiler.is_dynamo_compiling():
        return torch.cuda.get_device_properties(device)
    return _remembered(device)


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of `device`."""
    if device.type != "cuda":
        return _plan["sm_count"]
    return _properties(device).multi_processor_count


def shared_bytes(device: torch.device) -> int:
    """Shared memory, in bytes, that one program may have on `device`."""
    if device.type != "cuda":
        return _plan["shared_bytes"]
    return _properties(device).shared_memory_per_block_optin


def has_ptx(device: torch.device) -> bool:
    """Whether kernels that hold instructions of NVIDIA run on `device`: no interpreter has them."""
    return device.type != "cpu" and not _plan["hip"]


def float32_dot() -> str:
    """The input precision of a `tl.dot` that keeps float32 accuracy: three tf32 products on the
    tensor cores of NVIDIA; AMD's compiler knows no such form."""
    return "ieee" if _plan["hip"] else "tf32x3"


@contextlib.contextmanager
def planned_for(**limits: int | bool) -> Iterator[None]:
    """Within the body tensors without a device are planned for with these limits instead."""
    before = dict(_plan)
    _plan.update(limits)
    try:
        yield
    finally:
        _plan.update(before)

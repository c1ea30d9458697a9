"""Properties of a device that launchers ask for, also for tensors without a device.

Ahead-of-time builds and the interpreter have tensors on no GPU. Launchers choose for these as on
an H200, or as `assume_device` says.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch

_assumed = {
    "sm_count": 132,
    "shared_bytes": 232448,
    "hip": torch.version.hip is not None,
    "hopper": True,
    "tensor_memory": False,
}

# PyTorch looks the device up anew each time, which takes a tenth of a launch.
_cached_properties = functools.cache(torch.cuda.get_device_properties)
_capability = functools.cache(torch.cuda.get_device_capability)


def _properties(device: torch.device):
    # Dynamo traces a graph once, and cannot look into a function that caches.
    if torch.compiler.is_dynamo_compiling():
        return torch.cuda.get_device_properties(device)
    return _cached_properties(device)


def sm_count(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of `device`."""
    if device.type != "cuda":
        return _assumed["sm_count"]
    return _properties(device).multi_processor_count


def shared_bytes(device: torch.device) -> int:
    """Return the shared memory, in bytes, that one program may have on `device`."""
    if device.type != "cuda":
        return _assumed["shared_bytes"]
    return _properties(device).shared_memory_per_block_optin


def has_ptx(device: torch.device) -> bool:
    """Return whether `device` runs kernels with instructions of NVIDIA; no interpreter does."""
    return device.type != "cpu" and not _assumed["hip"]


def is_hopper(device: torch.device) -> bool:
    """Return whether `device` runs kernels for the tensor cores of Hopper (sm_90 only)."""
    return _has_generation(device, 9, "hopper")


def has_tensor_memory(device: torch.device) -> bool:
    """Return whether products on `device` accumulate in tensor memory (sm_100 and sm_103)."""
    return _has_generation(device, 10, "tensor_memory")


def _has_generation(device: torch.device, major: int, assumed: str) -> bool:
    found = _capability(device)[0] == major if device.type == "cuda" else _assumed[assumed]
    return has_ptx(device) and found


def float32_dot() -> str:
    """Return the input precision of a `tl.dot` that keeps float32 accuracy.

    On NVIDIA it is three tf32 products on the tensor cores; AMD's compiler has no such form.
    """
    return "ieee" if _assumed["hip"] else "tf32x3"


@contextlib.contextmanager
def assume_device(
    *,
    sm_count: int | None = None,
    shared_bytes: int | None = None,
    hip: bool | None = None,
    hopper: bool | None = None,
    tensor_memory: bool | None = None,
) -> Iterator[None]:
    """Within the body, choose for tensors on no GPU as if their device had these properties.

    A property that is None stays as it is.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    before = dict(_assumed)
    _assumed.update(given)
    try:
        yield
    finally:
        _assumed.update(before)

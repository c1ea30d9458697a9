"""Of which generation a GPU is, for kernels that are written for one alone."""

import contextlib
import functools
from collections.abc import Iterator

import torch

from .device import has_ptx

# Tensors without a device are planned for as on an H200.
_plan = {"hopper": True}
_capability = functools.cache(torch.cuda.get_device_capability)


def is_hopper(device: torch.device) -> bool:
    """Whether kernels written for the tensor cores of Hopper run on `device`: no interpreter and
    no later GPU has their instructions."""
    if not has_ptx(device):
        return False
    return _capability(device)[0] == 9 if device.type == "cuda" else _plan["hopper"]


@contextlib.contextmanager
def planned_for(hopper: bool) -> Iterator[None]:
    """Within the body tensors without a device are planned for with or without such kernels."""
    before = _plan["hopper"]
    _plan["hopper"] = hopper
    try:
        yield
    finally:
        _plan["hopper"] = before

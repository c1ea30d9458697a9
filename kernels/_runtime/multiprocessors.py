"""How many multiprocessors the current stream may use, which can be fewer than the device has.

A slice of a device (MIG) is a device to CUDA, and its properties count its own multiprocessors. A
green context has a part of a device, and the properties of the device do not show it. The driver
says what a context or a stream has (`cuCtxGetDevResource`, `cuStreamGetGreenCtx`, CUDA 12.4). A
share of a device that MPS gives a client may show in neither; who needs room for programs asks for
more than one group of them (`exchange.SHARERS`).
"""

import ctypes
import functools

import torch

from .device import sm_count

# CU_DEV_RESOURCE_TYPE_SM; where `smCount` stands in CUdevResource, behind the kind and padding. The
# struct has 144 bytes in CUDA 12 and 13.
KIND, PLACE, SIZE = 1, 96, 256


def available(device: torch.device) -> int:
    """Multiprocessors on which a launch on the current stream of `device` can run.

    Those of the device where the driver cannot be asked, or there is no GPU. The answer is not
    kept: a handle of a context may come back for another one, and a look takes a microsecond.
    """
    whole = sm_count(device)
    if device.type != "cuda" or torch.version.hip is not None:
        return whole
    driver = _driver()
    if driver is None:
        return whole
    found = [whole]
    with torch.cuda.device(device):
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
        here, green = ctypes.c_void_p(), ctypes.c_void_p()
        if driver.cuCtxGetCurrent(ctypes.byref(here)) == 0 and here:
            found.append(_resource(driver.cuCtxGetDevResource, here))
        if driver.cuStreamGetGreenCtx(stream, ctypes.byref(green)) == 0 and green:
            found.append(_resource(driver.cuGreenCtxGetDevResource, green))
    return min(count for count in found if count)


def _resource(ask, whose: ctypes.c_void_p) -> int:
    """The multiprocessors of a context; 0 where the driver does not say."""
    answer = (ctypes.c_ubyte * SIZE)()
    if ask(whose, answer, KIND) != 0:
        return 0
    return ctypes.c_uint.from_buffer(answer, PLACE).value


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """The driver's library; None where there is none, or one that knows no green contexts."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for name in (
            "cuCtxGetCurrent", "cuCtxGetDevResource", "cuStreamGetGreenCtx",
            "cuGreenCtxGetDevResource",
        ):  # fmt: skip
            getattr(driver, name).restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return driver

"""Which launches may start while the kernel before them runs; see `_triton/early_start.py`."""

import torch

from . import device as gpus


def early_start(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """Return the arguments of a launch that may start while the kernel before it runs.

    They are EARLY, whether it does, and then an option of Triton's launch. It does if that is
    wanted, on sm_90 and later. The kernel has to wait: see `_triton/early_start.py`.
    """
    early = gpus.is_hopper(device) or gpus.has_tensor_memory(device)
    if device.type == "cuda":
        early = gpus.has_ptx(device) and gpus._capability(device)[0] >= 9
    return {"EARLY": True, "launch_pdl": True} if wanted and early else {"EARLY": False}

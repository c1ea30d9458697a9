"""What a launcher may ask of the device, with an answer where there is none."""

import torch

# Meta tensors (ahead-of-time builds) and CPU tensors (the interpreter) plan for this many.
NOMINAL_SM_COUNT = 132


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of `device`; a nominal number for devices that have none."""
    if device.type != "cuda":
        return NOMINAL_SM_COUNT
    return torch.cuda.get_device_properties(device).multi_processor_count

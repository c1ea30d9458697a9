"""The CUDA context of this process."""

import torch


def alive() -> bool:
    """Return whether CUDA still works; after an illegal access each further call fails."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True

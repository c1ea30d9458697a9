"""Whether a call is to have a gradient, for parts of libraries that give one in some forms only."""

import torch


def wanted(*tensors: torch.Tensor) -> bool:
    """Return whether gradients are recorded and one of the tensors takes part in them."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

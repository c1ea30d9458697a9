"""How the launchers start a kernel, and when they need autograd."""

import torch


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether a result of these tensors takes part in a backward pass."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def launch(kernel, grid: tuple[int, ...], **arguments) -> None:
    """Starts a `@triton.jit` kernel on the current stream: kernel[grid](**arguments).

    arguments: in the order of the kernel's parameters, then num_warps and num_stages.
    """
    kernel[grid](**arguments)

"""`accelerate(model)`: the parts of a plain PyTorch model swapped for the kernels, in place."""

from network.accelerate.report import Report
from network.accelerate.swap import accelerate

__all__ = ["Report", "accelerate"]

"""Liger-Kernel (Hsu et al., 2024): its norms, rotary embedding, SwiGLU and fused loss."""

from baselines import liger as library
from network.stacks._norms import with_stream


def _layer_norm(x, weight, bias, eps, residual=None):
    # It takes no residual: the sum is PyTorch's, as its user has it.
    total = x if residual is None else x + residual
    return library.layer_norm(total, weight, bias, eps), total


# The fused loss reads the number of its targets on the host.
GRAPH = False
PARTS = {
    "rms_norm": with_stream(library.rms_norm),
    "layer_norm": _layer_norm,
    "rotary": library.rotary,
    "swiglu": library.swiglu,
    "loss": library.linear_cross_entropy,
}

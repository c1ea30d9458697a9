"""The activation that a module computes, by the name that the kernels have for it."""

from torch import nn

from network.accelerate.setting import is_replaced

LEAKY_SLOPE = 0.01  # that of the fused product
# The classes of transformers.activations, by name.
HUGGING_FACE = {
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
    "SiLUActivation": "silu",
}


def name_of(module: nn.Module) -> str | None:
    """Return "silu", "gelu" (erf form), "gelu_tanh", "relu", "leaky_relu" or "tanh".

    None if it is another, or if its forward pass is no longer that of its class.
    """
    kind = type(module)
    if is_replaced(module):
        return None
    if kind is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    if kind is nn.LeakyReLU:
        return "leaky_relu" if module.negative_slope == LEAKY_SLOPE else None
    if kind.__module__ == "transformers.activations":
        return HUGGING_FACE.get(kind.__name__)
    return {nn.SiLU: "silu", nn.ReLU: "relu", nn.Tanh: "tanh"}.get(kind)

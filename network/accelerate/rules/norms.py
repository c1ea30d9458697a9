"""nn.LayerNorm, nn.RMSNorm, and the RMS norms of Hugging Face's Llama, Mistral and Qwen2."""

import torch
from torch import nn

from kernels.layer_norm import layer_norm
from kernels.rms_norm import rms_norm
from network.accelerate.setting import (
    GATED_FAMILIES,
    Left,
    Setting,
    Swap,
    forward_of,
    is_of,
    stays,
    unfit,
)

# PyTorch's where none is given: that of float32, which it computes halves in too.
EPS = torch.finfo(torch.float32).eps
ROW = (2, 64)


def rule(module: nn.Module, setting: Setting) -> list[Swap | Left]:
    if type(module) is nn.LayerNorm:
        kernel, forward, shape = layer_norm, _layer_norm, module.normalized_shape
    elif type(module) is nn.RMSNorm:
        kernel, forward, shape = rms_norm, _rms_norm, module.normalized_shape
    elif is_of(module, GATED_FAMILIES, "RMSNorm"):
        kernel, forward, shape = rms_norm, _hugging_face, module.weight.shape
    else:
        return []
    if len(shape) != 1:
        return [Left(f"it normalizes {len(shape)} dimensions, and the kernel the last one")]
    if why := setting.refusal(module, kernel, ROW, ROW[1:]):
        return [Left(why)]
    return [Swap(kernel.__name__, (forward_of(module, forward),))]


# A call may name its argument, so that has the name of PyTorch's.
def _layer_norm(self, input):
    if why := unfit(input, self.weight, self.bias):
        stays(self, why)
        return type(self).forward(self, input)
    return layer_norm(input, self.weight, self.bias, self.eps)


def _rms_norm(self, x):
    if why := unfit(x, self.weight):
        stays(self, why)
        return type(self).forward(self, x)
    return rms_norm(x, self.weight, EPS if self.eps is None else self.eps)


def _hugging_face(self, hidden_states):
    if why := unfit(hidden_states, self.weight):
        stays(self, why)
        return type(self).forward(self, hidden_states)
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)

"""GELU: PyTorch's, and those of Hugging Face, which take several kernels each."""

from torch import nn

from kernels.activation import gelu
from network.accelerate.activations import name_of
from network.accelerate.setting import Left, Setting, Swap, forward_of, stays, unfit_alone

ROW = (2, 64)


def rule(module: nn.Module, setting: Setting) -> list[Swap | Left]:
    forward = {"gelu": _erf, "gelu_tanh": _tanh}.get(name_of(module))
    if forward is None:
        return []
    if why := setting.refusal(module, gelu, ROW):
        return [Left(why)]
    return [Swap("gelu", (forward_of(module, forward),))]


def _erf(self, input):
    return _gelu(self, input, "none")


def _tanh(self, input):
    return _gelu(self, input, "tanh")


def _gelu(self, x, form):
    if why := unfit_alone(x):
        stays(self, why)
        return type(self).forward(self, x)
    return gelu(x, form)

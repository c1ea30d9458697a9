"""A linear layer and its activation in one kernel: in an nn.Sequential, and in GPT-2's MLP."""

import itertools

import torch
from torch import nn

from kernels.matmul import matmul
from network.accelerate.activations import name_of
from network.accelerate.setting import Left, Setting, Swap, forward_of, is_of, stays, unfit

FUSED = ("relu", "leaky_relu", "gelu", "gelu_tanh", "tanh")
ROWS, WEIGHT, BIAS = (2, 64), (64, 64), (64,)


def rule(module: nn.Module, setting: Setting) -> list[Swap | Left]:
    if type(module) is nn.Linear or _is_conv1d(module):
        return [Left("a product alone stays PyTorch's")]
    pairs = list(_pairs(module))
    changes = []
    for linear, activation in pairs:
        name = name_of(activation)
        if setting.counts[id(linear)] > 1 or setting.counts[id(activation)] > 1:
            return [Left("a linear layer or its activation stands in several places")]
        if why := setting.refusal(linear, matmul, ROWS, WEIGHT, BIAS):
            return [Left(f"a product with its activation: {why}")]
        changes += [forward_of(linear, _fused(name)), forward_of(activation, _passes)]
    return [Swap("matmul", tuple(changes))] if changes else []


def _is_conv1d(module):
    """Whether a module is the linear layer of Hugging Face's GPT-2; its weight is [in, out]."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def _pairs(module):
    """The linear layers of a module whose result goes to an activation and nowhere else."""
    if type(module) is nn.Sequential:
        found = itertools.pairwise(module)
        found = [(a, b) for a, b in found if type(a) is nn.Linear]
    else:
        found = [(module.c_fc, module.act)] if is_of(module, ("gpt2",), "GPT2MLP") else []
    for linear, activation in found:
        if name_of(activation) in FUSED and "forward" not in vars(linear):
            yield linear, activation


def _fused(name):
    def forward(self, x):
        if why := unfit(x, self.weight, self.bias):
            stays(self, why)
            # The activation after it passes its input on.
            return _PLAIN[name](type(self).forward(self, x))
        weight = self.weight if _is_conv1d(self) else self.weight.T
        out = matmul(x.reshape(-1, x.shape[-1]), weight, self.bias, name)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    return forward


def _passes(self, x):
    return x


_PLAIN = {
    "relu": torch.relu,
    "leaky_relu": nn.functional.leaky_relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
}

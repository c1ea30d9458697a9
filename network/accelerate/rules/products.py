"""A linear layer and its activation in one kernel: in an nn.Sequential, and in GPT-2's MLP.

The module that holds the two is changed, and neither of them. So each computes what it did if it is
called by itself, as in a slice of the nn.Sequential.
"""

import itertools

from torch import nn

from kernels.matmul import matmul
from network.accelerate.activations import name_of
from network.accelerate.setting import (
    Left,
    Setting,
    Swap,
    forward_of,
    is_hooked,
    is_of,
    is_replaced,
    stays,
    unfit,
)

FUSED = ("relu", "leaky_relu", "gelu", "gelu_tanh", "tanh")
ROWS, WEIGHT, BIAS = (2, 64), (64, 64), (64,)


def rule(module: nn.Module, setting: Setting) -> list[Swap | Left]:
    if _is_linear(module):
        return [Left("a product alone stays PyTorch's")]
    if type(module) is nn.Sequential:
        forward, found = _sequence, itertools.pairwise(module)
    elif is_of(module, ("gpt2",), "GPT2MLP"):
        forward, found = _mlp, [(module.c_fc, module.act)]
    else:
        return []
    pairs = [pair for pair in found if _is_pair(*pair)]
    for linear, activation in pairs:
        if setting.counts[id(linear)] > 1 or setting.counts[id(activation)] > 1:
            return [Left("a linear layer or its activation stands in several places")]
        if is_hooked(linear) or is_hooked(activation):
            return [Left("a linear layer or its activation has hooks")]
        if why := setting.refusal(linear, matmul, ROWS, WEIGHT, BIAS):
            return [Left(f"a product with its activation: {why}")]
    if not pairs:
        return []
    return [Swap("matmul", (forward_of(module, forward),), tuple(itertools.chain(*pairs)))]


def _is_linear(module):
    return type(module) is nn.Linear or _is_conv1d(module)


def _is_conv1d(module):
    """Whether a module is the linear layer of Hugging Face's GPT-2; its weight is [in, out]."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def _is_pair(linear, activation):
    """Whether the kernel computes what the two modules do; an adapter, say, is no linear layer."""
    return _is_linear(linear) and not is_replaced(linear) and name_of(activation) in FUSED


def _fuses(linear, activation):
    """Whether two modules are a pair at the time of a call: they may be others or have hooks."""
    return _is_pair(linear, activation) and not (is_hooked(linear) or is_hooked(activation))


def _sequence(self, input):
    layers, number = list(self), 0
    while number < len(layers):
        pair = layers[number : number + 2]
        if len(pair) == 2 and _fuses(*pair):
            input, number = _product(*pair, input), number + 2
        else:
            input, number = pair[0](input), number + 1
    return input


def _mlp(self, hidden_states):
    if not _fuses(self.c_fc, self.act):
        return type(self).forward(self, hidden_states)
    return self.dropout(self.c_proj(_product(self.c_fc, self.act, hidden_states)))


def _product(linear, activation, x):
    if why := unfit(x, linear.weight, linear.bias):
        stays(linear, why)
        return activation(linear(x))
    weight = linear.weight if _is_conv1d(linear) else linear.weight.T
    out = matmul(x.reshape(-1, x.shape[-1]), weight, linear.bias, name_of(activation))
    return out.reshape(*x.shape[:-1], out.shape[-1])

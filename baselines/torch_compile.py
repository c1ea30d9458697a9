"""PyTorch, torch.compile with static shapes in its default mode."""

import torch
import torch._functorch.config
import torch.nn.functional as F

from baselines import _torch_formulas as formulas

LIBRARY = "torch"

# Each shape is compiled on its own; past these limits torch would silently run eager instead.
torch._dynamo.config.recompile_limit = 1 << 16
torch._dynamo.config.accumulated_recompile_limit = 1 << 16
# Donated buffers are freed by a backward pass, which then could not be timed a second time.
torch._functorch.config.donated_buffer = False


def _compiled(function):
    return torch.compile(function, dynamic=False, fullgraph=True)


@_compiled
def scale(x, alpha):
    return x * alpha


@_compiled
def add(x, y):
    return x + y


@_compiled
def mul(x, y):
    return x * y


@_compiled
def maximum(x, y):
    return torch.maximum(x, y)


@_compiled
def minimum(x, y):
    return torch.minimum(x, y)


@_compiled
def dot(x, y):
    return torch.dot(x, y)


@_compiled
def softmax(x):
    return torch.softmax(x, dim=-1)


@_compiled
def layer_norm(x, weight, bias, eps):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


@_compiled
def matmul(a, b, bias=None, activation="none"):
    return formulas.linear(a, b, bias, activation)


@_compiled
def attention(q, k, v, causal=False):
    return formulas.attention(q, k, v, causal)

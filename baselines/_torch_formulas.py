"""Each op as a user of PyTorch writes it; eager mode and the compiler bind the same functions."""

import math

import torch
import torch.nn.functional as F

LEAKY_SLOPE = 0.01


def scale(x, alpha):
    return x * alpha


def add(x, y):
    return x + y


def mul(x, y):
    return x * y


def maximum(x, y):
    return torch.maximum(x, y)


def minimum(x, y):
    return torch.minimum(x, y)


def dot(x, y):
    return torch.dot(x, y)


def softmax(x):
    return torch.softmax(x, dim=-1)


def layer_norm(x, weight, bias, eps):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def matmul(a, b, bias=None, activation="none"):
    """activation(a b + bias), the sum with the bias inside the library's matmul."""
    return activate(a @ b if bias is None else torch.addmm(bias, a, b), activation)


def attention(q, k, v, causal=False):
    """Attention with its scores in memory."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        s = q.shape[-2]
        future = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return torch.softmax(scores, dim=-1) @ v


def activate(out, activation):
    """The activation of a matmul epilogue by name; ValueError for a name nobody knows."""
    if activation == "none":
        return out
    if activation == "relu":
        return F.relu(out)
    if activation == "leaky_relu":
        return F.leaky_relu(out, LEAKY_SLOPE)
    if activation == "gelu":
        return F.gelu(out)
    raise ValueError(f"activation {activation!r} is not offered")

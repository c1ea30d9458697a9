"""Formulas that PyTorch has no single function for, as a user would write them."""

import math

import torch
import torch.nn.functional as F

LEAKY_SLOPE = 0.01


def activate(out: torch.Tensor, activation: str) -> torch.Tensor:
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


def linear(a, b, bias, activation):
    """activation(a b + bias), the sum with the bias inside the library's matmul."""
    return activate(a @ b if bias is None else torch.addmm(bias, a, b), activation)


def attention(q, k, v, causal):
    """Attention with its scores in memory."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        s = q.shape[-2]
        future = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return torch.softmax(scores, dim=-1) @ v

"""The network in plain PyTorch, in any dtype: the oracle of its ops, which is never timed.

It takes the model code with parts of its own. A large network must fit in float64 beside its
results. So a layer is computed anew in the backward pass, and attention and loss take some rows at
a time.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from network.config import Config
from network.flat import bound
from network.model import Transformer
from network.parts import Parts

# Rows of scores, and rows of logits, that are held at a time.
SCORES, LOGITS = 512, 1024


def network(config: Config, weights: torch.Tensor) -> Transformer:
    """Return the network whose parameters are views of flat weights [N]."""
    model = bound(config, PARTS, weights)
    model.layers = [functools.partial(_again, layer) for layer in model.layers]
    return model


def _again(function, *given):
    """Return function(*given); its inner results are computed anew in the backward pass."""
    return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)


def _rms_norm(x, weight, eps, residual):
    total = x if residual is None else x + residual
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight, total


def _layer_norm(x, weight, bias, eps, residual):
    total = x if residual is None else x + residual
    centred = total - total.mean(-1, keepdim=True)
    return centred * torch.rsqrt(
        centred.square().mean(-1, keepdim=True) + eps
    ) * weight + bias, total


def _rotary(q, k, cos, sin):
    cos, sin = cos[:, None], sin[:, None]  # [S, 1, D/2]

    def turned(x):
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    return turned(q), turned(k)


def _attention(q, k, v, dropout=0.0, seed=None):
    if dropout:
        raise ValueError(f"dropout: {dropout}, expected 0 in an oracle")
    (b, h, s, d), heads = q.shape, k.shape[1]
    q = q.reshape(b, heads, h // heads, s, d)
    rows = [
        _again(_attended, q[..., start : start + SCORES, :], k, v, start)
        for start in range(0, s, SCORES)
    ]
    return torch.cat(rows, -2).reshape(b, h, s, d)


def _attended(q, k, v, start):
    """The rows from `start` on of causal attention: q [B, K, G, R, D], k and v [B, K, S, D]."""
    end = start + q.shape[-2]
    k, v = k[:, :, None, :end], v[:, :, None, :end]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    row = torch.arange(start, end, device=q.device)[:, None]
    hidden = torch.arange(end, device=q.device) > row
    return torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v


def _loss(x, weight, targets):
    sums = [
        _again(_summed, x[start : start + LOGITS], weight, targets[start : start + LOGITS])
        for start in range(0, len(x), LOGITS)
    ]
    return sum(sums) / len(x)


def _summed(x, weight, targets):
    return F.cross_entropy(x @ weight.T, targets, reduction="sum")


def _refuse(*_):
    """Stand in for the parts that no call of the oracle reaches: a cache and dropout."""
    raise NotImplementedError("the oracle reads all tokens at once and drops none")


PARTS = Parts(
    embedding=lambda ids, weight: weight[ids],
    rms_norm=_rms_norm,
    layer_norm=_layer_norm,
    rotary=_rotary,
    attention=_attention,
    decode_attention=_refuse,
    swiglu=lambda gate, up: gate * torch.sigmoid(gate) * up,
    gelu=lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    linear=lambda x, weight, bias=None: x @ weight.T if bias is None else x @ weight.T + bias,
    dropout=_refuse,
    loss=_loss,
)

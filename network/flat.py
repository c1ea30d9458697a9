"""All weights of a network in one tensor: its parameters are views of it.

So a network is an argument of a call as any tensor is: drawn from a seed, kept, put back, compared.
A step that changes the parameters changes that tensor.
"""

import functools
from collections.abc import Iterator

import torch
from torch import nn

from network.config import Config
from network.model import Transformer
from network.parts import Parts

# Entries of which each parameter takes a multiple, so that each begins at an aligned address.
ALIGNED = 64


def places(model: Transformer) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Yield the name of each parameter, the parameter, and where it begins; a tied one once."""
    start = 0
    for name, weight in model.named_parameters():
        yield name, weight, start
        start += -(-weight.numel() // ALIGNED) * ALIGNED


@functools.cache
def size(config: Config) -> int:
    """Return the entries of the flat tensor of a configuration."""
    *_, (_, weight, start) = places(_shapes(config))
    return start + -(-weight.numel() // ALIGNED) * ALIGNED


def views(model: Transformer, flat: torch.Tensor) -> list[torch.Tensor]:
    """Return for each parameter of a model, in order, its part of a flat tensor [N]."""
    return [flat[start : start + w.numel()].view(w.shape) for _, w, start in places(model)]


def bound(config: Config, parts: Parts, flat: torch.Tensor) -> Transformer:
    """Return a network of these parts whose parameters lie in `flat`, [N]; no memory is taken.

    ValueError if the tensor has another number of entries.
    """
    model = _shapes(config, parts)
    expected = size(config)
    if flat.numel() != expected:
        raise ValueError(f"weights: {flat.numel()} entries, expected {expected}")
    own = dict(zip(map(id, model.parameters()), views(model, flat), strict=True))
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                fresh = made.setdefault(id(weight), nn.Parameter(own[id(weight)]))
                setattr(module, name, fresh)
    model.make_buffers()
    return model


@torch.no_grad()
def scale_as_drawn(config: Config, normal: torch.Tensor) -> torch.Tensor:
    """Scale normal entries [N] in place to weights of a network, and return them.

    A matrix has the deviation of 1 over the root of the entries that it sums over, so each layer
    counts. A norm's weight lies around one; a bias is small.
    """
    down = f".{config.family.names.down}.weight"
    model = _shapes(config)
    for (name, weight, _), part in zip(places(model), views(model, normal), strict=True):
        if weight.dim() > 1:
            part.mul_((config.mlp if name.endswith(down) else config.width) ** -0.5)
        else:
            part.mul_(0.1)
            if name.endswith(".weight"):
                part.add_(1)
    return normal


def _shapes(config, parts=None):
    """A network without memory."""
    with torch.device("meta"):
        return Transformer(config, parts)

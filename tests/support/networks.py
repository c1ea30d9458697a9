"""Small networks of the tests, their tokens, and losses with gradients."""

import dataclasses

import torch

from network import stack
from network.config import preset

KINDS = ("tiny", "tiny-gpt2")


def tokens(batch=2, length=12, seed=0, vocabulary=256):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(vocabulary, (batch, length + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def plain(kind):
    """A preset without dropout, which no two stacks draw alike."""
    return dataclasses.replace(preset(kind), dropout=0.0)


def built(config, using=None, seed=0, dtype=torch.float32):
    """A network with every weight off its fresh value, so that a norm's and a bias's count."""
    using = using or stack.load(stack.EAGER)
    model = using.build(config, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(0.1 * noise.to(weight))
    return model


def loss_and_gradients(model, ids, targets):
    """The loss and the gradient of each weight by its name."""
    model.zero_grad(set_to_none=True)
    loss = model(ids, targets)
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}


def apart(found, exact):
    """The greatest difference of two tensors over the greatest number of the second."""
    size = exact.abs().max().item()
    return (found.double() - exact.double()).abs().max().item() / max(size, 1e-30)

"""Tensors of a network as arguments of an op: its weights, and the moments of AdamW."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from network import flat
from network.config import Config, undropped
from ops._spec import Case, Tensor


@dataclass(frozen=True)
class Finished(Tensor):
    """A tensor whose drawn entries are changed in place: finish(case, entries) -> entries."""

    finish: Callable[[Case, torch.Tensor], torch.Tensor] | None = None


def config_of(case: Case) -> Config:
    """Return the configuration of a case: its one flag is the name of a preset."""
    (flag,) = case.flags
    return undropped(flag.replace("_", "-"))


def weights() -> Tensor:
    """Weights of the preset, drawn so that each layer counts."""
    return Finished("N", grad=False, finish=lambda case, x: flat.scale_as_drawn(config_of(case), x))


def first_moment() -> Tensor:
    """A mean of gradients whose norm over all entries is about one, as clipped gradients have."""
    return Finished("N", grad=False, finish=lambda case, x: x.mul_(case["N"] ** -0.5))


def second_moment() -> Tensor:
    """A mean of squares of such gradients, never zero."""
    return Finished("N", grad=False, finish=lambda case, x: x.square_().add_(1).div_(2 * case["N"]))

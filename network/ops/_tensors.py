"""Tensors of a network as arguments of an op: its weights, and the moments of AdamW."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from network import flat
from network.config import Config, undropped
from network.train import BETAS
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
    """A mean of gradients that are noise, whose norms over all entries are about one (clipped).

    The mean is shorter than one of them. A norm of one would hide the gradient of the step, which
    adds a tenth, in the rounding of the moment.
    """
    b1, _ = BETAS
    short = ((1 - b1) / (1 + b1)) ** 0.5
    return _moment(lambda case, x: x.mul_(short * case["N"] ** -0.5))


def second_moment() -> Tensor:
    """A mean of squares of such gradients, never zero."""
    return _moment(lambda case, x: x.square_().add_(1).div_(2 * case["N"]))


def _moment(finish: Callable[[Case, torch.Tensor], torch.Tensor]) -> Tensor:
    return Finished("N", grad=False, narrow=True, finish=finish)

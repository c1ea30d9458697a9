"""Loss parity: a stack trains as PyTorch in eager mode does, within a band fixed beforehand.

The band comes from eager PyTorch alone, by runs that differ in the seed of their weights and see
the same text. In each window of steps its half-width is the range of their mean losses. A stack
passes if its mean loss differs from that of eager PyTorch, at the same seed, by no more than this.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from network.config import Config
from network.stack import EAGER, Stack, load
from network.text import Batches
from network.train import TrainStep


def losses(
    stack: Stack, config: Config, batches: Batches, steps: int, seed: int = 0, **settings: object
) -> list[float]:
    """Return the loss of each step of a fresh network. settings: those of `TrainStep`; dtype."""
    dtype = settings.pop("dtype", torch.float32)
    device = batches.tokens.device
    torch.manual_seed(seed)
    model = stack.build(config, seed=seed, dtype=dtype, device=device)
    model.dropout_seed.fill_(seed << 32)
    step = TrainStep(model, **({"optimizer": stack.optimizer} | settings))
    return [step(*batches[number]).item() for number in range(steps)]


@dataclass(frozen=True)
class Band:
    """Mean losses of eager PyTorch at the first seed, window by window, and how far one may be."""

    window: int
    centre: tuple[float, ...]
    half_width: tuple[float, ...]

    def misses(self, curve: Sequence[float]) -> list[str]:
        """Return a line for each window in which a curve of losses leaves the band."""
        found = means(curve, self.window)
        if len(found) != len(self.centre):
            raise ValueError(f"curve: {len(found)} windows, and the band has {len(self.centre)}")
        rows = enumerate(zip(found, self.centre, self.half_width, strict=True))
        return [
            f"steps {i * self.window} to {(i + 1) * self.window - 1}: mean loss {mean:.4f},"
            f" expected {centre:.4f} within {width:.4f}"
            for i, (mean, centre, width) in rows
            if not abs(mean - centre) <= width
        ]


def band(curves: Sequence[Sequence[float]], window: int) -> Band:
    """Return the band around the first curve; ValueError unless three or more are given."""
    if len(curves) < 3:
        raise ValueError(f"curves: {len(curves)}, expected those of three seeds or more")
    each = list(zip(*(means(curve, window) for curve in curves), strict=True))
    return Band(
        window,
        tuple(values[0] for values in each),
        tuple(max(values) - min(values) for values in each),
    )


def means(curve: Sequence[float], window: int) -> list[float]:
    """Return the mean of each window; ValueError if the windows do not end where the curve does."""
    if not curve or len(curve) % window:
        raise ValueError(f"curve: {len(curve)} steps, expected a multiple of {window}")
    starts = range(0, len(curve), window)
    return [sum(curve[start : start + window]) / window for start in starts]


def eager_band(
    config: Config,
    batches: Batches,
    steps: int,
    window: int,
    seeds: Sequence[int] = (0, 1, 2),
    **settings: object,
) -> Band:
    """Return the band of eager PyTorch over these seeds; the first is that of the centre."""
    eager = load(EAGER)
    return band([losses(eager, config, batches, steps, s, **settings) for s in seeds], window)

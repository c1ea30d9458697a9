"""Cosine and sine of the rotary angles: position p and pair r have the angle p theta**(-2r/D).

Su et al., "RoFormer" (2021). The stretch is that of Llama 3.1, by the description in "The Llama 3
Herd of Models" (2024) and the fields of its published configuration.
"""

import math

import torch

from network.config import Config


def frequencies(config: Config) -> torch.Tensor:
    """Return the angle per position of each pair, [D/2], float64 on the CPU."""
    half = config.head_dim // 2
    plain = config.theta ** -(torch.arange(half, dtype=torch.float64, device="cpu") / half)
    if (stretch := config.stretch) is None:
        return plain
    turns = stretch.length * plain / (2 * math.pi)
    share = ((turns - stretch.low) / (stretch.high - stretch.low)).clamp(0, 1)
    return plain * (share + (1 - share) / stretch.factor)


def table(config: Config, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of the positions 0 to length - 1, each [length, D/2], float64, CPU."""
    positions = torch.arange(length, dtype=torch.float64, device="cpu")
    angles = positions[:, None] * frequencies(config)
    return angles.cos(), angles.sin()

"""Draw random tensors for the kernels' tests, and bound the error of a result."""

import math

import torch
from hypothesis import settings
from hypothesis import strategies as st

from harness.machine import nvml

DEVICE = "cuda" if nvml.gpus() else "cpu"
few = settings(max_examples=12, deadline=None, derandomize=True)
dtypes = st.sampled_from([torch.float32, torch.float16])


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def close(actual, expected, dtype):
    bound = {torch.float32: 2e-6, torch.float16: 2e-3}[dtype]
    scale = max(expected.abs().max().item(), 1e-30)
    assert (actual.double() - expected.double()).abs().max().item() <= bound * scale


def differs(ours, truth):
    """How far ours is from the truth, relative to its size; infinite if it holds no numbers."""
    error = (ours.double() - truth).norm() / truth.norm().clamp_min(1e-30)
    return math.inf if error.isnan() else error.item()

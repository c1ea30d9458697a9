"""Markers of tests: those that need something of the machine, with the reason of a skip, and the
one by which `make test` leaves tests out.
"""

import shutil

import torch

from harness.machine import gpu_lock, nvml

# It skips nothing: its tests run wherever they are asked for.
SLOW = "slow"
# For each marker: whether its tests can run here, and the reason of the skip if they cannot.
MARKS = {
    "gpu": (
        bool(gpu_lock.gpus()) and torch.cuda.is_available(),
        "needs a GPU, and PyTorch sees none here",
    ),
    "hopper": (
        bool(nvml.gpus()) and torch.cuda.get_device_capability()[0] == 9,
        "needs a Hopper GPU (compute capability 9)",
    ),
    "no_gpu": (
        not nvml.gpus(),
        "runs or imitates kernels without a GPU, and this machine has one",
    ),
    "latex": (
        shutil.which("latexmk") is not None,
        "needs latexmk, which is not installed here",
    ),
}

"""PyTorch: torch.compile does not end within five minutes for a step of AdamW on 398 tensors.

The step is that of PyTorch's own optimizer over lists (foreach), after the gradients are clipped by
their global norm. It is compiled for more and more tensors, each time by a process of its own with
a limit. The sizes are unlike, as those of a network, and the tensors are small.

Exit code: 1 reproduced, 0 not reproduced, 2 cannot run here. `--check` says only whether it can.
"""

import multiprocessing
import os
import platform
import sys
import threading
import time
from importlib import metadata

import torch
from torch.optim.adamw import adamw

NEEDS = "an NVIDIA GPU that Triton supports"
LIBRARIES = ("triton",)
COUNTS, LIMIT_S = (50, 100, 200, 398), 300


def step(params, grads, first, second, count):
    norm = torch.nn.utils.get_total_norm(grads, foreach=True)
    torch._foreach_mul_(grads, torch.clamp(1.0 / (norm + 1e-6), max=1.0))
    steps = list(count.repeat(len(params)).unbind())
    numbers = {"beta1": 0.9, "beta2": 0.95, "lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}
    choices = {"foreach": True, "fused": False, "amsgrad": False, "maximize": False}
    adamw(params, grads, first, second, [], steps, capturable=count.is_cuda, **choices, **numbers)
    return norm


def compiled(tensors):
    # If the script is ended, this process would keep the GPU.
    threading.Thread(target=end_with_parent, daemon=True).start()
    lengths = [64 * 4 ** (place % 5) for place in range(tensors)]
    lists = [
        [torch.rand(n, device="cuda", dtype=torch.bfloat16) for n in lengths] for _ in range(4)
    ]
    torch.compile(step)(*lists, torch.ones((), device="cuda"))
    torch.cuda.synchronize()


def end_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def case():
    # A forked process cannot use the GPU.
    context = multiprocessing.get_context("spawn")
    found, late = [], False
    for tensors in COUNTS:
        began = time.monotonic()
        process = context.Process(target=compiled, args=(tensors,), daemon=True)
        process.start()
        print(f"compiles for {tensors} tensors, {LIMIT_S} s at most", flush=True)
        process.join(LIMIT_S)
        seconds = time.monotonic() - began
        if process.is_alive():
            process.kill()
            process.join()
            found.append(f"{tensors} tensors: no answer within {LIMIT_S} s")
            late = True
        else:
            failed = f", exit code {process.exitcode}" if process.exitcode else ""
            found.append(f"{tensors} tensors: {seconds:.0f} s{failed}")
    return f"each is compiled within {LIMIT_S} s", "; ".join(found), late


def environment():
    """The versions that the result depends on, a line each."""
    lines = [f"python {platform.python_version()}, torch {torch.__version__}"]
    for name in LIBRARIES:
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed")
    if torch.cuda.is_available():
        cudnn = torch.backends.cudnn.version()
        lines.append(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, cuDNN {cudnn}")
    else:
        lines.append("no NVIDIA GPU")
    return lines


def lacking():
    """Return what is missing here to run this script; "" if nothing is."""
    if not torch.cuda.is_available():
        return f"needs {NEEDS}; finds no NVIDIA GPU"
    for name in LIBRARIES:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"needs {NEEDS}; {name} is not installed"
    return ""


def main():
    print("\n".join(environment()))
    if reason := lacking():
        print(reason)
        return 2
    if "--check" in sys.argv[1:]:
        print("can run here")
        return 0
    expected, observed, reproduced = case()
    print(f"expected: {expected}\nobserved: {observed}")
    print("reproduced" if reproduced else "not reproduced")
    return int(reproduced)


if __name__ == "__main__":
    sys.exit(main())

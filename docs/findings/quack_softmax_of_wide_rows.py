"""QuACK: the softmax of rows of 151936 entries is not a number.

In bfloat16 a row of more than 131072 entries is shared by the 16 blocks of a cluster. Each takes as
many columns: 10240 of 151936. So the last one begins beyond the row, and all its entries are minus
infinity. Its warps subtract their maximum, minus infinity, from them.

Exit code: 1 reproduced, 0 not reproduced, 2 cannot run here. `--check` says only whether it can.
"""

import platform
import sys
from importlib import metadata

import torch

NEEDS = "an NVIDIA GPU of compute capability 9.0 or higher and quack-kernels"
LIBRARIES = ("quack-kernels",)


def attempt(columns):
    from quack import softmax

    torch.manual_seed(0)
    x = torch.randn(16, columns, device="cuda", dtype=torch.bfloat16)
    return softmax(x).float().sum(dim=-1).mean().item()


def case():
    narrow, wide = attempt(131072), attempt(151936)
    observed = f"{wide:.3f}; with 131072 entries {narrow:.3f}"
    return "a mean sum of 1.000", observed, wide != wide and narrow == narrow


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

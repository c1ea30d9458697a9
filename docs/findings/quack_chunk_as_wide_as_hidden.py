"""QuACK: the default chunk of chunked_linear_cross_entropy fails where it equals the hidden size.

With bfloat16, a hidden size of 4096 and the default chunk_size of 4096, the gradient's product has
as many rows as columns, and the epilogue cannot tell its vectors apart. A chunk_size of 2048 works.

Exit code: 1 reproduced, 0 not reproduced, 2 cannot run here. `--check` says only whether it can.
"""

import platform
import sys
from importlib import metadata

import torch

NEEDS = "an NVIDIA GPU of compute capability 9.0 or higher and quack-kernels"
LIBRARIES = ("quack-kernels",)


def attempt(**settings):
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    torch.manual_seed(0)
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32000, 4096, device="cuda", dtype=torch.bfloat16) / 64
    targets = torch.randint(32000, (8192,), device="cuda")
    try:
        loss = chunked_linear_cross_entropy(x, weight.requires_grad_(), targets, **settings)
        loss.backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "" if x.grad.isfinite().all() else "a gradient that is not finite"


def case():
    default, halved = attempt(), attempt(chunk_size=2048)
    observed = f"by default: {default or 'a gradient'}; chunk_size=2048: {halved or 'a gradient'}"
    return "a gradient with either", observed, bool(default)


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

"""Liger-Kernel: the gradient of cross_entropy is wrong for logits that are not contiguous.

If the last stride is not one, `cross_entropy_forward` copies the logits. The copy is made inside
of `autograd.Function.forward`, so it does not require a gradient; the kernel is told so by
`HAS_GRADIENTS=_input.requires_grad` and writes none. The backward pass returns the copied logits.

Exit code: 1 reproduced, 0 not reproduced, 2 cannot run here. `--check` says only whether it can.
"""

import platform
import sys
from importlib import metadata

import torch
import torch.nn.functional as F

NEEDS = "an NVIDIA GPU and liger-kernel"
LIBRARIES = ("liger-kernel",)


def gradient(function, logits, targets):
    logits = logits.detach().requires_grad_()
    function(logits, targets).backward()
    return logits.grad


def case():
    from liger_kernel.transformers.functional import liger_cross_entropy

    torch.manual_seed(0)
    # The same values: contiguous, and as the transpose of a contiguous tensor.
    logits = torch.randn(9, 40, device="cuda")
    transposed = logits.mT.contiguous().mT
    targets = torch.randint(40, (9,), device="cuda")
    truth = gradient(F.cross_entropy, logits.double(), targets)
    plain = gradient(liger_cross_entropy, logits.clone(), targets)
    odd = gradient(liger_cross_entropy, transposed, targets)
    errors = [(found - truth).abs().max().item() for found in (plain, odd)]
    observed = f"contiguous {errors[0]:.1e}, transposed {errors[1]:.1e}"
    return "largest error of the gradient below 1e-6", observed, errors[1] > 1e-3


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

"""Liger-Kernel: the gradient of the bias of the fused loss loses digits in bfloat16.

The fused loss goes over the rows in chunks, of one row each where the vocabulary is much wider than
the hidden size. The bias gradient of each chunk is added to a sum in the dtype of the bias. With
`accum_dtype=torch.float32` that sum is exact enough, and is rounded once.

Exit code: 1 reproduced, 0 not reproduced, 2 cannot run here. `--check` says only whether it can.
"""

import platform
import sys
from importlib import metadata

import torch

NEEDS = "an NVIDIA GPU and liger-kernel"
LIBRARIES = ("liger-kernel",)
# Rows, hidden size and vocabulary: 130 chunks of one row.
SIZES = (130, 72, 17000)


def error(gradient, truth):
    """Return the largest error over the largest entry."""
    return ((gradient.double() - truth).abs().max() / truth.abs().max()).item()


def case():
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    torch.manual_seed(0)
    rows, hidden, vocabulary = SIZES
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
    bias = torch.randn(vocabulary, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(vocabulary, (rows,), device="cuda")
    wide = bias.double().requires_grad_()
    logits = x.double() @ weight.double().T + wide
    torch.nn.functional.cross_entropy(logits, targets).backward()
    found = []
    for accum_dtype in (None, torch.float32):
        leaf = bias.clone().requires_grad_()
        given = x.clone().requires_grad_(), weight, targets, leaf
        liger_fused_linear_cross_entropy(*given, accum_dtype=accum_dtype).backward()
        found.append(error(leaf.grad, wide.grad))
    default, summed_wide = found
    expected = f"an error of {summed_wide:.4f}, as with accum_dtype=torch.float32"
    return expected, f"an error of {default:.4f}", default > 2 * summed_wide


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

"""Liger-Kernel: the gradient of an embedding loses digits in bfloat16 where a token is frequent.

The backward pass adds the gradient of each row to that of its token's row by an atomic addition in
the dtype of the weight. Each of these additions rounds to 8 bits.

Exit code: 1 reproduced, 0 not reproduced, 2 cannot run here. `--check` says only whether it can.
"""

import platform
import sys
from importlib import metadata

import torch

NEEDS = "an NVIDIA GPU and liger-kernel"
LIBRARIES = ("liger-kernel",)
# Rows, tokens and columns. A quarter of the rows have the first token.
SIZES = (16384, 32000, 64)


def error(gradient, truth):
    """Return the largest error over the largest entry."""
    return ((gradient.double() - truth).abs().max() / truth.abs().max()).item()


def case():
    from liger_kernel.transformers.experimental.embedding import LigerEmbedding

    torch.manual_seed(0)
    rows, tokens, columns = SIZES
    indices = torch.randint(tokens, (rows,), device="cuda")
    indices[: rows // 4] = 0
    gradient = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    truth = torch.zeros(tokens, columns, device="cuda", dtype=torch.float64)
    truth.index_add_(0, indices, gradient.double())
    found = []
    for kind in (torch.nn.Embedding, LigerEmbedding):
        layer = kind(tokens, columns).to("cuda", torch.bfloat16)
        layer(indices).backward(gradient)
        found.append(error(layer.weight.grad, truth))
    eager, liger = found
    return f"an error of {eager:.4f}, as PyTorch's", f"an error of {liger:.4f}", liger > 2 * eager


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

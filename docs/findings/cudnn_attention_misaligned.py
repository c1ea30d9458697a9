"""PyTorch: scaled_dot_product_attention by cuDNN is wrong for rows that are not aligned.

Rows of 64 numbers lie 69 apart, as in a view of wider rows, so most begin off 16 bytes. The second
input is contiguous and begins 4 numbers behind an aligned address. Values are normal in both. The
memory around them decides the result: zeros give errors of the size of the values, NaN gives NaN.

Exit code: 1 reproduced, 0 not reproduced, 2 cannot run here. `--check` says only whether it can.
"""

import platform
import sys
from importlib import metadata

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

NEEDS = "an NVIDIA GPU of compute capability 8.0 or higher with cuDNN"
LIBRARIES = ()


def padded(x):
    storage = x.new_zeros(*x.shape[:-1], x.shape[-1] + 5)
    return storage[..., : x.shape[-1]].copy_(x)


def shifted(x):
    return x.new_zeros(x.numel() + 4)[4:].view(x.shape).copy_(x)


# float16 attention of normal values is right to 1e-3 here.
LARGEST_ERROR = 1e-2


def case():
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 70, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    truth = F.scaled_dot_product_attention(*(x.double() for x in inputs), is_causal=True)
    found, wrong = {}, False
    for name, laid_out in (("aligned", torch.clone), ("row stride 69", padded), ("off", shifted)):
        views = [laid_out(x) for x in inputs]
        try:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = F.scaled_dot_product_attention(*views, is_causal=True)
            error = (out - truth).abs().max().item()
            found[name] = f"{error:.1e}"
            wrong |= not error < LARGEST_ERROR  # NaN is below no number
        except RuntimeError as refusal:
            found[name] = f"declined ({str(refusal).splitlines()[0]})"
    observed = ", ".join(f"{name}: {text}" for name, text in found.items())
    return "a largest error near 1e-3 in each, or an error", observed, wrong


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

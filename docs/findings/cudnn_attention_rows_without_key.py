"""PyTorch: scaled_dot_product_attention by cuDNN is not zero for a row whose mask has no key.

The mask is boolean, and the first 40 of 130 rows see no key. The backends for plain and for
memory-efficient attention give zeros for such rows, forward and in all gradients.

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
UNSEEN = 40
# The rows that see a key are right to 1e-2 in float16.
LARGEST_ERROR = 1e-2


def result(backend, inputs, mask, gradient):
    """The rows that see no key, and the gradient of the values."""
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    out.backward(gradient)
    return out[..., :UNSEEN, :].float(), v.grad.float()


def case():
    torch.manual_seed(0)
    inputs = [torch.randn(2, 1, 130, 32, device="cuda", dtype=torch.float16) for _ in range(3)]
    gradient = torch.randn_like(inputs[0])
    mask = torch.ones(130, 130, dtype=torch.bool, device="cuda")
    mask[:UNSEEN] = False
    _, truth = result(SDPBackend.MATH, inputs, mask, gradient)
    found, wrong = {}, False
    for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            rows, dv = result(backend, inputs, mask, gradient)
        except RuntimeError as refusal:
            found[backend.name] = f"declined ({str(refusal).splitlines()[0]})"
            continue
        largest, error = rows.abs().max().item(), (dv - truth).abs().max().item()
        found[backend.name] = f"{largest:.1e}, gradient of v off by {error:.1e}"
        if backend is SDPBackend.CUDNN_ATTENTION:
            wrong = not (largest < LARGEST_ERROR)  # NaN is below no number
    observed = "; ".join(f"{name}: {text}" for name, text in found.items())
    return "zero in rows that see no key", f"the largest entry there, {observed}", wrong


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

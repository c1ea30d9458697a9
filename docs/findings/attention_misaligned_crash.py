"""Attention kernels: an input that is not aligned ends the CUDA context, not the call.

The first element lies one number, or four, behind an aligned address, or rows of 64 numbers lie 69
apart. Each call runs in a process of its own. An error that names the argument would leave the
process its GPU. Kernels: PyTorch's flash and memory-efficient backends, flash-attn 2, and xFormers'
operators (CUTLASS, flash-attn 2 and 3). Operators that are not installed are left out.

Exit code: 1 reproduced, 0 not reproduced, 2 cannot run here. `--check` says only whether it can.
"""

import platform
import subprocess
import sys
from importlib import metadata

import torch

NEEDS = "an NVIDIA GPU of compute capability 8.0 or higher"
LIBRARIES = ()
OPTIONAL = ("flash-attn", "xformers")


def laid_out(x, layout):
    if layout == "row stride 69":
        return x.new_zeros(*x.shape[:-1], x.shape[-1] + 5)[..., : x.shape[-1]].copy_(x)
    first = int(layout.split()[-1])
    return x.new_zeros(x.numel() + first)[first:].view(x.shape).copy_(x)


def sdpa(q, k, v, backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend[backend]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def flash_attn(q, k, v):
    from flash_attn import flash_attn_func

    return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)


def xformers(q, k, v, module):
    from importlib import import_module

    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    operator = import_module(f"xformers.ops.fmha.{module}").FwOp
    turned = (x.transpose(1, 2) for x in (q, k, v))
    out = memory_efficient_attention(*turned, LowerTriangularMask(), op=(operator, None))
    return out.transpose(1, 2)


KERNELS = {
    "sdpa flash": lambda *x: sdpa(*x, "FLASH_ATTENTION"),
    "sdpa efficient": lambda *x: sdpa(*x, "EFFICIENT_ATTENTION"),
    "flash-attn 2": flash_attn,
    "xformers cutlass": lambda *x: xformers(*x, "cutlass"),
    "xformers flash 2": lambda *x: xformers(*x, "flash"),
    "xformers flash 3": lambda *x: xformers(*x, "flash3"),
}
# Importing the libraries takes some ten seconds; a call takes none.
LIMIT_S = 120
LAYOUTS = ("first element 0", "first element 1", "first element 4", "row stride 69")


def one(kernel, layout):
    """Runs in a process of its own: prints the error, or what the library says."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 70, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    truth = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in inputs), is_causal=True
    )
    try:
        out = KERNELS[kernel](*(laid_out(x, layout) for x in inputs))
    except ImportError as error:
        print(f"not installed ({error})")
        return
    except Exception as error:
        print(f"declined ({str(error).splitlines()[0][:90]})")
    else:
        try:
            print(f"largest error {(out - truth).abs().max().item():.1e}")
        except RuntimeError as error:
            print(f"crashed ({str(error).splitlines()[0][:90]})")
            return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"crashed ({str(error).splitlines()[0][:90]})")


def case():
    lines = []
    for kernel in KERNELS:
        for layout in LAYOUTS:
            call = [sys.executable, __file__, "--one", kernel, layout]
            try:
                done = subprocess.run(
                    call, capture_output=True, text=True, check=False, timeout=LIMIT_S
                )
                said = (done.stdout.splitlines() or [f"crashed (exit code {done.returncode})"])[-1]
            except subprocess.TimeoutExpired:
                said = f"no answer within {LIMIT_S} s"
            # 24 processes take minutes: show each as it ends.
            lines.append(f"{kernel}, {layout}: {said}")
            print(lines[-1], flush=True)
    observed = "\n  ".join(["", *lines])
    return "a result, or an error after which the GPU still serves", observed, "crashed" in observed


def environment():
    """The versions that the result depends on, a line each."""
    lines = [f"python {platform.python_version()}, torch {torch.__version__}"]
    for name in (*LIBRARIES, *OPTIONAL):
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
    if sys.argv[1:2] == ["--one"]:
        one(*sys.argv[2:])
        return 0
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

"""One launch compiled for one architecture without a GPU, and what its binary says of itself."""

import contextlib
import hashlib
import io
import re
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.driver import ty_to_cpp

from harness.build import same
from harness.build.recorder import Launch
from harness.status import REASON_LENGTH

# Shared memory that a program may ask for, in bytes. CUDA C++ Programming Guide, table of technical
# specifications per compute capability; AMD CDNA 3 and 4 instruction set guides, local data share.
SHARED_BYTES = {
    "80": 166912,
    "86": 101376,
    "89": 101376,
    "90": 232448,
    "100": 232448,
    "103": 232448,
    "120": 101376,
    "gfx90a": 65536,
    "gfx942": 65536,
    "gfx950": 163840,
}
# Architectures whose products accumulate in tensor memory.
TENSOR_MEMORY = ("100", "103")
# Counted in the PTX or the AMD assembly; a pattern that an architecture lacks counts zero.
INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "mma": r"(?<!g)mma\.sync",
    "mfma": r"\bv_mfma",
    "tma": r"cp\.async\.bulk\.tensor",
    "cp_async": r"cp\.async\.c[ag]\.",
    "ldg128": r"ld\.global\S*\.v(?:4\.b32|2\.b64)|global_load_dwordx4|buffer_load_dwordx4",
    "stg128": r"st\.global\S*\.v(?:4\.b32|2\.b64)|global_store_dwordx4|buffer_store_dwordx4",
}


# An instruction that writes to the memory of the GPU, in PTX or AMD assembly.
WRITES = re.compile(
    r"\b(?:st|red|atom)\.\S*global|cp\.(?:reduce\.)?async\.bulk\S*global\.shared"
    r"|\b(?:global|buffer|flat)_(?:store|atomic)"
)
# Triton 3.6 does so for sm_100 if accumulators do not fit in tensor memory.
EMPTY = "the compiler left no instruction that writes a result"
STAGES = ("ttir", "ttgir", "llir", "ptx", "sass")
FIGURES = ("registers", "spill_stores", "spill_loads", "shared_bytes", "fits", "warps", "stages")


class Offline(DriverBase):
    """A driver that answers the compiler for a GPU that is not here."""

    def __init__(self, arch: str):
        super().__init__()
        if arch.startswith("gfx"):
            self.target = GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
        else:
            self.target = GPUTarget("cuda", int(arch), 32)

    @classmethod
    def is_active(cls):
        return False

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def map_python_to_cpp_type(self, ty):
        return ty_to_cpp(ty)

    def get_active_torch_device(self):
        raise RuntimeError("a build has no GPU to run on")

    def get_benchmarker(self):
        raise RuntimeError("a build has no GPU to time on")


def compile(launch: Launch, arch: str):
    """The compiled kernel of a launch, from the compiler's cache where it can."""
    triton.runtime.driver.set_active(Offline(arch))
    # The kernel remembers what it compiled by device, not by target.
    launch.kernel.device_caches.clear()
    # A failing assembler prints the whole program.
    with contextlib.redirect_stdout(io.StringIO()):
        return launch.kernel.warmup(grid=(1,), **launch.arguments)


def stages(launch: Launch, arch: str) -> dict[str, str]:
    """The program of a launch at each stage of its way to an NVIDIA GPU; none if it does not build.

    Without source locations, which name folders of this machine.
    """
    try:
        kernel = compile(launch, arch)
    except Exception:
        return {}
    # Gluon begins where the layouts are known.
    first = 0 if STAGES[0] in kernel.asm else 1
    return {stage: _without_places(kernel.asm[stage]) for stage in STAGES[first:]}


def _without_places(text: str) -> str:
    lines = text.splitlines(keepends=True)
    kept = "".join(line for line in lines if not re.match(r"#loc\d* = ", line))
    return re.sub(r" loc\(#loc\d*\)", "", kept)


def row(launch: Launch, arch: str) -> dict[str, object]:
    """The row of a launch in the build's table."""
    identity = {
        "kernel": launch.name,
        "arch": arch,
        "config": launch.config,
        "default": launch.default,
        "dtype": launch.dtype,
    }
    try:
        kernel = compile(launch, arch)
    except Exception as error:
        nothing = dict.fromkeys(FIGURES) | {"instructions": {}, "sha256": "", "text_sha256": ""}
        return identity | {"status": "unsupported", "reason": root(error)} | nothing
    limit = SHARED_BYTES.get(arch)
    figures = _amd(kernel) if arch.startswith("gfx") else _nvidia(kernel)
    text = kernel.asm.get("ptx") or kernel.asm["amdgcn"]
    meta = kernel.metadata
    figures |= {
        "shared_bytes": meta.shared,
        "fits": None if limit is None else meta.shared <= limit,
        "warps": meta.num_warps,
        "stages": meta.num_stages,
        "instructions": {name: len(re.findall(p, text)) for name, p in INSTRUCTIONS.items()},
        "sha256": hashlib.sha256(kernel.kernel).hexdigest(),
        "text_sha256": same.text_sha256(text, launch.name),
    }
    said = ("ok", "") if WRITES.search(text) else ("unsupported", EMPTY)
    return identity | dict(zip(("status", "reason"), said, strict=True)) | figures


def _nvidia(kernel) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    # Registers are spilled to the stack: without one there is nothing to look for.
    stores, loads = _spills(kernel) if stack else (0, 0)
    return {"registers": registers, "spill_stores": stores, "spill_loads": loads}


def _spills(kernel) -> tuple[int, int]:
    """Bytes stored and loaded, by assembling the PTX once more and asking for the statistics."""
    arch = kernel.metadata.target.arch
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        name = f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}"
        tool = "ptxas_blackwell" if arch >= 100 else "ptxas"
        said = _tool(tool, "-v", name, file.name, "-o", "/dev/null")
    return tuple(
        int(re.search(rf"(\d+) bytes spill {kind}", said)[1]) for kind in ("stores", "loads")
    )


def _amd(kernel) -> dict[str, int]:
    def note(key):
        return int(re.search(rf"\.{key}:\s*(\d+)", kernel.asm["amdgcn"])[1])

    # The assembler counts spilled registers, a load and a store of four bytes for each lane.
    spilled = 4 * note("vgpr_spill_count")
    return {"registers": note("vgpr_count"), "spill_stores": spilled, "spill_loads": spilled}


def _tool(name: str, *arguments: str) -> str:
    path = getattr(triton.knobs.nvidia, name).path
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def root(error: BaseException) -> str:
    """The message of the first cause; Triton's own begins with the source, so its last line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    located = hasattr(error, "error_message")
    line = (lines[-1] if located else lines[0]) if lines else type(error).__name__
    return line[:REASON_LENGTH]

"""Compile attention's kernels for Hopper without a GPU; print what their binaries hold, as JSON.

`python -m tests.support.hopper_build` runs apart from the tests, in which kernels are interpreted.
"""

import json
import re
import subprocess
import tempfile

import torch
import triton

from harness.build import compiler
from harness.build.recorder import Launch, recorded
from kernels.attention_details import backward_hopper, forward_hopper

ROWS = 4096


def launches(d: int, left: int | None, right: int | None) -> list[tuple[str, Launch]]:
    """Return the launches of both passes for heads of d, each with a name."""
    q, k, v, out, dout = (
        torch.empty(1, 8, ROWS, d, dtype=torch.bfloat16, device="meta") for _ in range(5)
    )
    lse = torch.empty(1, 8, ROWS, device="meta")
    causal, found = right is not None, []
    with recorded() as calls:
        forward_hopper.forward_hopper(
            q, k, v, out, lse, lse, 0.1, left, right, forward_hopper.choose(ROWS, d, causal)
        )
        backward_hopper.backward_hopper(
            q, k, v, out, lse, dout, None, 0.1, left, right, backward_hopper.choose(d, causal)
        )
    for kernel, arguments, grid in calls:
        launch = Launch(kernel, arguments, None, None, "bfloat16", grid=grid)
        if launch.name.endswith("_hopper_kernel"):
            found.append((f"{launch.name} {d} {left} {right}", launch))
    return found


def described(launch: Launch) -> dict[str, object]:
    """Return the row of a launch, with the waits, the steps of its loops and the remarks of ptxas.

    The loops are the innermost ones that have products. Each is a list of its machine instructions
    of four kinds in their order: "product", "exp", "wait 0" and "wait 1". The number is that of the
    products that may stay in flight.
    """
    kernel = compiler.compile(launch, "90")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        sass = _tool("cuobjdump", "-sass", file.name)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        said = _tool("ptxas", "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null")
    return compiler.row(launch, "90") | {
        "loops": _loops(sass),
        "serialized": len(re.findall(r"serialized", said)),
    }


def _loops(sass: str) -> list[list[str]]:
    """The steps of the innermost loops that have products."""
    lines = [
        (int(found[1], 16), found[2])
        for found in (re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", x) for x in sass.splitlines())
        if found
    ]
    number = {address: index for index, (address, _) in enumerate(lines)}
    spans = []
    for index, (_, text) in enumerate(lines):
        jump = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
        begin = number.get(int(jump[1], 16), index) if jump else index
        if begin < index and any("HGMMA" in x for _, x in lines[begin:index]):
            spans.append((begin, index))
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [_steps([text for _, text in lines[begin:end]]) for begin, end in inner]


def _steps(texts: list[str]) -> list[str]:
    kinds = {
        "product": r"HGMMA",
        "exp": r"MUFU\.EX2",
        "wait 0": r"DEPBAR\.LE gsb0, 0x0",
        "wait 1": r"DEPBAR\.LE gsb0, 0x1",
    }
    found = [next((k for k, p in kinds.items() if re.search(p, text)), "") for text in texts]
    return [kind for kind in found if kind]


def _tool(name: str, *arguments: str) -> str:
    path = getattr(triton.knobs.nvidia, name).path
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


if __name__ == "__main__":
    cases = [(d, *window) for d in (64, 128) for window in ((None, None), (None, 0), (1000, 0))]
    every = [each for case in cases for each in launches(*case)]
    print(json.dumps({name: described(launch) for name, launch in every}))

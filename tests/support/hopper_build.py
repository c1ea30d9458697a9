"""Compile attention's kernels for Hopper without a GPU; print what their binaries hold, as JSON.

`python -m tests.support.hopper_build dense` (`sparse`, `packed`) runs apart from the tests, in
which kernels are interpreted.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from unittest import mock

import torch
import triton
from triton.backends.nvidia import compiler as nvidia_compiler

from harness.build import compiler
from harness.build.recorder import Launch, recorded
from kernels.attention_details import (
    backward_hopper,
    forward_hopper,
    packed_backward_hopper,
    packed_forward_hopper,
)
from kernels.block_sparse_attention_details import backward_hopper as sparse_backward
from kernels.block_sparse_attention_details import forward_hopper as sparse_forward

ROWS = 4096


def built(which: str) -> dict[str, dict[str, object]]:
    """Return the rows of the kernels of a case, by name, from a process that compiles."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.hopper_build", which], capture_output=True, text=True,
        env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def steady(row: dict[str, object]) -> list[list[str]]:
    """Return the loops over tiles of a row: they wait for all products once."""
    return [x for x in row["loops"] if "wait 1" in x and x.count("wait 0") == 1]


def check(name: str, row: dict[str, object]) -> None:
    """Assert that a kernel multiplies on Hopper's tensor cores and waits where it is told."""
    assert row["status"] == "ok" and row["fits"] and not row["serialized"], name
    assert row["instructions"]["wgmma"] and row["instructions"]["tma"], name
    assert not row["instructions"]["mma"], name
    # A wait after each product would be the assembler's.
    assert len(steady(row)) >= 2, name


def _tensors(d: int, rows: int = ROWS) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Five tensors of heads of d, and a number for each row."""
    made = [torch.empty(1, 8, rows, d, dtype=torch.bfloat16, device="meta") for _ in range(5)]
    return made, torch.empty(1, 8, rows, device="meta")


def dense(
    d: int, left: int | None, right: int | None, rows: int = ROWS, more: int = 0
) -> list[tuple[str, Launch]]:
    """Return the launches of both passes for heads of d, each with a name.

    more: keys beyond as many as rows.
    """
    (q, k, v, out, dout), lse = _tensors(d, rows)
    k, v = (x.new_empty(1, 8, rows + more, d) for x in (k, v))
    causal, square = right is not None, forward_hopper.ends_in_square(rows, rows + more, right)
    with recorded() as calls:
        forward_hopper.forward_hopper(
            q,
            k,
            v,
            out,
            lse,
            lse,
            0.1,
            left,
            right,
            forward_hopper.choose(rows + more, d, causal, square),
        )
        backward_hopper.backward_hopper(
            q, k, v, out, lse, dout, None, 0.1, left, right, backward_hopper.choose(d, causal)
        )
    return _named(calls, f"{d} {left} {right} {rows} {more}")


def sparse(d: int, causal: bool) -> list[tuple[str, Launch]]:
    """Return the launches of both passes over a block mask, each with a name."""
    (q, k, v, out, dout), lse = _tensors(d)
    blocks = ROWS // 128
    lists = [
        torch.empty(shape, dtype=torch.int32, device="meta")
        for shape in ((1, 1, blocks + 1), (blocks * blocks,), (1, 1, blocks))
    ]
    options = 128, 0.1, causal
    with recorded() as calls:
        sparse_forward.forward_hopper(
            q, k, v, out, lse, lse, *lists, *options, sparse_forward.choose(d, causal)
        )
        sparse_backward.backward_hopper(
            q, k, v, out, lse, dout, None, *lists, *options, sparse_backward.choose(d, causal)
        )
    return _named(calls, f"{d} {causal}")


def packed(
    d: int,
    left: int | None,
    right: int | None,
    count: int,
    heads: int,
    longest: int = 4096,
    same: bool = False,
) -> list[tuple[str, Launch]]:
    """Return the launches of both passes over so many packed sequences, each with a name.

    heads: of keys. longest: at least the keys of a sequence. same: whether rows and keys have the
    same boundaries.
    """
    tensors, lse = _tensors(d)
    q, k, v, out, dout = (x[0].transpose(0, 1) for x in tensors)
    k, v = k[:, :heads], v[:, :heads]
    ends, causal = torch.empty(count + 1, dtype=torch.int32, device="meta"), right is not None
    options = ends, ends, 0.1, left, right
    square = packed_forward_hopper.ends_in_squares(q, k, same, right)
    with recorded() as calls:
        packed_forward_hopper.packed_forward_hopper(
            q,
            k,
            v,
            out,
            lse[0],
            lse[0],
            *options,
            len(k),
            square,
            packed_forward_hopper.choose(longest, longest, d, causal, square),
        )
        packed_backward_hopper.packed_backward_hopper(
            q,
            k,
            v,
            out,
            lse[0],
            dout,
            None,
            *options,
            len(q),
            packed_backward_hopper.choose_packed(longest, d, causal),
        )
    return _named(calls, f"{d} {left} {right} {count} {heads} {longest} {same}")


def _named(calls: list, words: str) -> list[tuple[str, Launch]]:
    """The launches of kernels for Hopper, each with its name and these words."""
    launches = [
        Launch(kernel, arguments, None, None, "bfloat16", grid=grid)
        for kernel, arguments, grid in calls
    ]
    return [(f"{x.name} {words}", x) for x in launches if x.name.endswith("_hopper_kernel")]


def described(launch: Launch) -> dict[str, object]:
    """Return the row of a launch, with the waits, the steps of its loops and the remarks of ptxas.

    The loops are the innermost ones that have products. Each is a list of its machine instructions
    of five kinds in their order: "product", "exp", "mask", "wait 0" and "wait 1". The number is
    that of the products that may stay in flight.
    """
    kernel, said = _assembled(launch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        words = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        sass = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return compiler.row(launch, "90") | {
        "loops": _loops(sass),
        "serialized": len(re.findall(r"serialized", said)),
    }


def _assembled(launch: Launch):
    """Return the compiled kernel of a launch, and the remarks of ptxas.

    Triton prints them, but not for a kernel of its cache.
    """
    said: list[str] = []
    knobs = triton.knobs
    with (
        knobs.nvidia.scope(),
        knobs.compilation.scope(),
        mock.patch.object(nvidia_compiler, "print", said.append, create=True),
    ):
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        kernel = compiler.compile(launch, "90")
    remarks = "".join(said)
    assert launch.name in remarks, f"ptxas said nothing of {launch.name}"
    return kernel, remarks


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
        "mask": r"FSEL .*-INF",
        "wait 0": r"DEPBAR\.LE gsb0, 0x0",
        "wait 1": r"DEPBAR\.LE gsb0, 0x1",
    }
    found = [next((k for k, p in kinds.items() if re.search(p, text)), "") for text in texts]
    return [kind for kind in found if kind]


WINDOWS = ((None, None), (None, 0), (1000, 0))
CASES = {
    # Short sequences have tiles of their own, if a diagonal ends in no square.
    "dense": lambda d: [*(dense(d, *window) for window in WINDOWS), dense(d, None, 0, 512, 8)],
    # Few sequences have an order of their own. Tiles are those of one, four and eight heads, and
    # of one head with a square on the diagonal.
    "packed": lambda d: [
        packed(d, *WINDOWS[0], 8, 8),
        packed(d, *WINDOWS[-1], 80, 2),
        packed(d, None, 0, 8, 1, 512),
        packed(d, *WINDOWS[1], 8, 8, same=True),
    ],
    "sparse": lambda d: [sparse(d, causal) for causal in (False, True)],
}

if __name__ == "__main__":
    every = [each for d in (64, 128) for case in CASES[sys.argv[1]](d) for each in case]
    print(json.dumps({name: described(launch) for name, launch in every}))

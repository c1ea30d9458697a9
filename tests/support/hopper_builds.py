"""Compile the Hopper form of the product for sm_90 and print a JSON row for each case.

A process of its own: the tests run in one whose kernels are interpreted. A case is whether a and b
are stored by columns, the parts of the epilogue, and a configuration.
"""

import dataclasses
import json
import re
import sys
from collections import Counter

import torch

from harness.build import compiler, recorder
from kernels.matmul_details import batches, hopper
from kernels.matmul_details.launch import scale_arguments

SIZE = 4096


def row(a_turned, b_turned, parts, config):
    batch = (8, 1) if "batched" in parts else ()
    dtype = torch.float32 if {"float32", "added"} & {*parts} else torch.bfloat16
    factor = torch.float8_e4m3fn if "float8" in parts else torch.bfloat16

    def empty(turned=False, over=batch, dtype=torch.bfloat16):
        made = torch.empty((*over, SIZE, SIZE), dtype=dtype, device="meta")
        return made.mT if turned else made

    def given(part, tensor):
        return tensor if part in parts else None

    def scales(name, lines):
        shape = lines if f"{name}_lines" in parts else (1, 1) if f"{name}_one" in parts else None
        return shape and torch.empty(shape, device="meta").expand(lines)

    of_b = (1, 4) if batch else ()
    whole = torch.broadcast_shapes(batch, of_b)
    made = {
        "by_row": {
            "a": empty(a_turned, dtype=factor), "residual": given("residual", empty(over=whole)),
            "out": empty(over=whole, dtype=dtype), "pre": given("kept", empty(over=whole)),
            "up_pre": given("kept", given("gated", empty(over=whole))),
            "a_scale": scales("a", (SIZE, 1)),
        },
        "by_column": {
            "b": empty(b_turned, of_b, factor),
            "up": given("gated", empty(b_turned, of_b, factor)),
            "b_scale": scales("b", (1, SIZE)),
        },
    }  # fmt: skip
    for group in made.values():
        for name, x in group.items():
            group[name] = x if x is None else x.expand(*whole, *x.shape[-2:])
    activation = next((p for p in parts if p in ("leaky_relu", "gelu", "silu", "tanh")), "none")
    bias = given("bias", torch.empty(SIZE, dtype=torch.bfloat16, device="meta"))
    epilogue = {
        "bias_ptr": bias, "up_bias_ptr": bias if "gated" in parts else None, "scale": 1.0,
        "SCALED": False, "ACTIVATION": activation, "PRECISE": dtype == torch.float32,
        "ACCUMULATE": "added" in parts,
    }  # fmt: skip
    with recorder.recorded() as calls:
        for walk in batches.walks(tuple(whole), **made):
            walk = dataclasses.replace(walk, parted="parted" in parts)
            hopper.launch_product(walk, epilogue | scale_arguments(walk), config, 132)
    [(kernel, arguments, grid)] = calls
    launch = recorder.Launch(kernel, arguments, None, None, str(dtype), grid=grid)
    found = compiler.row(launch, "90")
    texts = compiler.compile(launch, "90").asm
    sass, added = texts["sass"], len(re.findall(r"cp\.reduce\.async\.bulk\.tensor", texts["ptx"]))
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", sass)
    return found | {
        "waits": waits, "added": added, "products": len(re.findall(r"\b[HQ]GMMA\.", sass)),
        "loads": len(re.findall(r"\bLDG\.", sass)), "epilogue": _epilogue(sass),
    }  # fmt: skip


def _epilogue(sass: str) -> dict[str, int]:
    """Return how often each machine instruction stands in the epilogue of a multiplying group.

    It lies between the wait for all products of a tile and the last store.
    """
    text = re.split("[HQ]GMMA", sass.split("WARPGROUP.DEPBAR.LE gsb0, 0x0")[1])[0]
    text = text[: text.rindex("UTMACMDFLUSH")]
    return Counter(re.findall(r"\t(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)", text))


if __name__ == "__main__":
    print(json.dumps([row(*each) for each in json.loads(sys.argv[1])]))

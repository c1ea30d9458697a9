"""Check the binaries of the Hopper form of the product; no GPU is needed."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.matmul_details import hopper

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PARTS = [
    ("bias",), ("bias", "leaky_relu"), ("bias", "gelu"), ("bias", "tanh"), ("residual",),
    ("gated", "silu"), ("bias", "gelu", "kept", "residual"), ("float32",), ("added",), ("batched",),
    ("batched", "float32", "parted"),
    ("batched", "bias", "gated", "silu", "kept", "residual"),
]  # fmt: skip
FIRST, *OTHERS = (dict(config) for config in hopper.CONFIGS)
CASES = [(*turned, (), FIRST) for turned in itertools.product((False, True), repeat=2)]
CASES += [(False, False, parts, FIRST) for parts in PARTS]
CASES += [(True, True, ("gated", "residual"), FIRST)]
# Tensor cores take items of 8 bits in runs along K only: b by columns.
WIDE = FIRST | {"BLOCK_K": 2 * FIRST["BLOCK_K"]}
SCALES = list(itertools.product(("a_lines", "a_one"), ("b_lines", "b_one")))
CASES += [(False, True, ("float8", *scales), WIDE) for scales in SCALES]
CASES += [(False, True, ("float8", *scales, "bias", "gelu"), WIDE) for scales in SCALES[::3]]
CASES += [(False, True, (), config) for config in OTHERS]
GROUPS = hopper.GROUPS.value


@pytest.fixture(scope="module")
def rows():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"
    command = [sys.executable, "-m", "tests.support.hopper_builds", json.dumps(CASES)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_a_binary_multiplies_with_one_product_under_way_and_does_not_spill(rows, index):
    row, (_, _, parts, config) = rows[index], CASES[index]
    assert (row["status"], row["reason"], row["fits"]) == ("ok", "", True)
    assert row["spill_stores"] == row["spill_loads"] == 0
    # The first product of a tile and that of the loop, in steps of 32 bytes of K and of 64 rows.
    inner = 32 if "float8" in parts else 16
    steps = config["BLOCK_K"] // inner * (config["BLOCK_M"] // GROUPS // 64)
    assert row["products"] == row["instructions"]["wgmma"] == 2 * GROUPS * steps
    # The assembler adds a wait for all products if it cannot see that operands were waited for.
    # The only such waits are at the end of a tile.
    assert row["waits"].count("0x0") == GROUPS and set(row["waits"]) == {"0x0", "0x1"}
    columns = config["BLOCK_N"] // (2 if "gated" in parts else 1)
    blocks = columns * (4 if {"float32", "added"} & {*parts} else 2) // 128
    copied = GROUPS + 1 + ("gated" in parts) + GROUPS * blocks * ("residual" in parts)
    kept = ("kept" in parts) * (1 + ("gated" in parts))
    assert row["added"] == GROUPS * blocks * ("added" in parts)
    assert row["instructions"]["tma"] + row["added"] == copied + GROUPS * blocks * (1 + kept)


@pytest.mark.parametrize("scales", SCALES, ids=str)
def test_a_group_loads_a_factor_of_one_number_once(rows, scales):
    row = rows[CASES.index((False, True, ("float8", *scales), WIDE))]
    # A thread holds entries of two rows and of a quarter of the columns.
    loads = {"a_lines": 2, "b_lines": WIDE["BLOCK_N"] // 4, "a_one": 1, "b_one": 1}
    assert row["loads"] == GROUPS * sum(loads[each] for each in scales)
    # Two such factors are one product with scale, so an entry has one multiplication.
    entries = WIDE["BLOCK_M"] * WIDE["BLOCK_N"] // GROUPS // 128
    assert row["epilogue"]["FMUL"] == entries * (1 if scales == ("a_one", "b_one") else 2)


# Machine instructions of an epilogue for an entry of a tile; docs/lab/matmul.md has what they cost.
MOST = {(): 1.6, ("bias",): 3.6, ("bias", "leaky_relu"): 5.7, ("bias", "gelu"): 12.5}


@pytest.mark.parametrize("parts", MOST)
def test_an_epilogue_is_short_and_waits_for_no_load(rows, parts):
    index = CASES.index((False, False, parts, FIRST))
    counts = rows[index]["epilogue"]
    entries = FIRST["BLOCK_M"] * FIRST["BLOCK_N"] // GROUPS // 128
    assert sum(counts.values()) <= MOST[parts] * entries
    # Biases travel beneath the products.
    assert not counts.get("LDG")
    assert counts.get("MUFU", 0) == entries * ("gelu" in parts)

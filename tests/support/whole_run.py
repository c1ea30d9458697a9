"""Make a run with all that a measurement holds today; `synthetic` has two passes and the grid only.

`swiglu` and `rms_norm` have `both` besides the two passes, `cross_entropy` has it instead of the
second, and `matmul` has one pass. Each op has drawn shapes, in a column `set`. Processes keep
offsets, and events timed some calls. Several processes ran each implementation of `rms_norm`.
"""

import zlib
from pathlib import Path

import numpy as np

from tests.support import synthetic

OPS = ("swiglu", "rms_norm", "cross_entropy", "matmul")
EVENTS = "events: the host takes part"
OFFSET, TAILS = 0.003, 5
PROCESSES = {"rms_norm": 3}
# In this cell of `both` ours passes only one of two floors. It is faster than 0.8 of a floor that
# leaves out written bytes. It is slower than 0.8 of one that also leaves out bytes that the
# backward pass finds in the cache.
NEAR_LIGHT, NEAR_LIGHT_US = ("swiglu", "M8192-N14336", "bfloat16", "both"), 315.0
SUMS = ("device_us", "call_us", "bytes_read", "bytes_written", "flops", "peak_mem_bytes")


def write(folder: Path) -> Path:
    """Write raw rows with sidecars, and the description of a machine, into `folder`."""
    for op in OPS:
        synthetic.write_raw(folder, op, rows_of(op))
    synthetic.write_json(folder / "environment.json", synthetic.environment())
    return folder


def rows_of(op: str) -> list[dict]:
    rows = synthetic.rows_of("softmax" if op == "cross_entropy" else op, seed=3)
    if op == "cross_entropy":
        rows = [row | {"op": op, "family": op} for row in rows]
    rows = [row for row in rows if row["pass"] != "both"]
    rows += _both(rows)
    if op == "cross_entropy":
        rows = [row for row in rows if row["pass"] != "backward"]
    rows = [row | {"set": "grid"} for row in rows] + _drawn(rows)
    many = range(PROCESSES.get(op, 1))
    rows = [row | {"process": n} for row in rows for n in (many if row["device_us"] else (0,))]
    return [_told(row) for row in rows]


def _both(rows: list[dict]) -> list[dict]:
    """The time of `both` is a little less than the sum of the two passes."""
    names = ("case", "dtype", "impl", "block")
    forward = {tuple(row[n] for n in names): row for row in rows if row["pass"] == "forward"}
    found = []
    for row in rows:
        if row["pass"] == "backward":
            first, both = forward[tuple(row[name] for name in names)], row | {"pass": "both"}
            for name in SUMS if row["device_us"] else SUMS[2:5]:
                both[name] = float(first[name]) + float(row[name])
            for name in SUMS[2:]:
                both[name] = int(both[name]) if both[name] != "" else ""
            found.append(both)
    if near := [row for row in found if _cell(row) == NEAR_LIGHT]:
        ours = np.median([row["device_us"] for row in near if row["impl"] == "ours"])
        for row in near:
            row["device_us"] *= NEAR_LIGHT_US / ours
    return found


def _drawn(rows: list[dict]) -> list[dict]:
    """Return two shapes that no grid has, with others' times; `both` only if it is the one pass."""
    cases = dict.fromkeys(row["case"] for row in rows if row["dtype"] == "bfloat16")
    alone = not any(row["pass"] == "backward" for row in rows)
    return [
        row | {"set": "drawn", "case": row["case"] + "7"}
        for row in rows
        if row["case"] in list(cases)[:2] and row["dtype"] == "bfloat16"
        if alone or row["pass"] != "both"
    ]


def _told(row: dict) -> dict:
    """Return the row with the offset of its process, and with the clock if that is events."""
    if not row["device_us"]:
        return row
    further = [f"process {row['process']}"] if row["process"] else []
    place = zlib.crc32(" ".join((*_cell(row), row["impl"], *further)).encode())
    factor = 1.0
    if _cell(row) != NEAR_LIGHT:
        factor = np.exp(OFFSET * np.random.default_rng(place).standard_t(TAILS))
    events = (row["impl"], row["dtype"]) == ("torch_compile", "float16")
    more = {"reason": EVENTS} if events and row["pass"] != "forward" else {}
    return row | {"device_us": f"{float(row['device_us']) * factor:.4f}"} | more


def _cell(row: dict) -> tuple[str, ...]:
    return row["op"], row["case"], row["dtype"], row["pass"]

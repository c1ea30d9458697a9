"""The least time of a call, and the rule for a time that is impossible.

A time below the floor by more than its uncertainty is a fault of the measurement. The call did not
do its work, or the clock missed a part of it. The same rule holds for a block while it is measured
and for the median of a cell in the summary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# A time below this share of the floor is impossible. The floor is uncertain because the ceiling of
# a dtype is the rate of one large product at one moment's clock.
FASTEST = 0.8
# Tensor cores multiply in float32's accuracy as three products of TF32 (Ootomo and Yokota, 2022),
# which has half the rate of bfloat16. Fewer products are less accurate.
BFLOAT16_FOR_FLOAT32 = 6
# Bytes that a call writes may still lie in the L2 when its time ends. In a call of both passes, the
# backward pass may find in the L2 bytes that the forward pass has read. A row of a run does not
# tell the size of the L2, and no GPU of this project has more than this.
CACHE_BYTES = 128 << 20


@dataclass(frozen=True)
class Work:
    """The bytes and FLOPs that a call cannot avoid, its dtype and its pass."""

    bytes_read: float
    bytes_written: float
    flops: float
    dtype: str
    pass_: str


def floor_us(work: Work, ceilings: Mapping[str, float], cached: int = 0) -> tuple[float, str]:
    """Return the least time that the ceilings allow, in µs, and its bound: "memory" or "compute".

    ceilings: GB/s of "read" and "write", TFLOP/s by dtype. Returns 0.0 and "" if they say nothing.
    cached: bytes that the L2 may keep from memory, written or read again.
    """
    memory = compute = 0.0
    if "read" in ceilings and "write" in ceilings:
        written = max(0.0, work.bytes_written - cached)
        read = max(0.0, work.bytes_read - (cached if work.pass_ == "both" else 0))
        memory = read / ceilings["read"] + written / ceilings["write"]
    if work.dtype in ceilings:
        compute = work.flops / _rate(work.dtype, ceilings)
    # Bytes over GB/s are ns; FLOPs over TFLOP/s are ps.
    floor = max(memory / 1e3, compute / 1e6)
    return floor, ("compute" if compute / 1e6 > memory / 1e3 else "memory") if floor else ""


def _rate(dtype: str, ceilings: Mapping[str, float]) -> float:
    """Return the TFLOP/s of products of a dtype by the fastest units that are accurate enough."""
    if dtype != "float32":
        return ceilings[dtype]
    return max(ceilings[dtype], ceilings.get("bfloat16", 0.0) / BFLOAT16_FOR_FLOAT32)


def impossible(time_us: float, work: Work, ceilings: Mapping[str, float]) -> str:
    """Return why a time is impossible, "" if it is possible."""
    least, _ = floor_us(work, ceilings, CACHE_BYTES)
    return f"faster than the floor of {least:.2f} us" if time_us < FASTEST * least else ""

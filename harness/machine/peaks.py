"""The programs that reach for the ceilings of a GPU: streams over memory and dense products."""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from harness import status
from harness.machine import nvml
from harness.machine.timer import Timer, watch

BYTES = 4 * 2**30
SHARE_OF_MEMORY = 1 / 8
BLOCK, ROUNDS = 4096, 8
WARM_UP, REPEATS = 3, 15
# Square and wide products: the best size differs between GPUs, and with their power limits.
PRODUCTS = {
    torch.bfloat16: ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 4096, 14336)),
    torch.float16: ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 4096, 14336)),
    torch.float32: ((4096, 4096, 4096), (8192, 4096, 4096)),
}
FP8 = torch.float8_e4m3fn
FP8_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 4096, 14336))
LAUNCHES = 200


class Ceiling(NamedTuple):
    """One row of ceilings.csv; sm_mhz: the SM clock in the midst of it, None where unknown."""

    quantity: str
    unit: str
    value: float
    sm_mhz: int | None


@triton.jit
def read_stream(x_ptr, out_ptr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    offsets = program * (BLOCK * ROUNDS) + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in range(ROUNDS):
        total += tl.load(x_ptr + offsets)
        offsets += BLOCK
    tl.store(out_ptr + program, tl.sum(total))


@triton.jit
def write_stream(out_ptr, value, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.zeros([BLOCK], dtype=tl.float32) + value)


@triton.jit
def copy_stream(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets))


def measure() -> list[Ceiling]:
    """The ceilings of the current CUDA device; see `harness.machine.ceilings`."""
    sampler = nvml.NvmlSampler()
    return [*_bandwidths(sampler), *_products(sampler), *_fp8_products(sampler), _launch()]


def _bandwidths(sampler: nvml.NvmlSampler) -> Iterator[Ceiling]:
    """GB/s on random float32, far larger than any cache; a copy counts both directions."""
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    granule = BLOCK * ROUNDS
    count = int(min(BYTES, memory * SHARE_OF_MEMORY)) // 4 // granule * granule
    x = torch.randn(count, device="cuda")
    y = torch.empty_like(x)
    sums = torch.empty(count // granule, device="cuda")
    tiles = (count // BLOCK,)
    forms = {
        "read": (
            lambda: x.sum(),
            lambda: read_stream[(count // granule,)](x, sums, BLOCK=BLOCK, ROUNDS=ROUNDS),
            lambda: read_stream[tiles](x, y, BLOCK=BLOCK, ROUNDS=1),
        ),
        "write": (
            lambda: y.fill_(1.5),
            lambda: write_stream[tiles](y, 1.5, BLOCK=BLOCK),
        ),
        "copy": (
            lambda: y.copy_(x),
            lambda: copy_stream[tiles](x, y, BLOCK=BLOCK),
        ),
    }
    for quantity, programs in forms.items():
        moved = count * 4 * (2 if quantity == "copy" else 1)
        yield _best(quantity, "GB/s", 1e9, [(moved, program) for program in programs], sampler)


def _products(sampler: nvml.NvmlSampler) -> Iterator[Ceiling]:
    """TFLOP/s of dense products of normal numbers; float32 without the reduced tf32."""
    torch.set_float32_matmul_precision("highest")
    for dtype, shapes in PRODUCTS.items():
        programs = []
        for m, n, k in shapes:
            a = torch.randn(m, k, device="cuda").to(dtype)
            b = torch.randn(k, n, device="cuda").to(dtype)
            programs.append((2 * m * n * k, lambda a=a, b=b: torch.matmul(a, b)))
        yield _best(_name(dtype), "TFLOP/s", 1e12, programs, sampler)


def _fp8_products(sampler: nvml.NvmlSampler) -> Iterator[Ceiling]:
    """The same in float8, both factors scaled by one; none where device or library lack it."""
    one = torch.ones((), device="cuda")
    try:
        programs = []
        for m, n, k in FP8_SHAPES:
            a = torch.randn(m, k, device="cuda").to(FP8)
            # The matrix units want the second factor stored by columns.
            b = torch.randn(n, k, device="cuda").to(FP8).t()
            for fast in (True, False):
                programs.append(
                    (
                        2 * m * n * k,
                        lambda a=a, b=b, fast=fast: torch._scaled_mm(
                            a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
                        ),
                    )
                )
        ceiling = _best(_name(FP8), "TFLOP/s", 1e12, programs, sampler)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        print(f"no ceiling for {_name(FP8)}: {status.reason(error)}", file=sys.stderr)
    else:
        yield ceiling


def _launch() -> Ceiling:
    """The least `device_us` that the timer can show: one launch of a kernel with no work, in µs."""
    timer = Timer()
    with torch.cuda.stream(timer.stream):
        x = torch.zeros(1, device="cuda")
        x.add_(1)
        replay, _ = timer.capture(lambda: x.add_(1))
    device_us, reading = timer.cold([replay], LAUNCHES)
    return Ceiling("launch", "us", round(device_us, 3), reading.get("sm_mhz"))


def _best(
    quantity: str,
    unit: str,
    scale: float,
    programs: Sequence[tuple[float, Callable[[], object]]],
    sampler: nvml.NvmlSampler,
) -> Ceiling:
    """The highest rate of several programs, each with its amount of work."""
    found = []
    for amount, program in programs:
        seconds, sm_mhz = _median_s(program, sampler)
        found.append((amount / seconds, sm_mhz))
    rate, sm_mhz = max(found, key=lambda pair: pair[0])
    return Ceiling(quantity, unit, round(rate / scale, 1), sm_mhz)


def _median_s(program: Callable[[], object], sampler: nvml.NvmlSampler) -> tuple[float, int | None]:
    """The median GPU time of a program in seconds, and the SM clock meanwhile."""
    begin, end = ([torch.cuda.Event(enable_timing=True) for _ in range(REPEATS)] for _ in "be")
    for _ in range(WARM_UP):
        program()
    for a, b in zip(begin, end, strict=True):
        a.record()
        program()
        b.record()
    reading = watch(sampler, end[-1])
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(begin, end, strict=True)]
    return statistics.median(times) / 1e3, reading.get("sm_mhz")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

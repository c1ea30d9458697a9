"""The programs that reach for the ceilings of a GPU: streams over memory and dense products."""

import statistics
from collections.abc import Callable, Iterable

import torch
import triton
import triton.language as tl

from harness.timing import Timer

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
LAUNCHES = 200


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


def measure() -> list[tuple[str, str, float]]:
    """(quantity, unit, value) of the current CUDA device; see `harness.ceilings`."""
    return [*_bandwidths(), *_products(), ("launch", "us", round(_launch(), 3))]


def _bandwidths() -> Iterable[tuple[str, str, float]]:
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
        best = min(_median_s(program) for program in programs)
        yield quantity, "GB/s", round(moved / best / 1e9, 1)


def _products() -> Iterable[tuple[str, str, float]]:
    """TFLOP/s of dense products of normal numbers; float32 without the reduced tf32."""
    torch.set_float32_matmul_precision("highest")
    for dtype, shapes in PRODUCTS.items():
        rates = []
        for m, n, k in shapes:
            a = torch.randn(m, k, device="cuda").to(dtype)
            b = torch.randn(k, n, device="cuda").to(dtype)
            seconds = _median_s(lambda a=a, b=b: torch.matmul(a, b))
            rates.append(2 * m * n * k / seconds / 1e12)
        yield str(dtype).removeprefix("torch."), "TFLOP/s", round(max(rates), 1)


def _launch() -> float:
    """The least `device_us` that the timer can show: one launch of a kernel with no work, in µs."""
    timer = Timer()
    with torch.cuda.stream(timer.stream):
        x = torch.zeros(1, device="cuda")
        x.add_(1)
        replay, _ = timer.capture(lambda: x.add_(1))
    return timer.cold([replay], LAUNCHES)[0]


def _median_s(program: Callable[[], object]) -> float:
    begin, end = ([torch.cuda.Event(enable_timing=True) for _ in range(REPEATS)] for _ in "be")
    for _ in range(WARM_UP):
        program()
    for a, b in zip(begin, end, strict=True):
        a.record()
        program()
        b.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(begin, end, strict=True)) / 1e3

"""Forward pass of layer norm and RMS norm for rows that no single program can keep.

Several programs hold a row, each the same columns of many rows, and take its statistics together
(`_exchange.py`); so each entry and each weight is read once. While a row is normalized the next
ones are on their way to shared memory. QuACK does the same with clusters, which Triton has none of.
"""

import torch
import triton
import triton.language as tl

from kernels._device import shared_bytes, sm_count
from kernels._exchange import parts_together, side_by_side
from kernels._tile import widened, zero_after
from kernels._tuned import Config, Configs

# The shortest row that several programs hold, and the most that hold one.
LONG_BYTES = 131073
MOST_HOLDERS = 64
# What a program holds of a row, of 16 warps: registers have it and the weights beside it.
HELD_BYTES = 65536
CANDIDATES = tuple(
    {"HOLDERS": holders, "STAGES": 3, "PER_SM": programs, "num_warps": warps}
    for holders in (2, 4, 8, 16, 32, 64)
    for warps, programs in ((8, 1), (8, 2), (16, 1))
)


def long_configs(family: str) -> Configs:
    """How many programs hold a row and what each fetches ahead, for the table of a family."""
    return Configs(_norm_long_kernel, CANDIDATES, _choose, _suits, family)


def _choose(n, itemsize, residual):
    # Two tensors are on their way where one is without a residual.
    holders = -(-n * itemsize * (1 + residual) // HELD_BYTES)
    return {
        "HOLDERS": max(2, 1 << (holders - 1).bit_length()), "STAGES": 3, "PER_SM": 1,
        "num_warps": 16,
    }  # fmt: skip


def _suits(candidate, n, itemsize, residual):
    """Whether a thread holds 64 or 128 bytes."""
    holders, _, _, warps = candidate.values()
    return n * itemsize // (32 * warps * holders) in (64, 128)


def long_groups(
    m: int, config: Config, device: torch.device, n: int, itemsize: int, residual: bool
) -> int:
    """How many rows are held at a time, each by programs of its own; 0 where none can be: it
    divides into no powers of two, or the device has too few multiprocessors."""
    holders, stages, programs, _ = config.values()
    held, uneven = n // holders, n % holders
    size = held * itemsize * (1 + residual) * (stages - 1)
    if uneven or held & (held - 1) or holders > MOST_HOLDERS:
        return 0
    if not side_by_side(device) or size > shared_bytes(device) // programs - 1024:
        return 0
    return min(m, programs * sm_count(device) // holders)


@triton.jit
def _norm_long_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr, slots_ptr,
    stride_xm, stride_rm, M, N, eps,
    CENTRED: tl.constexpr, BLOCK_N: tl.constexpr,
    HOLDERS: tl.constexpr, STAGES: tl.constexpr, PER_SM: tl.constexpr,
):  # fmt: skip
    holder = tl.program_id(0) % HOLDERS
    group = (tl.program_id(0) // HOLDERS).to(tl.int64)
    groups = tl.num_programs(0) // HOLDERS
    offs = holder * BLOCK_N + tl.arange(0, BLOCK_N)
    weight = tl.load(weight_ptr + offs)
    if CENTRED:
        bias = tl.load(bias_ptr + offs)
    share = tl.cdiv(M, groups)
    last = tl.minimum((group + 1) * share, M)
    for row in tl.range(group * share, last, num_stages=STAGES):
        x = tl.load(x_ptr + row * stride_xm + offs)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + row * stride_rm + offs)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
            tl.store(total_ptr + row * N + offs, x)
        slots = slots_ptr + row * (2 * HOLDERS)
        if CENTRED:
            mean = tl.sum(x.to(tl.float32), 0) / BLOCK_N
            apart = widened(x, zero_after(mean)) - mean
            square = tl.sum(apart * apart, 0)
            means, squares = parts_together(slots, holder, mean, square, HOLDERS)
            # The squares lie around the mean of their own columns (Chan, Golub and LeVeque, 1983).
            mean = tl.sum(means, 0) / HOLDERS
            means -= mean
            square = tl.sum(squares + BLOCK_N * means * means, 0)
            if stats_ptr is not None:
                tl.store(stats_ptr + M + row, mean, mask=holder == 0)
        else:
            wide = x.to(tl.float32)
            square = tl.sum(wide * wide, 0)
            squares, _ = parts_together(slots, holder, square, square, HOLDERS)
            square = tl.sum(squares, 0)
        rstd = tl.rsqrt(square / N + tl.cast(eps, tl.float32))
        if stats_ptr is not None:
            tl.store(stats_ptr + row, rstd, mask=holder == 0)
        zero = zero_after(rstd)
        y = widened(x, zero)
        if CENTRED:
            y = (y - mean) * rstd * widened(weight, zero) + widened(bias, zero)
        else:
            y = y * rstd * widened(weight, zero)
        tl.store(y_ptr + row * N + offs, y.to(y_ptr.dtype.element_ty))

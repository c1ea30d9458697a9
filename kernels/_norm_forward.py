"""Forward pass of layer norm and RMS norm, with or without a residual, for rows of any length.

A row is either kept in registers or walked twice, the second time out of a cache; HOLDERS of the
configuration decides, since which is faster depends on the length. Kept rows stay in the dtype in
which they came, in chunks, and are widened anew for each use: a second copy in float32 would
double the registers. The weights are loaded after the statistics, so that they hold no registers
before. The mean and the variance come from one pass over the deviations from the mean of the first
entries: that is near enough for nothing to cancel, and where it is far, the variance is large
(Chan, Golub and LeVeque, 1983, on shifted data). Rows that no single program can keep have several,
which take their sums together (`_exchange.py`); a walk would read them from memory again.
"""

import torch
import triton
import triton.language as tl

from kernels._exchange import parts_together, side_by_side, unsaid
from kernels._launch import launch
from kernels._layout import rows_of
from kernels._norm import check_norm
from kernels._plan import empty, planned
from kernels._tile import load_f32_hinted, store_as, widened, zero_after
from kernels._tuned import Configs

# The longest row that one program keeps in its registers.
ROW_BYTES = 131072
# The shortest row that is worth walking twice.
LOOP_BYTES = 4096
ACCESS_BYTES = 16
MOST_CHUNKS = 8
# The entries whose mean the others are set apart from, and how many of them a warp takes at a time.
HEAD = tl.constexpr(128)
LANES = tl.constexpr(32)
# (longest row in bytes, rows of a program, most elements of a chunk, programs that hold a row or 0
# where it is walked, warps)
SHORT_TILES = (
    (256, 8, 128, 1, 4),
    (512, 4, 256, 1, 4),
    (1024, 2, 512, 1, 4),
    (2048, 2, 1024, 1, 4),
    (4096, 1, 2048, 1, 4),
)
LONG_TILES = (
    *((ROW_BYTES * 2**power, 1, 4096, 4 * 2**power, 8) for power in (1, 2, 3, 4)),
    (float("inf"), 1, 4096, 0, 16),
)
TILES = (
    *SHORT_TILES,
    (8192, 1, 4096, 0, 8),
    (16384, 1, 2048, 1, 4),
    (32768, 1, 4096, 0, 16),
    (65536, 1, 4096, 0, 32),
    (ROW_BYTES, 1, 8192, 1, 32),
    *LONG_TILES,
)
# An RMS norm reads one vector less, and a residual is read but once. The longest row of 16 warps
# depends on whether there is one.
RMS_TILES, RESIDUAL_TILES = (
    (
        *SHORT_TILES,
        (8192, 1, 2048, 0, 8),
        (16384, 1, 2048, 1, 4),
        (most, 1, 4096, 0, 16),
        (65536, 1, 8192, 0, 32),
        (ROW_BYTES, 1, 16384, 1, 32),
        *LONG_TILES,
    )
    for most in (24576, 32768)
)


def _config(rows, block, holders, warps):
    return {"BLOCK_M": rows, "BLOCK_N": block, "HOLDERS": holders, "num_warps": warps}


CANDIDATES = (
    *(
        _config(rows, block, 1, warps)
        for rows in (1, 2, 4, 8)
        for block in (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
        for warps in (1, 2, 4, 8, 16, 32)
        if 8 <= rows * block // (32 * warps) <= (64 if block > 1024 else 32)
        and (rows == 1 or rows * block <= (2048 if block <= 1024 else 8192))
    ),
    *(
        _config(1, block, 0, warps)
        for block, warps in ((1024, 4), (2048, 8), (4096, 8), (4096, 16), (4096, 32), (8192, 32))
    ),
    *(_config(1, 4096, holders, 8) for holders in (4, 8, 16, 32, 64)),
)


def forward_configs(family: str, tiles: tuple = TILES) -> Configs:
    """The tiles of rows, held or walked, for the table of a family; `tiles` is its rule where there
    is no residual."""

    def choose(n, itemsize, residual):
        size, whole = n * itemsize, max(16, 1 << (n - 1).bit_length())
        for limit, rows, block, holders, warps in RESIDUAL_TILES if residual else tiles:
            # Masks take the registers that the longest rows would need.
            kept = limit >= ROW_BYTES and holders
            if size <= limit and not (kept and n % (holders * block)):
                return _config(rows, min(block, whole), holders, warps)
        raise ValueError(f"tiles: none for {size} bytes, expected a last one without a limit")

    return Configs(_norm_forward_kernel, CANDIDATES, choose, _suits, family)


def _suits(candidate, n, itemsize, residual):
    """Whether blocks are full, and a thread holds up to 128 bytes: of long rows half that at
    least, of short ones an access."""
    rows, block, holders, warps = candidate.values()
    size, whole = n * itemsize, max(128, 1 << (n - 1).bit_length())
    if not holders:
        return size > LOOP_BYTES and block <= n and (n <= 8 * block or size > ROW_BYTES)
    if n % (holders * block) and holders > 1:
        return False
    chunks = -(-n // (holders * block))
    held = rows * chunks * block * itemsize / (32 * warps)
    full = block == whole if n <= 2048 else 2048 <= block <= whole
    shared = rows == 1 or (chunks == 1 and size <= 8192)
    least = ACCESS_BYTES if size <= 4096 else 64
    alone = holders > 1 or size <= ROW_BYTES
    return alone and full and shared and chunks <= MOST_CHUNKS and least <= held <= 128


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _arrived(x_ptr, residual_ptr, offs_x, offs_r, mask, POLICY: tl.constexpr):
    """x, or x + residual where there is one, in the dtype of x."""
    x = tl.load(x_ptr + offs_x, mask=mask, other=0.0, eviction_policy=POLICY)
    if residual_ptr is not None:
        residual = load_f32_hinted(residual_ptr + offs_r, mask, "evict_first")
        x = (x.to(tl.float32) + residual).to(x_ptr.dtype.element_ty)
    return x


@triton.jit
def _pivot(x_ptr, residual_ptr, start_x, start_r, N):
    """The mean of the first entries of a row. Each warp takes it for itself, without a barrier."""
    head = tl.zeros((LANES,), tl.float32)
    for part in tl.static_range(HEAD // LANES):
        offs = part * LANES + tl.arange(0, LANES)
        x = _arrived(x_ptr, residual_ptr, start_x + offs, start_r + offs, offs < N, "evict_last")
        head += x.to(tl.float32)
    return tl.sum(head, 0) / tl.minimum(N, HEAD)


@triton.jit
def _summed(first, second, CENTRED: tl.constexpr):
    if CENTRED:
        return tl.reduce((first, second), 1, add_pairs)
    return tl.zeros((first.shape[0],), tl.float32), tl.sum(second, 1)


@triton.jit
def _statistics(
    stats_ptr, offs_m, mask_m, shift, first, second, M, N, eps, CENTRED: tl.constexpr
):  # fmt: skip
    """Mean and rstd of rows, stored where they are wanted, by the sums of what lies apart from
    `shift` and of its squares."""
    mean = shift
    square = second / N
    if CENTRED:
        off = first / N
        mean += off
        square -= off * off
        if stats_ptr is not None:
            tl.store(stats_ptr + M + offs_m, mean, mask=mask_m)
    rstd = tl.rsqrt(square + tl.cast(eps, tl.float32))
    if stats_ptr is not None:
        tl.store(stats_ptr + offs_m, rstd, mask=mask_m)
    return mean, rstd


@triton.jit
def _normalized(x, mean, rstd, weight_ptr, bias_ptr, offs_n, mask_n, CENTRED: tl.constexpr):
    weight = load_f32_hinted(weight_ptr + offs_n, mask_n, "evict_last")
    if CENTRED:
        bias = load_f32_hinted(bias_ptr + offs_n, mask_n, "evict_last")
        return (x - mean[:, None]) * rstd[:, None] * weight + bias
    return x * rstd[:, None] * weight


@triton.jit
def _norm_kept(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr, slots_ptr,
    stride_xm, stride_rm, M, N, eps,
    CENTRED: tl.constexpr, EVEN: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HOLDERS: tl.constexpr,
):  # fmt: skip
    holder = tl.program_id(0) % HOLDERS
    begin = holder * CHUNKS * BLOCK_N
    offs_m = (tl.program_id(0) // HOLDERS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = (offs_m < M) | (BLOCK_M == 1)
    rows = offs_m[:, None]
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        offs = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = mask_m[:, None] & ((offs < N) | EVEN)
        x = _arrived(
            x_ptr, residual_ptr, rows * stride_xm + offs, rows * stride_rm + offs, mask, ""
        )
        if residual_ptr is not None:
            tl.store(total_ptr + rows * N + offs, x, mask=mask)
        chunks = chunks + (x,)  # noqa: RUF005
    shift = tl.zeros((BLOCK_M,), tl.float32)
    if CENTRED:
        if HOLDERS > 1:
            row = (tl.program_id(0) // HOLDERS).to(tl.int64)
            shift += _pivot(x_ptr, residual_ptr, row * stride_xm, row * stride_rm, N)
        else:
            shift = tl.sum(chunks[0].to(tl.float32), 1) / tl.minimum(N, BLOCK_N)
    zero = zero_after(shift)[:, None]
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        apart = widened(chunks[chunk], zero)
        if CENTRED:
            offs = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
            apart = tl.where((offs < N) | EVEN, apart - shift[:, None], 0.0)
            first += apart
        second += apart * apart
    first, second = _summed(first, second, CENTRED)
    if HOLDERS > 1:
        firsts, seconds = parts_together(
            slots_ptr + (tl.program_id(0) // HOLDERS).to(tl.int64) * (2 * HOLDERS), holder,
            tl.sum(first, 0), tl.sum(second, 0), HOLDERS,
        )  # fmt: skip
        first = tl.sum(firsts, 0) + tl.zeros((BLOCK_M,), tl.float32)
        second = tl.sum(seconds, 0) + tl.zeros((BLOCK_M,), tl.float32)
    mean, rstd = _statistics(
        stats_ptr, offs_m, mask_m & (holder == 0), shift, first, second, M, N, eps, CENTRED
    )
    zero = zero_after(rstd)[:, None]
    for chunk in tl.static_range(CHUNKS):
        offs = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask_n = (offs < N) | EVEN
        x = widened(chunks[chunk], zero)
        y = _normalized(x, mean, rstd, weight_ptr, bias_ptr, offs, mask_n, CENTRED)
        store_as(y_ptr + rows * N + offs, y, mask_m[:, None] & mask_n)


@triton.jit
def _norm_walked(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr,
    stride_xm, stride_rm, M, N, eps,
    CENTRED: tl.constexpr, EVEN: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    if residual_ptr is not None:
        residual_ptr += row * stride_rm
        total_ptr += row * N
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    shift = tl.zeros((1,), tl.float32)
    if CENTRED:
        shift += _pivot(x_ptr, residual_ptr, 0, 0, N)
    # Sums for each lane; the lanes meet once, after the walk. The number of its steps is constant,
    # so the loads of several are on their way at a time.
    first = tl.zeros((1, BLOCK_N), tl.float32)
    second = tl.zeros((1, BLOCK_N), tl.float32)
    for chunk in range(CHUNKS):
        offs = chunk * BLOCK_N + offs_n
        mask = (offs < N) | EVEN
        x = _arrived(x_ptr, residual_ptr, offs, offs, mask, "evict_last")
        if residual_ptr is not None:
            tl.store(total_ptr + offs, x, mask=mask)
        apart = x.to(tl.float32)
        if CENTRED:
            apart = tl.where(mask, apart - shift[:, None], 0.0)
            first += apart
        second += apart * apart
    first, second = _summed(first, second, CENTRED)
    offs_m = row + tl.arange(0, 1)
    mean, rstd = _statistics(
        stats_ptr, offs_m, offs_m < M, shift, first, second, M, N, eps, CENTRED
    )
    if residual_ptr is not None:
        # The sum comes back to other threads than those that stored it.
        tl.debug_barrier()
        x_ptr = total_ptr
    for chunk in range(CHUNKS):
        offs = chunk * BLOCK_N + offs_n
        mask = (offs < N) | EVEN
        x = load_f32_hinted(x_ptr + offs, mask, "evict_first")
        y = _normalized(x, mean, rstd, weight_ptr, bias_ptr, offs, mask, CENTRED)
        store_as(y_ptr + offs, y, mask)


@triton.jit
def _norm_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr, slots_ptr,
    stride_xm, stride_rm, M, N, eps,
    CENTRED: tl.constexpr, EVEN: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HOLDERS: tl.constexpr,
):  # fmt: skip
    if HOLDERS:
        _norm_kept(
            x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr, slots_ptr,
            stride_xm, stride_rm, M, N, eps, CENTRED, EVEN, CHUNKS, BLOCK_M, BLOCK_N, HOLDERS,
        )  # fmt: skip
    else:
        _norm_walked(
            x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr,
            stride_xm, stride_rm, M, N, eps, CENTRED, EVEN, CHUNKS, BLOCK_N,
        )  # fmt: skip


@planned
def norm_forward(
    configs: Configs,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Normalizes the rows of x, or of x + residual where there is one.

    configs: as `forward_configs` returns them. x, residual: [..., N]; weight: [N]; bias: [N] for a
    layer norm, None for an RMS norm. keep: whether the statistics are wanted. Returns y, the sum
    (None without a residual), both contiguous, and the statistics: rstd, then mean of a layer
    norm, float32 [1 or 2, M], None where not kept or nothing is normalized. TypeError or ValueError
    where the tensors do not belong together.
    """
    check_norm(x, residual, weight=weight, bias=bias)
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    y, total, stats = empty(x), None, None
    n, elements, centred, stride_rm = x.shape[-1], x.numel(), bias is not None, 0
    if residual is not None:
        total = empty(y)
        residual, stride_rm = spaced(residual, n)
    if elements == 0:
        return y, total, stats
    m = elements // n
    x, stride_xm = spaced(x, n)
    if keep:
        stats = empty(x, (1 + centred, m), torch.float32)
    key = {"n": n, "itemsize": x.element_size(), "residual": residual is not None}
    config = configs.pick(x.device, **key)
    if config["HOLDERS"] > 1 and not side_by_side(x.device):
        config = {**config, "HOLDERS": 0}
    holders = config["HOLDERS"]
    programs = max(holders, 1)
    share = programs * config["BLOCK_N"]
    launch(
        _norm_forward_kernel, (-(-m // config["BLOCK_M"]) * programs,),
        x_ptr=x, residual_ptr=residual, weight_ptr=weight, bias_ptr=bias, y_ptr=y,
        total_ptr=total, stats_ptr=stats,
        slots_ptr=unsaid(m, holders, x.device) if holders > 1 else None,
        stride_xm=stride_xm, stride_rm=stride_rm, M=m, N=n, eps=eps, CENTRED=centred,
        EVEN=n % share == 0, CHUNKS=-(-n // share), **config,
    )  # fmt: skip
    return y, total, stats


def spaced(x: torch.Tensor, n: int) -> tuple[torch.Tensor, int]:
    """x of shape [..., n], as it is or as `rows_of` gives it, and how far apart its rows are."""
    if x.is_contiguous():
        return x, n
    x = rows_of(x)
    return x, x.stride(0)

"""Forward pass of layer norm and RMS norm, with or without a residual, for rows of any length.

A row is either kept in registers or read twice, the second time out of a cache. NUM_SPLITS of the
configuration decides, because which is faster depends on the length. Kept rows stay in the dtype in
which they came, in chunks, and are widened anew for each use: a second copy in float32 would
double the registers. The weights are loaded after the statistics, so that they hold no registers
before. Rows that no single program can keep are split among several, which take their sums together
(`_exchange.py`); read twice they would come from memory both times. Only the last chunks of an
uneven row have masks (`_norm_columns.py`).

Mean and variance of a layer norm come from one pass over deviations from a shift (Chan, Golub and
LeVeque, "Algorithms for computing the sample variance", 1983). A row in one program is shifted by
the mean of its first chunk, an eighth of it or more, so at most 8 variances cancel. Splits, and
rows that are read twice, are shifted by the mean of 128 entries, which is there before the others.
If it lies further than two standard deviations from the mean, the sums are taken again about the
mean. Splits are combined by the pairwise formula of the same authors.
"""

import torch
import triton
import triton.language as tl

from kernels._exchange import may_wait, parts_together, unsaid
from kernels._launch import launch
from kernels._layout import rows_of
from kernels._norm import check_norm
from kernels._norm_columns import chunks_of, owned_columns
from kernels._plan import empty, planned
from kernels._tile import load_f32_hinted, store_as, widened, zero_after
from kernels._tuned import Config, Configs

# The longest row that one program keeps in its registers.
ROW_BYTES = 131072
# The shortest row that is worth walking twice.
LOOP_BYTES = 4096
ACCESS_BYTES = 16
MOST_CHUNKS = 8
# The entries whose mean the others are set apart from, and how many of them a warp takes at a time.
HEAD = tl.constexpr(128)
LANES = tl.constexpr(32)
# Squares about a shift cancel if that lies, squared, so many variances from the mean.
FAR = tl.constexpr(4)
# Columns at a time if the sums are then taken again.
AGAIN = tl.constexpr(1024)
# (longest row in bytes, rows of a program, most elements of a chunk, splits of a row or 0 if it is
# read twice, warps)
SHORT_TILES = (
    (256, 8, 128, 1, 4),
    (512, 4, 256, 1, 4),
    (1024, 2, 512, 1, 4),
    (2048, 2, 1024, 1, 4),
    (4096, 1, 2048, 1, 4),
)
LONG_TILES = (
    *((ROW_BYTES * 2**power, 1, 4096, 4 * 2**power, 8) for power in (0, 1, 2, 3)),
    # No more splits: an H200 has no room for 64 in each of several launches (`may_wait`).
    (ROW_BYTES * 16, 1, 4096, 32, 8),
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


def _config(rows, block, splits, warps):
    return {"BLOCK_M": rows, "BLOCK_N": block, "NUM_SPLITS": splits, "num_warps": warps}


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
    *(_config(1, 4096, splits, 8) for splits in (4, 8, 16, 32)),
)


def forward_configs(family: str, tiles: tuple = TILES) -> Configs:
    """Return the tiles of rows, kept or read twice, for the table of a family; `tiles` is its rule
    if there is no residual."""

    def choose(n, itemsize, residual):
        size, whole = n * itemsize, max(16, 1 << (n - 1).bit_length())
        for limit, rows, block, splits, warps in RESIDUAL_TILES if residual else tiles:
            # One program has no registers left for the masks of the longest rows.
            crowded = limit == ROW_BYTES and splits == 1 and n % block
            if size <= limit and not crowded:
                return _config(rows, min(block, whole), splits, warps)
        raise ValueError(f"tiles: none for {size} bytes, expected a last one without a limit")

    return Configs(_norm_forward_kernel, CANDIDATES, choose, _suits, family)


def _suits(candidate, n, itemsize, residual):
    """Whether blocks are full, and a thread holds up to 128 bytes: of long rows half that at
    least, of short ones an access."""
    rows, block, splits, warps = candidate.values()
    size, whole = n * itemsize, max(128, 1 << (n - 1).bit_length())
    if not splits:
        return size > LOOP_BYTES and block <= n and (n <= 8 * block or size > ROW_BYTES)
    chunks, full_chunks = chunks_of(n, splits, block)
    if splits > 1 and not full_chunks:
        return False
    held = rows * chunks * block * itemsize / (32 * warps)
    full = block == whole if n <= 2048 else 2048 <= block <= whole
    shared = rows == 1 or (chunks == 1 and size <= 8192)
    least = ACCESS_BYTES if size <= 4096 else 64
    alone = splits > 1 or size <= ROW_BYTES
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
def _pivot(x_ptr, residual_ptr, N):
    """The mean of the first entries of N. Each warp takes it for itself, without a barrier."""
    head = tl.zeros((LANES,), tl.float32)
    for part in tl.static_range(HEAD // LANES):
        offs = part * LANES + tl.arange(0, LANES)
        x = _arrived(x_ptr, residual_ptr, offs, offs, offs < N, "evict_last")
        head += x.to(tl.float32)
    return tl.sum(head, 0) / tl.maximum(tl.minimum(N, HEAD), 1)


@triton.jit
def _summed(first, second, IS_LAYER_NORM: tl.constexpr):
    """The sums along rows, [BLOCK_M], of lanes [BLOCK_M, BLOCK_N]."""
    if IS_LAYER_NORM:
        return tl.reduce((first, second), 1, add_pairs)
    return tl.zeros((first.shape[0],), tl.float32), tl.sum(second, 1)


@triton.jit
def _is_far(off, square):
    """Whether squares about a shift cancel: it lies `off` from the mean of the row; `square` is the
    mean square about it. Scalars; false if either is NaN."""
    return off * off > FAR * (square - off * off)


@triton.jit
def _store_statistics(
    stats_ptr, offs_m, mask_m, mean, variance, M, eps, IS_LAYER_NORM: tl.constexpr
):
    """Returns rstd; stores it, and the mean of a layer norm, if they are wanted."""
    if IS_LAYER_NORM and stats_ptr is not None:
        tl.store(stats_ptr + M + offs_m, mean, mask=mask_m)
    rstd = tl.rsqrt(variance + tl.cast(eps, tl.float32))
    if stats_ptr is not None:
        tl.store(stats_ptr + offs_m, rstd, mask=mask_m)
    return rstd


@triton.jit
def _normalized(x, mean, rstd, weight_ptr, bias_ptr, cols, mask_n, IS_LAYER_NORM: tl.constexpr):
    """The tile of y, [BLOCK_M, BLOCK_N], float32."""
    if weight_ptr is not None:
        weight = load_f32_hinted(weight_ptr + cols, mask_n, "evict_last")
    if bias_ptr is not None:
        bias = load_f32_hinted(bias_ptr + cols, mask_n, "evict_last")
    if IS_LAYER_NORM:
        x -= mean[:, None]
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y *= weight
    if bias_ptr is not None:
        y += bias
    return y


@triton.jit
def _lane_sums(
    chunks, shift, zero, begin, end, IS_LAYER_NORM: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    NUM_FULL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums along rows of kept chunks, about `shift` if a layer norm, and of their squares."""
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        apart = widened(chunks[chunk], zero)
        if IS_LAYER_NORM:
            cols = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
            inside = (cols < end) | (chunk < NUM_FULL)
            apart = tl.where(inside, apart - shift[:, None], 0.0)
            first += apart
        second += apart * apart
    return _summed(first, second, IS_LAYER_NORM)


@triton.jit
def _norm_kept(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr, slots_ptr,
    stride_xm, stride_rm, M, N, eps,
    IS_LAYER_NORM: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    split_id = tl.program_id(0) % NUM_SPLITS
    begin, end = owned_columns(split_id, N, NUM_CHUNKS, NUM_FULL, BLOCK_N, NUM_SPLITS)
    offs_m = (tl.program_id(0) // NUM_SPLITS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = (offs_m < M) | (BLOCK_M == 1)
    rows = offs_m[:, None]  # [BLOCK_M, 1]
    # 1. Load the rows.
    chunks = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        cols = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]  # [1, BLOCK_N]
        mask = mask_m[:, None] & ((cols < end) | (chunk < NUM_FULL))
        x = _arrived(
            x_ptr, residual_ptr, rows * stride_xm + cols, rows * stride_rm + cols, mask, ""
        )
        if residual_ptr is not None:
            tl.store(total_ptr + rows * N + cols, x, mask=mask)
        chunks = chunks + (x,)  # noqa: RUF005
    # 2. Mean and variance.
    shift = tl.zeros((BLOCK_M,), tl.float32)
    if IS_LAYER_NORM:
        if NUM_SPLITS > 1:
            row = (tl.program_id(0) // NUM_SPLITS).to(tl.int64)
            own_r = residual_ptr
            if residual_ptr is not None:
                own_r += row * stride_rm + begin
            shift += _pivot(x_ptr + row * stride_xm + begin, own_r, end - begin)
        else:
            shift = tl.sum(chunks[0].to(tl.float32), 1) / tl.minimum(N, BLOCK_N)
    zero = zero_after(shift)[:, None]
    first, second = _lane_sums(
        chunks, shift, zero, begin, end, IS_LAYER_NORM, NUM_CHUNKS, NUM_FULL, BLOCK_M, BLOCK_N
    )
    if NUM_SPLITS == 1:
        mean = shift
        variance = second / N
        if IS_LAYER_NORM:
            # The shift is the mean of an eighth of the row at least, so not far.
            off = first / N
            mean += off
            variance -= off * off
    else:
        slots_ptr += (tl.program_id(0) // NUM_SPLITS).to(tl.int64) * (2 * NUM_SPLITS)
        if IS_LAYER_NORM:
            own = tl.maximum(end - begin, 1)
            first, second = tl.sum(first, 0), tl.sum(second, 0)
            off = first / own
            if _is_far(off, second / own):
                # A new zero, or the compiler would keep the chunks in float32 for this.
                shift += off
                first, second = _lane_sums(
                    chunks, shift, zero_after(shift)[:, None], begin, end, IS_LAYER_NORM,
                    NUM_CHUNKS, NUM_FULL, BLOCK_M, BLOCK_N,
                )  # fmt: skip
                first, second = tl.sum(first, 0), tl.sum(second, 0)
                off = first / own
            means, seconds = parts_together(
                slots_ptr, split_id, tl.sum(shift, 0) + off, second - first * off, NUM_SPLITS
            )
            # Chan, Golub and LeVeque: squares about the mean of each part, and of these means.
            splits = tl.arange(0, NUM_SPLITS)
            span = tl.maximum(owned_columns(1, N, NUM_CHUNKS, NUM_FULL, BLOCK_N, NUM_SPLITS)[0], 1)
            counts = tl.minimum(tl.maximum(N - splits * span, 0), span)
            pivot = tl.sum(tl.where(splits == 0, means, 0.0), 0)
            apart = means - pivot
            off = tl.sum(counts * apart, 0) / N
            apart -= off
            mean = pivot + off + tl.zeros((BLOCK_M,), tl.float32)
            square = tl.sum(seconds + counts * apart * apart, 0)
        else:
            _, seconds = parts_together(
                slots_ptr, split_id, tl.sum(first, 0), tl.sum(second, 0), NUM_SPLITS
            )
            mean = shift
            square = tl.sum(seconds, 0)
        variance = (square + tl.zeros((BLOCK_M,), tl.float32)) / N
    rstd = _store_statistics(
        stats_ptr, offs_m, mask_m & (split_id == 0), mean, variance, M, eps, IS_LAYER_NORM
    )
    # 3. Normalize and store.
    zero = zero_after(rstd)[:, None]
    for chunk in tl.static_range(NUM_CHUNKS):
        cols = (begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask_n = (cols < end) | (chunk < NUM_FULL)
        x = widened(chunks[chunk], zero)
        y = _normalized(x, mean, rstd, weight_ptr, bias_ptr, cols, mask_n, IS_LAYER_NORM)
        store_as(y_ptr + rows * N + cols, y, mask_m[:, None] & mask_n)


@triton.jit
def _sums_again(x_ptr, shift, N):
    """The sum of one row about `shift`, and that of its squares; scalars. Rarely needed, so it must
    not cost registers: its tile is small, and its loop is not unrolled."""
    first = tl.zeros((AGAIN,), tl.float32)
    second = tl.zeros((AGAIN,), tl.float32)
    for start in range(0, N, AGAIN):
        cols = start + tl.arange(0, AGAIN)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        apart = tl.where(cols < N, x - shift, 0.0)
        first += apart
        second += apart * apart
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _norm_walked(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr,
    stride_xm, stride_rm, M, N, eps,
    IS_LAYER_NORM: tl.constexpr, EVEN: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    if residual_ptr is not None:
        residual_ptr += row * stride_rm
        total_ptr += row * N
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    # 1. Mean and variance.
    mean = 0.0
    if IS_LAYER_NORM:
        mean = _pivot(x_ptr, residual_ptr, N)
    # Sums for each lane; the lanes meet once, after the loop. The number of its steps is constant,
    # so the loads of several are on their way at a time.
    first = tl.zeros((1, BLOCK_N), tl.float32)
    second = tl.zeros((1, BLOCK_N), tl.float32)
    for chunk in range(NUM_CHUNKS):
        cols = chunk * BLOCK_N + offs_n
        mask = (cols < N) | EVEN
        x = _arrived(x_ptr, residual_ptr, cols, cols, mask, "evict_last")
        if residual_ptr is not None:
            tl.store(total_ptr + cols, x, mask=mask)
        apart = x.to(tl.float32)
        if IS_LAYER_NORM:
            apart = tl.where(mask, apart - mean, 0.0)
            first += apart
        second += apart * apart
    first, second = _summed(first, second, IS_LAYER_NORM)
    if residual_ptr is not None:
        # The sum comes back to other threads than those that stored it.
        tl.debug_barrier()
        x_ptr = total_ptr
    if IS_LAYER_NORM:
        first, second = tl.sum(first, 0), tl.sum(second, 0)
        off = first / N
        variance = second / N
        if _is_far(off, variance):
            mean += off
            first, second = _sums_again(x_ptr, mean, N)
            off = first / N
            variance = second / N
        mean += off + tl.zeros((1,), tl.float32)
        variance += tl.zeros((1,), tl.float32) - off * off
    else:
        mean = first
        variance = second / N
    offs_m = row + tl.arange(0, 1)
    rstd = _store_statistics(stats_ptr, offs_m, offs_m < M, mean, variance, M, eps, IS_LAYER_NORM)
    # 2. Read again, normalize, store.
    for chunk in range(NUM_CHUNKS):
        cols = chunk * BLOCK_N + offs_n
        mask = (cols < N) | EVEN
        x = load_f32_hinted(x_ptr + cols, mask, "evict_first")
        y = _normalized(x, mean, rstd, weight_ptr, bias_ptr, cols, mask, IS_LAYER_NORM)
        store_as(y_ptr + cols, y, mask)


@triton.jit
def _norm_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr, slots_ptr,
    stride_xm, stride_rm, M, N, eps,
    IS_LAYER_NORM: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """y = w (s - mean) rstd + b with s = x + residual; mean is 0 in an RMS norm.

    Grid: cdiv(M, BLOCK_M) * max(NUM_SPLITS, 1). A program owns BLOCK_M rows, or one of NUM_SPLITS
    parts of their columns, as NUM_CHUNKS chunks of BLOCK_N.

    Reads x (and the residual) [M, N], in rows stride_xm and stride_rm apart, w and b [N], each
    1 and 0 if its pointer is None. Writes y [M, N], total_ptr (s, [M, N]) if there is a residual,
    and stats (rstd [M], then mean [M] of a layer norm) unless its pointer is None.

    NUM_SPLITS >= 1: s stays in registers, so x is read once. NUM_SPLITS > 1: BLOCK_M is 1, at least
    NUM_SPLITS programs are resident at once, and slots holds a pair for each split and row, empty.
    NUM_SPLITS == 0: BLOCK_M is 1, and s is read a second time, from a cache if it is still there.
    NUM_FULL: the leading chunks that lie within the columns of each split, so need no mask.
    """
    if NUM_SPLITS:
        _norm_kept(
            x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr, slots_ptr,
            stride_xm, stride_rm, M, N, eps,
            IS_LAYER_NORM, NUM_CHUNKS, NUM_FULL, BLOCK_M, BLOCK_N, NUM_SPLITS,
        )  # fmt: skip
    else:
        _norm_walked(
            x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr,
            stride_xm, stride_rm, M, N, eps,
            IS_LAYER_NORM, NUM_FULL == NUM_CHUNKS, NUM_CHUNKS, BLOCK_N,
        )  # fmt: skip


@planned
def norm_forward(
    configs: Configs,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    layer: bool,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Normalize the rows of x, or of x + residual if there is one.

    configs: as `forward_configs` returns them. x, residual: [..., N]; weight, bias: [N], or None
    for ones and zeros. layer: whether the mean is taken off, as in a layer norm. keep: whether the
    statistics are wanted. Returns y, the sum (None without a residual), both contiguous, and the
    statistics: rstd, then mean of a layer norm, float32 [1 or 2, M]; None if they are not wanted or
    nothing is normalized. Raises TypeError or ValueError if the tensors do not belong together.
    """
    check_norm(x, residual, weight=weight, bias=bias)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    y, total, stats = empty(x), None, None
    n, elements, stride_rm = x.shape[-1], x.numel(), 0
    if residual is not None:
        total = empty(y)
        residual, stride_rm = spaced(residual, n)
    if elements == 0:
        return y, total, stats
    m = elements // n
    x, stride_xm = spaced(x, n)
    if keep:
        stats = empty(x, (1 + layer, m), torch.float32)
    key = {"n": n, "itemsize": x.element_size(), "residual": residual is not None}
    config = resident(configs.pick(x.device, **key), x.device)
    splits = config["NUM_SPLITS"]
    programs = max(splits, 1)
    chunks, full = chunks_of(n, programs, config["BLOCK_N"])
    launch(
        _norm_forward_kernel, (-(-m // config["BLOCK_M"]) * programs,),
        x_ptr=x, residual_ptr=residual, weight_ptr=weight, bias_ptr=bias, y_ptr=y,
        total_ptr=total, stats_ptr=stats,
        slots_ptr=unsaid(m, splits, x.device) if splits > 1 else None,
        stride_xm=stride_xm, stride_rm=stride_rm, M=m, N=n, eps=eps, IS_LAYER_NORM=layer,
        NUM_CHUNKS=chunks, NUM_FULL=full, **config,
    )  # fmt: skip
    return y, total, stats


def resident(config: Config, device: torch.device) -> Config:
    """Return `config`, without splits if the programs of a row may not wait for each other."""
    splits = config["NUM_SPLITS"]
    if splits > 1 and not may_wait(device, splits):
        return {**config, "NUM_SPLITS": 0}
    return config


def spaced(x: torch.Tensor, n: int) -> tuple[torch.Tensor, int]:
    """x of shape [..., n], as it is or as `rows_of` gives it, and how far apart its rows are."""
    if x.is_contiguous():
        return x, n
    x = rows_of(x)
    return x, x.stride(0)

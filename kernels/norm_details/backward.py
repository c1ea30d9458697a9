"""Backward pass of layer norm and RMS norm: dx, and the sums over rows that are dw and db.

With xhat = (x - mean) rstd (RMS norm: x rstd) and g = w dy, dx = rstd (g - xhat mean(g xhat) -
mean(g)) + ds, dw = sum of dy xhat over the rows, db = sum of dy. The term mean(g) is that of a
layer norm; ds is the gradient of the fused sum. A fixed number of programs share the rows. Each
reads its rows once, while the next are on their way to shared memory, and keeps its part of dw and
db in registers (`norm_details/gradients.py`). The kernel of this file takes whole rows. Longer rows
are split among programs (`norm_details/backward_split.py`). If programs may not wait for each
other, or a row is too long for all that may, x and dy are read twice, by kernels that are right for
rows of any length (`norm_details/backward_two_pass.py`). A last kernel adds the parts in a fixed
order, so the result is the same in each run. The two-stage sum follows the layer norm tutorial of
Triton, without its locks.
"""

import torch
import triton
import triton.language as tl

from .._runtime.call_cache import cached_launch
from .._runtime.configs import Config, Configs
from .._runtime.device import shared_bytes, sm_count
from .._triton.exchange import SHARERS, empty_slots, may_wait, supports_spin_wait
from .._triton.memory import opaque_zero, store_as
from .backward_split import _norm_backward_split_kernel
from .backward_two_pass import (
    SPLITS,
    TILE,
    TILE_CANDIDATES,
    TILE_PROGRAMS,
    _norm_backward_sums_kernel,
    _norm_backward_tile_kernel,
)
from .columns import chunks_of, span_of
from .forward import spaced
from .gradients import accumulate, load_chunks, store_dx, store_sums, zero_chunks
from .statistics import add_pairs

# What a program holds of a row at most, with its share of dw and db.
ROW_BYTES = 32768
# A thread reads and writes so many bytes at a time. It has at most so many such accesses of a whole
# row, by the size of an element.
ACCESS_BYTES, ROW_ACCESSES = 16, {2: 7, 4: 8}
# The compiler reads 16 bytes at a time if rows are a multiple of this many columns long.
ALIGNED_ROW = 16
# The most columns of an unaligned row that a program holds, and of a split of one, both in
# UNALIGNED_WARPS: masks and unpacked numbers take registers.
UNALIGNED_COLUMNS, UNALIGNED_SPLIT = 8192, 5120
UNALIGNED_WARPS = 8
# (longest row, rows of a tile, warps, stages, programs a multiprocessor): one chunk, a power of two
SHORT_TILES = (
    (256, 8, 4, 3, 2),
    (512, 8, 4, 3, 2),
    (1024, 4, 4, 3, 2),
    (2048, 2, 8, 3, 2),
    (4096, 1, 8, 3, 2),
)
# (warps of a program, programs a multiprocessor)
ROW_WARPS = ((4, 2), (8, 1), (16, 1))
# (warps, programs a multiprocessor, accesses of a thread) of splits: while one program waits for
# the sums of its row, others work. A layer norm keeps db too, so fewer columns fit.
SPLIT_FORMS, RMS_SPLIT_FORMS = ((4, 2, 7), (4, 3, 4)), ((8, 2, 4), (4, 4, 4))
# Two programs that share a row of an RMS norm have registers for one access more.
RMS_PAIR = (8, 2, 5)
# A row that would take more splits than may wait has longer ones.
LONGEST_FORM = (16, 1, 4)
# Up to so many splits of an RMS norm are faster if groups take rows in turn.
TURNS = 4
# Shared memory of a program for its sums, and for what the hardware keeps.
SUMS_BYTES = 2048
# For which device the rule chooses, and what one of its multiprocessors has.
H200 = torch.device("meta")
REGISTERS = 65536


def _row_config(rows, block, stages, programs, warps):
    return {
        "BLOCK_M": rows, "BLOCK_N": block, "STAGES": stages, "PER_SM": programs,
        "num_warps": warps,
    }  # fmt: skip


def _split_config(block, stages, programs, splits, in_turn, warps):
    # All programs that a multiprocessor is to hold find registers.
    registers = min(248, REGISTERS // (32 * warps * programs) // 8 * 8)
    return {
        "BLOCK_N": block, "STAGES": stages, "PER_SM": programs, "NUM_SPLITS": splits,
        "IN_TURN": int(in_turn), "num_warps": warps, "maxnreg": registers,
    }  # fmt: skip


ROW_CANDIDATES = (
    *(
        _row_config(rows, block, 3, programs, warps)
        for rows, block, warps in (
            (8, 256, 4), (8, 512, 4), (4, 512, 4), (4, 1024, 4), (2, 1024, 8), (2, 2048, 8),
            (1, 2048, 8), (1, 4096, 8), (1, 4096, 16),
        )
        for programs in (1, 2)
    ),
    *(
        _row_config(1, accesses * warps, stages, programs, warps)
        for accesses in (128, 256)
        for warps in (4, 8, 16)
        for stages, programs in ((3, 1), (3, 2), (4, 1))
        if programs * warps in (8, 16)
    ),
)  # fmt: skip
SPLIT_CANDIDATES = tuple(
    _split_config(accesses * warps, 3, programs, splits, accesses == 128, warps)
    for splits in (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
    for accesses in (128, 256)
    for warps, programs in ((4, 2), (4, 3), (8, 2), (16, 1))
)
SUM_CANDIDATES = tuple(
    {"BLOCK_P": rows, "BLOCK_N": columns, "num_warps": 4}
    for rows, columns in ((32, 32), (64, 32), (128, 16), (256, 8))
)
# How many shares of dw there are at most; more than the last make no difference to a tile.
SHARES = (1, 2, 4, 8, 16, 32, 64, 128)


def backward_configs(
    family: str,
    tile: Config = TILE,
    forms: tuple[tuple[int, int, int], ...] = SPLIT_FORMS,
    pair: tuple[int, int, int] | None = None,
) -> tuple[Configs, ...]:
    """Return the tiles of whole rows, of splits, of the sums along rows, of tiles and of parts, for
    the table of a family; `tile` is the rule of the third and the fourth, `forms` and `pair` that
    of the second."""

    def choose_row(n, itemsize):
        for limit, rows, warps, stages, programs in SHORT_TILES:
            if n <= limit:
                return _row_config(rows, _power(n), stages, programs, warps)
        if n % ALIGNED_ROW:
            return _row_config(1, _fitting(n), 3, 1, UNALIGNED_WARPS)
        for warps, programs in ROW_WARPS:  # noqa: B007
            block = 32 * warps * ACCESS_BYTES // itemsize
            if n <= ROW_ACCESSES[itemsize] * block:
                break
        # The longest rows have no registers for the sums of several chunks.
        longest = n * itemsize == ROW_BYTES
        return _row_config(1, n if longest else block, 3, programs, warps)

    def choose_split(n, itemsize):
        if n % ALIGNED_ROW:
            shorter = min(-(-n // UNALIGNED_SPLIT), sm_count(H200) // SHARERS - 1)
            splits = max(-(-n // UNALIGNED_COLUMNS), shorter)
            block = _fitting(span_of(n, splits))
            return _split_config(block, 3, 1, splits, itemsize == 4, UNALIGNED_WARPS)
        found = []
        # Rows of four bytes take twice as long to move, so the wait for the sums weighs less.
        for warps, programs, accesses in forms if itemsize == 2 else ():
            block = 32 * warps * ACCESS_BYTES // itemsize
            splits = -(-n // (accesses * block))
            chunks, _ = chunks_of(n, splits, block)
            if SHARERS * splits <= programs * sm_count(H200):
                # The fewest slots without a column, then the fewest programs that wait.
                found.append((splits * chunks * block, splits, block, programs, warps))
        warps, programs, accesses = pair or (0, 0, 0)
        block = 32 * warps * ACCESS_BYTES // itemsize
        if itemsize == 2 and n <= 2 * accesses * block:
            found = [(0, 2, block, programs, warps)]
        if not found:
            warps, programs, accesses = LONGEST_FORM
            block = 32 * warps * ACCESS_BYTES // itemsize
            found = [(0, -(-n // (accesses * block)), block, programs, warps)]
        _, splits, block, programs, warps = min(found)
        in_turn = itemsize == 4 or (pair is not None and splits <= TURNS)
        return _split_config(block, 3, programs, splits, in_turn, warps)

    def choose_tile(n, itemsize):
        return tile

    return (
        Configs(_norm_backward_row_kernel, ROW_CANDIDATES, choose_row, _suits_row, family),
        Configs(_norm_backward_split_kernel, SPLIT_CANDIDATES, choose_split, _suits_split, family),
        Configs(_norm_backward_sums_kernel, TILE_CANDIDATES, choose_tile, family=family),
        Configs(_norm_backward_tile_kernel, TILE_CANDIDATES, choose_tile, family=family),
        Configs(_norm_sum_parts_kernel, SUM_CANDIDATES, _choose_sum, family=family),
    )


def _power(n):
    # Two columns at least: a mask that is a constant keeps no product from fusing.
    return max(2, 1 << (n - 1).bit_length())


def _fitting(n):
    """An eighth of the next power of two: masks and single numbers leave few registers."""
    return n if n == _power(n) else max(2, _power(n) // 8)


def is_whole(n: int, itemsize: int) -> bool:
    """Whether one program holds a row of n."""
    return n <= UNALIGNED_COLUMNS if n % ALIGNED_ROW else n * itemsize <= ROW_BYTES


def _suits_row(candidate, n, itemsize):
    """Whether a tile is a power of two or of whole accesses, a thread has 16 to 112 bytes of it,
    and what is on its way fits: x, dy, ds."""
    rows, block, stages, programs, warps = candidate.values()
    chunks = -(-n // block)
    held = rows * chunks * block * itemsize
    accesses = rows == 1 and n > 2048 and block * itemsize == 32 * warps * ACCESS_BYTES
    full = ACCESS_BYTES <= held // (32 * warps) <= ROW_ACCESSES[itemsize] * ACCESS_BYTES
    room = 3 * (stages - 1) * programs * held <= shared_bytes(H200)
    return is_whole(n, itemsize) and (block == _power(n) or accesses) and full and room


def _suits_split(candidate, n, itemsize):
    """Whether a chunk is an access of each thread, these have 4 to 7, which fill the registers of a
    multiprocessor at least by half, and it holds its programs."""
    block, stages, programs, splits, _, warps, _ = candidate.values()
    chunks, full = chunks_of(n, splits, block)
    held = chunks * block * itemsize
    room = 3 * (stages - 1) * programs * held <= shared_bytes(H200)
    fits = (
        4 <= chunks <= ROW_ACCESSES[itemsize] and ROW_BYTES <= 2 * programs * held <= 2 * ROW_BYTES
    )
    accesses = block * itemsize == 32 * warps * ACCESS_BYTES
    return not is_whole(n, itemsize) and room and fits and accesses and full > 0


def _choose_sum(n, itemsize, shares):
    rows = min(shares, 128 if n <= 8192 else 64)
    return {"BLOCK_P": rows, "BLOCK_N": 2048 // rows, "num_warps": 4}


@triton.jit
def _norm_backward_row_kernel(
    x_ptr, dy_ptr, ds_ptr, weight_ptr, stats_ptr, dx_ptr, parts_ptr,
    stride_xm, stride_dym, stride_dsm, M, N,
    IS_LAYER_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_PTX: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PER_SM: tl.constexpr,
):  # fmt: skip
    """dx of whole rows, and for each program its partial sums of dw and db.

    xhat = (x - mean) rstd, g = w dy, c1 = mean(g xhat), c2 = mean(g) (0 in an RMS norm):
    dx = rstd (g - xhat c1 - c2) + ds; dw = sum over rows of dy xhat, db = sum over rows of dy.

    Grid: any number of programs. One takes every num_programs-th row, or a range of tiles of
    BLOCK_M > 1 rows. It keeps x, dy, w and its part of dw and db in registers, as NUM_CHUNKS chunks
    of BLOCK_N columns.

    Reads x, dy (and ds) [M, N] once, in rows stride_xm, stride_dym, stride_dsm apart, w [N] and
    stats (rstd [M], then mean [M] of a layer norm). Writes dx [M, N], and parts, float32: dw
    [programs, N] if there is a weight, then db [programs, N] if HAS_BIAS.

    NUM_FULL = N // BLOCK_N: the leading chunks, which need no mask. STAGES: rows loaded ahead, plus
    one. PER_SM: programs a multiprocessor, used by the host. HAS_PTX: the GPU is NVIDIA's.
    """
    program, num_programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    lanes = tl.arange(0, BLOCK_N)[None, :]
    HAS_WEIGHT: tl.constexpr = weight_ptr is not None
    weights, dw, db = (), (), ()
    if HAS_WEIGHT:
        one = tl.full((1, 1), 1, tl.int1)
        weights = load_chunks(weight_ptr, 0, N, lanes, one, NUM_CHUNKS, NUM_FULL, BLOCK_N)
        dw = zero_chunks(BLOCK_M, NUM_CHUNKS, BLOCK_N)
    if HAS_BIAS:
        db = zero_chunks(BLOCK_M, NUM_CHUNKS, BLOCK_N)
    # All programs read one region of memory at a time if they take rows in turn. Tiles of short
    # rows are faster in a range for each program (docs/lab/rms_norm.md).
    if BLOCK_M == 1:
        first_row, last_row, step = program, M, num_programs
    else:
        per_program = tl.cdiv(tl.cdiv(M, BLOCK_M), num_programs) * BLOCK_M
        first_row = program * per_program
        last_row, step = tl.minimum(first_row + per_program, M), BLOCK_M
    for start in tl.range(first_row, last_row, step, num_stages=STAGES):
        # 1. Load the rows.
        offs_m = start + tl.arange(0, BLOCK_M)
        mask_m = (offs_m < M) | (BLOCK_M == 1)
        rows, inside = offs_m[:, None], mask_m[:, None]  # [BLOCK_M, 1]
        xs = load_chunks(
            x_ptr + rows * stride_xm, 0, N, lanes, inside, NUM_CHUNKS, NUM_FULL, BLOCK_N
        )
        dys = load_chunks(
            dy_ptr + rows * stride_dym, 0, N, lanes, inside, NUM_CHUNKS, NUM_FULL, BLOCK_N
        )
        rstd = tl.load(stats_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        mean = 0.0
        if IS_LAYER_NORM:
            mean = tl.load(stats_ptr + M + offs_m, mask=mask_m, other=0.0)[:, None]
        # 2. Sum along the rows, and into dw and db.
        lanes_c1, lanes_c2, dw, db = accumulate(
            xs, dys, weights, dw, db, mean, rstd, opaque_zero(tl.cast(start, tl.int32)),
            IS_LAYER_NORM, HAS_WEIGHT, HAS_BIAS, HAS_PTX, NUM_CHUNKS,
        )  # fmt: skip
        if IS_LAYER_NORM:
            c1, c2 = tl.reduce((lanes_c1, lanes_c2), 1, add_pairs)
        else:
            c1 = tl.sum(lanes_c1, 1)
            c2 = tl.zeros((BLOCK_M,), tl.float32)
        # 3. Store dx.
        ds_row_ptr = ds_ptr
        if ds_ptr is not None:
            ds_row_ptr += rows * stride_dsm
        store_dx(
            dx_ptr + rows * N, ds_row_ptr, xs, dys, weights,
            (c1 / N)[:, None], (c2 / N)[:, None], mean, rstd, opaque_zero(c1)[:, None],
            0, N, lanes, inside,
            IS_LAYER_NORM, HAS_WEIGHT, HAS_PTX, NUM_CHUNKS, NUM_FULL, BLOCK_N,
        )  # fmt: skip
    if HAS_WEIGHT:
        store_sums(parts_ptr + program * N, dw, 0, N, lanes, NUM_CHUNKS, NUM_FULL, BLOCK_N)
        program += num_programs
    if HAS_BIAS:
        store_sums(parts_ptr + program * N, db, 0, N, lanes, NUM_CHUNKS, NUM_FULL, BLOCK_N)


@triton.jit
def _norm_sum_parts_kernel(
    parts_ptr, dw_ptr, db_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    """dw and db [N], the sums of their P parts each, always in the same order.

    Grid: cdiv(N, BLOCK_N), how many of dw and db there are. Reads parts, float32: [P, N] of dw if
    dw_ptr is not None, then [P, N] of db. A program sums BLOCK_N columns, BLOCK_P rows at a time.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    total = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    which = tl.program_id(1).to(tl.int64)
    for start in range(0, P, BLOCK_P):
        offs_p = which * P + start + tl.arange(0, BLOCK_P)
        mask = (offs_p[:, None] < (which + 1) * P) & mask_n[None, :]
        total += tl.load(parts_ptr + offs_p[:, None] * N + offs_n[None, :], mask=mask, other=0.0)
    total = tl.sum(total, 0)
    if dw_ptr is None:
        store_as(db_ptr + offs_n, total, mask_n)
    elif which == 0:
        store_as(dw_ptr + offs_n, total, mask_n)
    elif db_ptr is not None:
        store_as(db_ptr + offs_n, total, mask_n)


def norm_backward(
    configs: tuple[Configs, ...],
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    stats: torch.Tensor | None,
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    layer: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of `norm_forward`, of the dtypes of what they belong to.

    configs: as `backward_configs` returns them. x: what was normalized, [..., N]; weight, bias: [N]
    or None; stats: as the forward pass left them; dy: the gradient of y; ds: that of the sum, or
    None; layer: whether it was a layer norm. Returns dx (that of the residual too), dw and db, each
    None if there is no such vector.
    """
    dx, dw, db = torch.empty_like(x, memory_format=torch.contiguous_format), None, None
    if weight is not None:
        weight = weight.contiguous()
        dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if bias is not None:
        db = torch.empty_like(bias, memory_format=torch.contiguous_format)
    n, elements = x.shape[-1], x.numel()
    if elements == 0:
        return dx, None if dw is None else dw.zero_(), None if db is None else db.zero_()
    m, itemsize, device = elements // n, x.element_size(), x.device
    x, stride_xm = spaced(x, n)
    dy, stride_dym = spaced(dy, n)
    stride_dsm = 0
    if ds is not None:
        ds, stride_dsm = spaced(ds, n)
    vectors, parts = (weight is not None) + (bias is not None), None
    config, groups, chunks, full = row_plan(configs, n, itemsize, device, 2 + (ds is not None))
    if groups:
        splits = config.get("NUM_SPLITS", 1)
        programs = min(-(-m // config.get("BLOCK_M", 1)), groups)
        if vectors:
            parts = x.new_empty((vectors, programs, n), dtype=torch.float32)
        arguments = {
            "x_ptr": x, "dy_ptr": dy, "ds_ptr": ds, "weight_ptr": weight, "stats_ptr": stats,
            "dx_ptr": dx, "parts_ptr": parts, "stride_xm": stride_xm, "stride_dym": stride_dym,
            "stride_dsm": stride_dsm, "M": m, "N": n, "IS_LAYER_NORM": layer,
            "HAS_BIAS": bias is not None, "HAS_PTX": supports_spin_wait(device),
            "NUM_CHUNKS": chunks, "NUM_FULL": full, **config,
        }  # fmt: skip
        if splits > 1:
            slots = empty_slots(m, splits, device)
            _norm_backward_split_kernel[(programs * splits,)](slots_ptr=slots, **arguments)
        else:
            _norm_backward_row_kernel[(programs,)](**arguments)
    else:
        _, _, sums_of_rows, tiles, _ = configs
        config = sums_of_rows.pick(device, n=n, itemsize=itemsize)
        sums = x.new_empty((1 + layer, m, SPLITS), dtype=torch.float32)
        _norm_backward_sums_kernel[(-(-m // config["BLOCK_M"]), SPLITS)](
            x_ptr=x, dy_ptr=dy, weight_ptr=weight, stats_ptr=stats, sums_ptr=sums,
            stride_xm=stride_xm, stride_dym=stride_dym, M=m, N=n,
            IS_LAYER_NORM=layer, EVEN=n % config["BLOCK_N"] == 0, SPLITS=SPLITS, **config,
        )  # fmt: skip
        config = tiles.pick(device, n=n, itemsize=itemsize)
        columns = -(-n // config["BLOCK_N"])
        programs = -(-TILE_PROGRAMS * sm_count(device) // columns)
        programs = min(programs, -(-m // config["BLOCK_M"]))
        if vectors:
            parts = x.new_empty((vectors, programs, n), dtype=torch.float32)
        _norm_backward_tile_kernel[(columns, programs)](
            x_ptr=x, dy_ptr=dy, ds_ptr=ds, weight_ptr=weight, stats_ptr=stats, sums_ptr=sums,
            dx_ptr=dx, parts_ptr=parts, stride_xm=stride_xm, stride_dym=stride_dym,
            stride_dsm=stride_dsm, M=m, N=n, IS_LAYER_NORM=layer, HAS_BIAS=bias is not None,
            EVEN=n % config["BLOCK_N"] == 0, SPLITS=SPLITS, **config,
        )  # fmt: skip
    if vectors:
        shares = next((most for most in SHARES if programs <= most), SHARES[-1])
        config = configs[-1].pick(device, n=n, itemsize=itemsize, shares=shares)
        _norm_sum_parts_kernel[(-(-n // config["BLOCK_N"]), vectors)](
            parts_ptr=parts, dw_ptr=dw, db_ptr=db, P=programs, N=n, **config,
        )  # fmt: skip
    return dx, dw, db


def row_plan(
    configs: tuple[Configs, ...], n: int, itemsize: int, device: torch.device, tensors: int
) -> tuple[Config, int, int, int]:
    """Return how rows of n are held by one program, or by a group of them.

    tensors: how many of x, dy and ds are read. Returns the configuration, how many tiles of rows
    are worked on at a time, and the chunks and full chunks of a split. Tiles are 0 if the row fits
    neither the registers nor the shared memory of its programs, or if these may not wait for each
    other; else x and dy are read once.
    """
    whole = is_whole(n, itemsize)
    config = configs[0 if whole else 1].pick(device, n=n, itemsize=itemsize)
    splits, programs = config.get("NUM_SPLITS", 1), config["PER_SM"]
    chunks, full = chunks_of(n, splits, config["BLOCK_N"])
    held = chunks * config["BLOCK_N"] * itemsize
    on_the_way = (config["STAGES"] - 1) * tensors * held
    if whole:
        fits = on_the_way <= shared_bytes(device)
        return config, programs * sm_count(device) if fits else 0, chunks, full
    programs = min(programs, shared_bytes(device) // (on_the_way + SUMS_BYTES))
    if held > ROW_BYTES or not (programs and may_wait(device, splits, programs)):
        return config, 0, chunks, full
    return config, programs * sm_count(device) // splits, chunks, full


norm_backward = cached_launch(norm_backward)

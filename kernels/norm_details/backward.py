"""Backward pass of layer norm and RMS norm: dx, and the sums over rows that are dw and db.

A fixed number of programs share the rows. Each program reads its rows once, while the next ones are
on their way to shared memory, and keeps its part of dw and db in registers. The formulas and steps
of a row are in `norm_details/gradients.py`.

The kernel of this file takes whole rows. Longer rows are split among programs
(`norm_details/backward_split.py`). Two other kernels read x and dy twice, if the programs of a row
may not wait for each other or no such group can hold it (`norm_details/backward_two_pass.py`).
They are right for rows of any length. `norm_details/backward_tiles.py` chooses the tiles.

A last kernel adds the parts of dw and db in a fixed order, so the result is the same in each run.
The two-stage sum follows the layer norm tutorial of Triton, without its locks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .._runtime.call_cache import cached_launch
from .._runtime.configs import Config, Configs
from .._runtime.device import shared_bytes, sm_count
from .._runtime.layout import ACCESS_BYTES, rows_and_stride
from .._runtime.vector_access import access_items
from .._triton.exchange import empty_slots, may_wait, supports_spin_wait
from .._triton.memory import opaque_zero, store_as
from .backward_split import _norm_backward_split_kernel
from .backward_two_pass import _norm_backward_sums_kernel, _norm_backward_tile_kernel
from .columns import chunks_of, multiple
from .gradients import accumulate, load_chunks, store_dx, store_sums, zero_chunks
from .statistics import add_pairs

# The most bytes of a row that a program holds, with its part of dw and db.
ROW_BYTES = 32768
# The most columns of a row without whole accesses that a program holds, because masks and unpacked
# numbers take registers.
UNALIGNED_COLUMNS = 8192
# Shared memory of a program for its sums, and for the hardware itself.
SUMS_BYTES = 2048
# Programs that share the columns of a row if the sums along it have a kernel of their own.
SUMS_SPLITS = 8
# Programs for each multiprocessor that share the columns and the rows of the second read.
TILE_PROGRAMS = 8
# The numbers of parts of dw that the choice of a tile tells apart, each with those below it.
NUM_PARTIALS = (1, 2, 4, 8, 16, 32, 64, 128)


class Backward(NamedTuple):
    """The configurations of the backward kernels of a family."""

    row: Configs
    split: Configs
    sums: Configs
    tile: Configs
    parts: Configs


def norm_backward(
    configs: Backward,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    stats: torch.Tensor | None,
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    is_layer_norm: bool,
    unit_offset: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of `norm_forward`, in the dtypes of their tensors.

    Args:
        configs: the result of `backward_configs`.
        x: the tensor that was normalized, `[..., N]`; with a residual it is the sum.
        weight: `[N]`, or None.
        bias: `[N]`, or None.
        stats: the statistics of the forward pass; None if x is empty.
        dy: the gradient of y, `[..., N]`.
        ds: the gradient of the sum, `[..., N]`, or None.
        is_layer_norm: whether the mean was subtracted.
        unit_offset: whether 1 + weight stood in the place of the weight.

    Returns:
        dx, dw, db and dr. dx has the dtype of dy. dr is the gradient of the residual if the sum had
        another dtype than y, else None, and dx is that gradient too. dw and db are None if there is
        no such vector.
    """
    dx, dr, dw, db = x.new_empty(x.shape, dtype=dy.dtype), None, None, None
    if x.dtype != dy.dtype:
        dr = torch.empty_like(x, memory_format=torch.contiguous_format)
    if weight is not None:
        weight = weight.contiguous()
        dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if bias is not None:
        db = torch.empty_like(bias, memory_format=torch.contiguous_format)
    n, elements = x.shape[-1], x.numel()
    if elements == 0:
        return dx, None if dw is None else dw.zero_(), None if db is None else db.zero_(), dr
    m, itemsize, device = elements // n, x.element_size(), x.device
    x, stride_xm = rows_and_stride(x)
    dy, stride_dym = rows_and_stride(dy)
    stride_dsm = 0
    if ds is not None:
        ds, stride_dsm = rows_and_stride(ds)
    vectors, parts = (weight is not None) + (bias is not None), None
    items = access_items(dy.element_size(), n, stride_xm, stride_dym, stride_dsm)
    aligned, tensors = is_aligned(items, itemsize), 2 + (ds is not None)
    config, groups, chunks, full = row_plan(configs, n, itemsize, aligned, device, tensors)
    if groups:
        splits = config.get("NUM_SPLITS", 1)
        programs = min(-(-m // config.get("BLOCK_M", 1)), groups)
        if vectors:
            parts = x.new_empty((vectors, programs, n), dtype=torch.float32)
        arguments = {
            "x_ptr": x, "dy_ptr": dy, "ds_ptr": ds, "weight_ptr": weight, "stats_ptr": stats,
            "dx_ptr": dx, "dr_ptr": dr, "parts_ptr": parts, "stride_xm": stride_xm,
            "stride_dym": stride_dym, "stride_dsm": stride_dsm, "M": m, "N": n,
            "IS_LAYER_NORM": is_layer_norm, "UNIT_OFFSET": unit_offset,
            "HAS_BIAS": bias is not None, "HAS_PTX": supports_spin_wait(device),
            "ITEMS": items, "NUM_CHUNKS": chunks, "NUM_FULL": full, **config,
        }  # fmt: skip
        if splits > 1:
            slots = empty_slots(m, splits, device)
            _norm_backward_split_kernel[(programs * splits,)](slots_ptr=slots, **arguments)
        else:
            _norm_backward_row_kernel[(programs,)](**arguments)
    else:
        config = configs.sums.pick(device, n=n, itemsize=itemsize)
        sums = x.new_empty((1 + is_layer_norm, m, SUMS_SPLITS), dtype=torch.float32)
        _norm_backward_sums_kernel[(-(-m // config["BLOCK_M"]), SUMS_SPLITS)](
            x_ptr=x, dy_ptr=dy, weight_ptr=weight, stats_ptr=stats, sums_ptr=sums,
            stride_xm=stride_xm, stride_dym=stride_dym, M=m, N=n,
            IS_LAYER_NORM=is_layer_norm, UNIT_OFFSET=unit_offset, EVEN_N=n % config["BLOCK_N"] == 0,
            NUM_SPLITS=SUMS_SPLITS, **config,
        )  # fmt: skip
        config = configs.tile.pick(device, n=n, itemsize=itemsize)
        columns = -(-n // config["BLOCK_N"])
        programs = -(-TILE_PROGRAMS * sm_count(device) // columns)
        programs = min(programs, -(-m // config["BLOCK_M"]))
        if vectors:
            parts = x.new_empty((vectors, programs, n), dtype=torch.float32)
        _norm_backward_tile_kernel[(columns, programs)](
            x_ptr=x, dy_ptr=dy, ds_ptr=ds, weight_ptr=weight, stats_ptr=stats, sums_ptr=sums,
            dx_ptr=dx, dr_ptr=dr, parts_ptr=parts, stride_xm=stride_xm, stride_dym=stride_dym,
            stride_dsm=stride_dsm, M=m, N=n, IS_LAYER_NORM=is_layer_norm, UNIT_OFFSET=unit_offset,
            HAS_BIAS=bias is not None, EVEN_N=n % config["BLOCK_N"] == 0, NUM_SPLITS=SUMS_SPLITS,
            **config,
        )  # fmt: skip
    if vectors:
        most = next((most for most in NUM_PARTIALS if programs <= most), NUM_PARTIALS[-1])
        config = configs.parts.pick(device, n=n, itemsize=itemsize, num_partials=most)
        _norm_sum_parts_kernel[(-(-n // config["BLOCK_N"]), vectors)](
            parts_ptr=parts, dw_ptr=dw, db_ptr=db, P=programs, N=n, **config,
        )  # fmt: skip
    return dx, dw, db, dr


def row_plan(
    configs: Backward, n: int, itemsize: int, aligned: bool, device: torch.device, tensors: int
) -> tuple[Config, int, int, int]:
    """Return how one program, or a group of programs, holds rows of n.

    Args:
        configs: the result of `backward_configs`.
        n: columns of a row.
        itemsize: bytes of an element.
        aligned: whether rows are read in whole accesses, see `is_aligned`.
        device: the device of the tensors.
        tensors: how many of x, dy and ds are read.

    Returns:
        The configuration, the number of groups, and the chunks and full chunks of a split. There
        are 0 groups if the row fits neither the registers nor the shared memory of its programs,
        or if these may not wait for each other. Then x and dy are read twice.
    """
    whole, key = is_whole(n, itemsize, aligned), {"n": n, "itemsize": itemsize, "aligned": aligned}
    config = (configs.row if whole else configs.split).pick(device, **key)
    splits, programs = config.get("NUM_SPLITS", 1), config["PER_SM"]
    chunks, full = chunks_of(n, splits, config["BLOCK_N"])
    held = chunks * config["BLOCK_N"] * itemsize
    in_flight = (config["STAGES"] - 1) * tensors * held
    if whole:
        fits = in_flight <= shared_bytes(device)
        return config, programs * sm_count(device) if fits else 0, chunks, full
    programs = min(programs, shared_bytes(device) // (in_flight + SUMS_BYTES))
    if held > ROW_BYTES or not (programs and may_wait(device, splits, programs)):
        return config, 0, chunks, full
    return config, programs * sm_count(device) // splits, chunks, full


def is_whole(n: int, itemsize: int, aligned: bool) -> bool:
    """Return whether one program holds a row of n columns; aligned: see `is_aligned`."""
    return n * itemsize <= ROW_BYTES if aligned else n <= UNALIGNED_COLUMNS


def is_aligned(items: int, itemsize: int) -> bool:
    """Return whether elements are read in whole accesses; items: of which rows are multiples."""
    return items * itemsize >= ACCESS_BYTES


@triton.jit
def _norm_backward_row_kernel(
    x_ptr, dy_ptr, ds_ptr, weight_ptr, stats_ptr, dx_ptr, dr_ptr, parts_ptr,
    stride_xm, stride_dym, stride_dsm, M, N,
    IS_LAYER_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_PTX: tl.constexpr, ITEMS: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_FULL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PER_SM: tl.constexpr,
):  # fmt: skip
    """dx of whole rows, and for each program its partial sums of dw and db.

        dx = rstd (g - xhat c1 - c2) + ds, with xhat = (x - mean) rstd, g = w dy,
             c1 = mean(g xhat) and c2 = mean(g); mean and c2 are 0 in an RMS norm
        dw = sum over rows of dy xhat, db = sum over rows of dy

    Grid: any number of programs. One takes every num_programs-th row, or a range of tiles of
    BLOCK_M > 1 rows. It keeps x, dy, w and its part of dw and db in registers, as NUM_CHUNKS chunks
    of BLOCK_N columns.

    Reads x, dy (and ds) [M, N] once, in rows stride_xm, stride_dym, stride_dsm apart, w [N] and
    stats (rstd [M], then mean [M] of a layer norm). Writes dx [M, N], the same to dr unless its
    pointer is None, and parts, float32: dw [programs, N] if there is a weight, then db [programs,
    N] if HAS_BIAS. UNIT_OFFSET: 1 + w stands in the place of w.

    N and the strides are multiples of ITEMS. NUM_CHUNKS = cdiv(N, BLOCK_N). NUM_FULL = N //
    BLOCK_N: the chunks without a mask. STAGES: rows loaded ahead, plus one. PER_SM: programs a
    multiprocessor, used by the host. HAS_PTX: the GPU is NVIDIA's.
    """
    N, stride_xm = multiple(N, ITEMS), multiple(stride_xm, ITEMS)
    stride_dym, stride_dsm = multiple(stride_dym, ITEMS), multiple(stride_dsm, ITEMS)
    program, num_programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    lanes = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
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
            IS_LAYER_NORM, UNIT_OFFSET, HAS_WEIGHT, HAS_BIAS, HAS_PTX, NUM_CHUNKS,
        )  # fmt: skip
        if IS_LAYER_NORM:
            c1, c2 = tl.reduce((lanes_c1, lanes_c2), 1, add_pairs)
        else:
            c1 = tl.sum(lanes_c1, 1)
            c2 = tl.zeros((BLOCK_M,), tl.float32)
        # 3. Store dx.
        ds_row_ptr, dr_row_ptr = ds_ptr, dr_ptr
        if ds_ptr is not None:
            ds_row_ptr += rows * stride_dsm
        if dr_ptr is not None:
            dr_row_ptr += rows * N
        store_dx(
            dx_ptr + rows * N, dr_row_ptr, ds_row_ptr, xs, dys, weights,
            (c1 / N)[:, None], (c2 / N)[:, None], mean, rstd, opaque_zero(c1)[:, None],
            0, N, lanes, inside,
            IS_LAYER_NORM, UNIT_OFFSET, HAS_WEIGHT, HAS_PTX, NUM_CHUNKS, NUM_FULL, BLOCK_N,
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
    """dw and db [N], each the sum of P parts, always in the same order.

    Grid: cdiv(N, BLOCK_N), the number of vectors (dw, db or both). A program owns BLOCK_N columns
    of a vector, and adds BLOCK_P parts at a time.

    Reads parts, float32: [P, N] of dw unless dw_ptr is None, then [P, N] of db. Writes dw and db in
    their dtypes, each unless its pointer is None.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    sums = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    vector = tl.program_id(1).to(tl.int64)
    for start in range(0, P, BLOCK_P):
        offs_p = vector * P + start + tl.arange(0, BLOCK_P)
        mask = (offs_p[:, None] < (vector + 1) * P) & mask_n[None, :]
        sums += tl.load(parts_ptr + offs_p[:, None] * N + offs_n[None, :], mask=mask, other=0.0)
    sums = tl.sum(sums, 0)
    if dw_ptr is None:
        store_as(db_ptr + offs_n, sums, mask_n)
    elif vector == 0:
        store_as(dw_ptr + offs_n, sums, mask_n)
    elif db_ptr is not None:
        store_as(db_ptr + offs_n, sums, mask_n)


norm_backward = cached_launch(norm_backward)

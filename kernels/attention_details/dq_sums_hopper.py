"""Sums of dq in memory, and the kernels before and after them.

TMA adds dq to memory in float32. The sums lie as threads hold them. So each store to shared memory
has 16 bytes a thread, and no two of a warp wait for one bank. A first kernel writes
delta = rowsum(dO O) - dlse and sets the sums to zero. A last kernel rounds them, and puts them into
rows.
"""

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .hopper_tiles import flat
from .launch import like, strides_of

# Groups of warps that multiply.
GROUPS = gl.constexpr(2)
# Threads of a group.
THREADS = gl.constexpr(128)
# Rows of a program of the first kernel.
NEARBY_ROWS = 64


@builtin
def add_to_global(desc, coord, src, _semantic=None):
    """Start the addition of a block of shared memory to memory, by TMA."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle
    )


@gluon.jit
def no_dq_of(BLOCK_M: gl.constexpr, D: gl.constexpr):
    """Zeros for a group's part of a tile of dq: half the rows, or half the columns of 64 rows.

    A group that has half the rows reads half of dS.
    """
    ROWS: gl.constexpr = max(64, BLOCK_M // 2)
    COLUMNS: gl.constexpr = BLOCK_M * D // 2 // ROWS
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros([ROWS, COLUMNS], gl.float32, DQ)


@gluon.jit
def _as_held(dq):
    """dq [rows, columns] as [threads, numbers]: a thread's line is what it holds, in its order.

    No thread reads another's. A warp has 16 of 64 rows. A thread has two rows, 8 apart, and there
    two neighbours of each 8 columns. `rows_of_held` is the inverse.
    """
    PARTS: gl.constexpr = dq.shape[0] // 64
    EIGHTS: gl.constexpr = dq.shape[1] // 8
    NUMBERS: gl.constexpr = dq.shape[0] * dq.shape[1] // THREADS
    # Part, warp, half, line of threads, eight, thread of the line, number.
    places = gl.reshape(dq, (PARTS, 4, 2, 8, EIGHTS, 4, 2))
    lines = gl.reshape(gl.permute(places, (1, 3, 5, 0, 4, 2, 6)), (THREADS, NUMBERS))
    LINES: gl.constexpr = gl.BlockedLayout([1, NUMBERS], [32, 1], [4, 1], [1, 0])
    return gl.convert_layout(lines, LINES, assert_trivial=True)


@gluon.jit
def add_dq(dq, row, descs, rings, WHICH: gl.constexpr, BLOCK_M: gl.constexpr):
    """Start the addition of a group's part of a tile of dq, in rows from `row` on, to memory."""
    dq_desc, slot = descs[6], rings[7].index(WHICH)
    # The last tile's addition has read the slot.
    tma.store_wait(0)
    slot.store(_as_held(dq))
    fence_async_shared()
    # A tile has a line for each thread of both groups.
    line = row * (GROUPS * THREADS // BLOCK_M) + WHICH * THREADS
    add_to_global(dq_desc, [line, 0], slot)


@triton.jit
def _delta_kernel(
    out_ptr, dout_ptr, dlse_ptr, stats_ptr, m_ptr, delta_ptr, dq_ptr,
    stride_ob, stride_oh, stride_os, stride_dob, stride_doh, stride_dos, H, SQ, padded,
    D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO O) - dlse, m with infinity past the last row, and zeros for dq's sums.

    Grid: padded / BLOCK_M * B * H programs. A program owns BLOCK_M rows of one head.
    """
    tiles = padded // BLOCK_M
    tile, head = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // H, head % H
    offs_m, offs_d = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    inside, row = offs_m < SQ, offs_m.to(tl.int64)[:, None]
    out_ptrs = out_ptr + b * stride_ob + h * stride_oh + row * stride_os + offs_d[None, :]
    dout_ptrs = dout_ptr + b * stride_dob + h * stride_doh + row * stride_dos + offs_d[None, :]
    out = tl.load(out_ptrs, mask=inside[:, None], other=0.0).to(tl.float32)
    dout = tl.load(dout_ptrs, mask=inside[:, None], other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    place = head * SQ + offs_m
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + place, mask=inside, other=0.0)
    m = tl.load(stats_ptr + place, mask=inside, other=float("inf"))
    place = head * padded + offs_m
    tl.store(delta_ptr + place, delta)
    tl.store(m_ptr + place, m)
    zeros = tl.zeros((BLOCK_M, D), tl.float32)
    tl.store(dq_ptr + place[:, None] * D + offs_d[None, :], zeros)


@triton.jit
def rows_of_held(x, PART_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr):
    """A tile [BLOCK_M, D] of what lies as `_as_held` has it.

    PART_ROWS: the rows of a group's part.
    """
    EIGHTS: tl.constexpr = BLOCK_M * D // 2 // PART_ROWS // 8
    # Group, warp, line of threads, thread of the line, part of 64 rows, eight, half, number.
    x = tl.reshape(x, (2, 4, 8, 4, PART_ROWS // 64, EIGHTS, 2, 2))
    # The groups share rows, or columns.
    if PART_ROWS < BLOCK_M:
        x = tl.permute(x, (0, 4, 1, 6, 2, 5, 3, 7))
    else:
        x = tl.permute(x, (4, 1, 6, 2, 0, 5, 3, 7))
    return tl.reshape(x, (BLOCK_M, D))


@triton.jit
def _round_kernel(
    sums_ptr, dq_ptr, stride_dqb, stride_dqh, stride_dqs, H, SQ, padded, scale,
    PART_ROWS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dq = scale sums, rounded. Grid: padded / BLOCK_M * B * H programs of BLOCK_M rows.

    The sums lie as threads held them. BLOCK_M is that of the kernel that added them, PART_ROWS the
    rows of a group's part of its tile.
    """
    tiles = padded // BLOCK_M
    tile, head = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // H, head % H
    offs_m, offs_d = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    first = (head * padded + tile * BLOCK_M) * D
    sums = tl.load(sums_ptr + first + tl.arange(0, BLOCK_M * D))
    dq = (sums * tl.cast(scale, tl.float32)).to(dq_ptr.dtype.element_ty)
    row = offs_m.to(tl.int64)[:, None]
    dq_ptrs = dq_ptr + b * stride_dqb + h * stride_dqh + row * stride_dqs + offs_d[None, :]
    tl.store(dq_ptrs, rows_of_held(dq, PART_ROWS, BLOCK_M, D), mask=(offs_m < SQ)[:, None])


def begun(
    q: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rows of a head, padded, and m, delta and the sums of dq for so many rows.

    m and delta are [B * H * padded], the sums [B * H * padded, D] and zero. Arguments are those of
    `backward_hopper`.
    """
    b, h, sq, d = q.shape
    padded = -(-sq // 128) * 128
    m, delta = torch.empty((2, b * h * padded), dtype=torch.float32, device=q.device)
    sums = torch.empty((b * h * padded, d), dtype=torch.float32, device=q.device)
    _delta_kernel[(padded // NEARBY_ROWS * b * h,)](
        out_ptr=out, dout_ptr=dout, dlse_ptr=None if dlse is None else dlse.contiguous(),
        stats_ptr=stats, m_ptr=m, delta_ptr=delta, dq_ptr=sums,
        **strides_of(o=out, do=dout), **_nearby(q, padded),
    )  # fmt: skip
    return padded, m, delta, sums


def sums_of(sums: torch.Tensor, block_m: int) -> TensorDescriptor:
    """Return the descriptor of sums of dq by tiles of block_m rows: a line for each thread."""
    numbers = block_m * sums.shape[1] // (2 * THREADS.value)
    return flat(sums.view(-1, numbers), THREADS.value, numbers)


def rounding(block_m: int) -> dict[str, int]:
    """Return the tile of the kernel that rounds sums by tiles of so many rows.

    PART_ROWS: those of `no_dq_of`.
    """
    return {"BLOCK_M": block_m, "PART_ROWS": max(64, block_m // 2)}


def rounded(
    q: torch.Tensor, sums: torch.Tensor, padded: int, scale: float, block_m: int
) -> torch.Tensor:
    """Return dq from its sums, which came by tiles of block_m rows."""
    b, h = q.shape[:2]
    dq, tile = like(q), rounding(block_m)
    _round_kernel[(padded // tile["BLOCK_M"] * b * h,)](
        sums_ptr=sums, dq_ptr=dq, scale=scale, **strides_of(dq=dq), **_nearby(q, padded) | tile
    )
    return dq


def _nearby(q, padded):
    """The arguments that the first and the last kernel share."""
    h, sq, d = q.shape[1:]
    return {"H": h, "SQ": sq, "padded": padded, "D": d, "BLOCK_M": NEARBY_ROWS, "num_warps": 4}

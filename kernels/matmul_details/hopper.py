"""The product on Hopper: a group of warps copies, and two groups multiply half of a tile's rows.

The copying group fills a ring of slots; a slot holds one step of K of a and b. A multiplying group
has one product under way while it waits for the next slot. It waits for nothing but slots, so the
two groups fall out of step, and one multiplies while the other writes its tile. The ring goes on
through all tiles of a program, so the copies of a tile begin during the epilogue of the one before.
The first product of a tile begins the accumulators, and the divisions that find the tile run
beneath it. docs/lab/linear_cross_entropy.md has the cycles.

A residual comes through the ring too: after the steps of a tile, one slot for the rows of each
group. In the gated form a slot holds columns of b and as many of up, so one product computes both.
A tile leaves in parts, through slots of shared memory, by bulk stores; a buffer is added to by bulk
additions. Copies put zeros in the place of rows and columns that do not exist, and stores leave
them out, so every size is right.
"""

import functools

import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .._runtime.configs import Configs
from .._runtime.device import is_hopper
from . import cost
from .epilogue import activated

# Multiplying groups of four warps, and registers of their threads.
GROUPS = gl.constexpr(2)
REGISTERS = gl.constexpr(240)


@builtin
def _add_to_global(desc, coord, source, _semantic=None):
    """Start a bulk addition of shared memory to a tensor; Triton 3.6 has no name for it here."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, source.handle)


@gluon.jit
def tile_coords(pid, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """The row and the column of tile pid, in groups of GROUP_M rows of tiles."""
    first = pid // (GROUP_M * tiles_n) * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    within = pid % (GROUP_M * tiles_n)
    return first + within % rows, within // rows


@gluon.jit
def _tile(number, sizes, META: gl.constexpr):
    """The outer and inner batch, the row and the column of a tile of all batches."""
    tiles_m, tiles_n = sizes[0], sizes[1]
    BATCHED: gl.constexpr = META[5]
    GROUP_M: gl.constexpr = META[4]
    if BATCHED:
        batch = number // (tiles_m * tiles_n)
        tile_m, tile_n = tile_coords(number % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        return batch // sizes[3], batch % sizes[3], tile_m, tile_n
    else:
        tile_m, tile_n = tile_coords(number, tiles_m, tiles_n, GROUP_M)
        return number, number, tile_m, tile_n


@gluon.jit
def _copy(desc, slot, full, outer, inner, row, column, TURNED: gl.constexpr, STEPS: gl.constexpr):
    """Start the copy of a block that begins at (row, column), or TURNED at (column, row).

    STEPS: 2 if the outer batch moves the operand, plus 1 if the inner one does.
    """
    if TURNED:
        row, column = column, row
    if len(desc.block_type.shape) == 4:
        outer = outer if STEPS >= 2 else 0
        inner = inner if STEPS % 2 == 1 else 0
        tma.async_copy_global_to_shared(desc, [outer, inner, row, column], full, slot)
    else:
        tma.async_copy_global_to_shared(desc, [row, column], full, slot)


@gluon.jit
def copy_loop(descs, rings, barriers, epilogue, sizes, META: gl.constexpr):
    """Fill the slots of the ring for each tile of the program in turn."""
    a_desc, b_desc, up_desc, residual_desc = descs[:4]
    a_ring, b_ring, residual_ring = rings[:3]
    full, free = barriers
    tiles, steps_k = sizes[4], sizes[2]
    BLOCK_M: gl.constexpr = META[0]
    BLOCK_N: gl.constexpr = META[1]
    BLOCK_K: gl.constexpr = META[2]
    SLOTS: gl.constexpr = META[3]
    TURNED: gl.constexpr = META[6]
    STEPS: gl.constexpr = META[7]
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    # In the gated form a slot has two blocks of columns, of b and of up.
    BLOCKS: gl.constexpr = 1 if up_desc is None else 2
    COLUMNS: gl.constexpr = BLOCK_N // BLOCKS
    BYTES: gl.constexpr = GROUPS * a_desc.block_type.nbytes + BLOCKS * b_desc.block_type.nbytes
    step = 0
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        outer, inner, tile_m, tile_n = _tile(number, sizes, META)
        row, column = tile_m * BLOCK_M, tile_n * COLUMNS
        first = inner * steps_k if META[12] else 0
        for index in range(steps_k):
            slot = step % SLOTS
            mbarrier.wait(free.index(slot), step // SLOTS & 1 ^ 1)
            # No copy before all warps have seen that phase end. A warp that slept through the next
            # one as well would find the parity as it was, and wait for ever.
            gl.thread_barrier()
            mbarrier.expect(full.index(slot), BYTES)
            for group in gl.static_range(GROUPS):
                _copy(
                    a_desc, a_ring.index(GROUPS * slot + group), full.index(slot), outer, inner,
                    row + group * ROWS, (first + index) * BLOCK_K, TURNED[0], STEPS[0],
                )  # fmt: skip
            _copy(
                b_desc, b_ring.index(BLOCKS * slot), full.index(slot), outer, inner, column,
                (first + index) * BLOCK_K, TURNED[1], STEPS[1],
            )  # fmt: skip
            if up_desc is not None:
                _copy(
                    up_desc, b_ring.index(BLOCKS * slot + 1), full.index(slot), outer, inner,
                    column, (first + index) * BLOCK_K, TURNED[1], STEPS[1],
                )  # fmt: skip
            step += 1
        if residual_desc is not None:
            LEAVING: gl.constexpr = residual_desc.block_type.shape[-1]
            # Blocks of the residual in a slot, and those of a tile's columns.
            ROOM: gl.constexpr = residual_ring.shape[0] // SLOTS
            PARTS: gl.constexpr = COLUMNS // LEAVING
            for group in gl.static_range(GROUPS):
                slot = step % SLOTS
                mbarrier.wait(free.index(slot), step // SLOTS & 1 ^ 1)
                gl.thread_barrier()
                mbarrier.expect(full.index(slot), PARTS * residual_desc.block_type.nbytes)
                for part in gl.static_range(PARTS):
                    _copy(
                        residual_desc, residual_ring.index(ROOM * slot + part), full.index(slot),
                        outer, inner, row + group * ROWS, column + part * LEAVING, False, STEPS[2],
                    )  # fmt: skip
                step += 1


@gluon.jit
def _matrix(slot):
    """A slot without its dimensions of batches."""
    if len(slot.shape) == 4:
        slot = slot.reshape([slot.shape[2], slot.shape[3]])
    return slot


@gluon.jit
def _multiply(rings, full, step, acc, further, WHICH: gl.constexpr, META: gl.constexpr):
    """Start the products of a step after its copies; return accumulators still being written.

    further: False if nothing has been accumulated yet.
    """
    SLOTS: gl.constexpr = META[3]
    TURNED: gl.constexpr = META[6]
    slot = step % SLOTS
    mbarrier.wait(full.index(slot), step // SLOTS & 1)
    a, b = _matrix(rings[0].index(GROUPS * slot + WHICH)), _matrix(rings[4].index(slot))
    if TURNED[0]:
        a = a.permute((1, 0))
    if not TURNED[1]:
        b = b.permute((1, 0))
    return warpgroup_mma(a, b, acc, use_acc=further, is_async=True)


@gluon.jit
def _halves(x):
    """The left and the right half of the columns of x."""
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def _leave(
    x, desc, stage, place, TURN: gl.constexpr, WHICH: gl.constexpr, TURNS: gl.constexpr,
    ADDED: gl.constexpr,
):  # fmt: skip
    """Store columns of a tile as soon as a slot of the group is free.

    TURN: how many blocks of the tile left before; TURNS: how many leave in all.
    """
    outer, inner, row, column = place
    OWN: gl.constexpr = stage.shape[0] // GROUPS
    # Each tile begins with the first slot, so no more slots than blocks are used in turn.
    USED: gl.constexpr = OWN if OWN < TURNS else TURNS
    slot = stage.index(WHICH * OWN + TURN % USED)
    # A tile may end with any slot, so the first blocks of the next one wait for all stores of it.
    tma.store_wait(TURN if TURN < USED else USED - 1)
    _matrix(slot).store(x.to(desc.dtype))
    fence_async_shared()
    if len(desc.block_type.shape) == 4:  # noqa: SIM108  Triton takes one type of a choice
        coordinates = [outer, inner, row, column]
    else:
        coordinates = [row, column]
    if ADDED:
        _add_to_global(desc, coordinates, slot)
    else:
        tma.async_copy_shared_to_global(desc, coordinates, slot)


@gluon.jit
def _of_batch(ptr, place, step_outer, step_inner, META: gl.constexpr):
    """The address of the numbers of a tile's batch."""
    if META[5]:
        ptr += gl.cast(place[0], gl.int64) * step_outer + gl.cast(place[1], gl.int64) * step_inner
    return ptr


@gluon.jit
def _columns(ptr, first, stride, N, LEAVING: gl.constexpr):
    """The numbers of LEAVING columns that begin at first; zero for columns past the end."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LEAVING, 16])
    columns = first + gl.arange(0, LEAVING, gl.SliceLayout(0, LAYOUT))
    return gl.load(ptr + columns.to(gl.int64) * stride, mask=columns < N, other=0.0)


@gluon.jit
def _by_parts(ptr, first, stride, N, PARTS: gl.constexpr, LEAVING: gl.constexpr):
    """The numbers of a tile's columns, a tensor for each part."""
    found = ()
    for part in gl.static_range(PARTS):
        found = found + (_columns(ptr, first + part * LEAVING, stride, N, LEAVING),)  # noqa: RUF005
    return found


@gluon.jit
def _rows(ptr, first, stride, M, ROWS: gl.constexpr, LEAVING: gl.constexpr):
    """The numbers of ROWS rows that begin at first; zero for rows past the end."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LEAVING, 16])
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return gl.load(ptr + rows.to(gl.int64) * stride, mask=rows < M, other=0.0)


@gluon.jit
def _affine(
    x, bias, rows, columns, epilogue, place, PART: gl.constexpr, LEAVING: gl.constexpr,
    META: gl.constexpr,
):  # fmt: skip
    """scale rows columns x + bias, of one part of a tile; bias, rows and columns may be None.

    Factors of columns that were not loaded beneath the products are loaded here.
    """
    scale, columns_ptr, N, strides = epilogue[2], epilogue[4], epilogue[6], epilogue[7]
    if META[8]:
        x = x * scale
    if rows is not None:
        x = x * rows[:, None]
    if columns is not None:
        x = x * columns[PART][None, :]
    elif columns_ptr is not None:
        ptr = _of_batch(columns_ptr, place, strides[3], strides[4], META)
        x = x * _columns(ptr, place[3] + PART * LEAVING, strides[5], N, LEAVING)[None, :]
    if bias is not None:
        x = x + bias[PART].to(gl.float32)[None, :]
    return x


@gluon.jit
def _finish_part(
    x, y, descs, rings, epilogue, loaded, place, residual_first, PART: gl.constexpr,
    PARTS: gl.constexpr, WHICH: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """Finish the columns of one of the PARTS of a tile, and let them leave.

    x: float32 accumulators; y: those of up, or None. loaded: bias, bias of up, factors of rows and
    of columns.
    """
    out_desc, pre_desc, up_pre_desc = descs[4], descs[5], descs[6]
    bias, up_bias, rows, columns = loaded
    LEAVING: gl.constexpr = out_desc.block_type.shape[-1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LEAVING, 16])
    EACH: gl.constexpr = 1 + (pre_desc is not None) + (up_pre_desc is not None)
    TURNS: gl.constexpr = PARTS * EACH
    here = place[0], place[1], place[2], place[3] + PART * LEAVING
    x = gl.convert_layout(x, LAYOUT)
    x = _affine(x, bias, rows, columns, epilogue, place, PART, LEAVING, META)
    if pre_desc is not None:
        _leave(x, pre_desc, rings[3], here, PART * EACH, WHICH, TURNS, False)
    x = activated(x, META[9], META[10], out_desc.dtype == gl.bfloat16)
    if y is not None:
        y = gl.convert_layout(y, LAYOUT)
        y = _affine(y, up_bias, rows, columns, epilogue, place, PART, LEAVING, META)
        if up_pre_desc is not None:
            _leave(y, up_pre_desc, rings[3], here, PART * EACH + 1, WHICH, TURNS, False)
        x *= y
    if descs[3] is not None:
        x += _matrix(rings[2].index(residual_first + PART)).load(LAYOUT).to(gl.float32)
    _leave(x, out_desc, rings[3], here, PART * EACH + EACH - 1, WHICH, TURNS, META[11])


@gluon.jit
def _finish(
    x, y, descs, rings, epilogue, loaded, place, residual_first, PART: gl.constexpr,
    PARTS: gl.constexpr, WHICH: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """Finish columns of a tile and let them leave, in parts as wide as a slot.

    PART: which of the PARTS of the tile begins with the first column of x.
    """
    LEAVING: gl.constexpr = descs[4].block_type.shape[-1]
    if x.shape[1] > LEAVING:
        left, right = _halves(x)
        left_y, right_y = y, y
        if y is not None:
            left_y, right_y = _halves(y)
        HALF: gl.constexpr = x.shape[1] // LEAVING // 2
        _finish(
            left, left_y, descs, rings, epilogue, loaded, place, residual_first, PART, PARTS,
            WHICH, META,
        )  # fmt: skip
        _finish(
            right, right_y, descs, rings, epilogue, loaded, place, residual_first, PART + HALF,
            PARTS, WHICH, META,
        )  # fmt: skip
    # Columns past the end are left out. The branch also keeps the assembler from computing all
    # parts before the first one leaves.
    elif place[3] + PART * LEAVING < epilogue[6]:
        _finish_part(
            x, y, descs, rings, epilogue, loaded, place, residual_first, PART, PARTS, WHICH, META
        )  # fmt: skip


@gluon.jit
def multiply_loop(
    descs, rings, barriers, epilogue, sizes, META: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """Multiply and write the rows of one group in each tile of the program."""
    steps_k, tiles = sizes[2], sizes[4]
    BLOCK_M: gl.constexpr = META[0]
    BLOCK_N: gl.constexpr = META[1]
    SLOTS: gl.constexpr = META[3]
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    COLUMNS: gl.constexpr = BLOCK_N if descs[2] is None else BLOCK_N // 2
    LEAVING: gl.constexpr = descs[4].block_type.shape[-1]
    PARTS: gl.constexpr = COLUMNS // LEAVING
    bias_ptr, up_bias_ptr, scale = epilogue[:3]
    rows_ptr, columns_ptr, M, N, strides = epilogue[3:]
    A_PER_TENSOR: gl.constexpr = META[13][0]
    B_PER_TENSOR: gl.constexpr = META[13][1]
    # One number for all rows or columns joins scale, and no factor of a row or column is left.
    if A_PER_TENSOR:
        scale, rows_ptr = scale * gl.load(rows_ptr), None
    if B_PER_TENSOR:
        scale, columns_ptr = scale * gl.load(columns_ptr), None
    epilogue = bias_ptr, up_bias_ptr, scale, rows_ptr, columns_ptr, M, N, strides
    # An instruction takes 32 bytes of K.
    INNER: gl.constexpr = 32 * ROWS * META[2] // descs[0].block_type.nbytes
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, INNER])
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
    full, free = barriers
    step = 0
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = _multiply(rings, full, step, zeros, False, WHICH, META)
        outer, inner, tile_m, tile_n = _tile(number, sizes, META)
        place = outer, inner, tile_m * BLOCK_M + WHICH * ROWS, tile_n * COLUMNS
        # The operands of the epilogue travel beneath the products of the tile. Factors of columns
        # do so without biases only: the registers do not hold both.
        bias, up_bias, rows, columns = None, None, None, None
        if bias_ptr is not None:
            bias = _by_parts(bias_ptr, place[3], 1, N, PARTS, LEAVING)
        if up_bias_ptr is not None:
            up_bias = _by_parts(up_bias_ptr, place[3], 1, N, PARTS, LEAVING)
        if rows_ptr is not None:
            ptr = _of_batch(rows_ptr, place, strides[0], strides[1], META)
            rows = _rows(ptr, place[2], strides[2], M, ROWS, LEAVING)
        if columns_ptr is not None and bias_ptr is None and up_bias_ptr is None:
            ptr = _of_batch(columns_ptr, place, strides[3], strides[4], META)
            columns = _by_parts(ptr, place[3], strides[5], N, PARTS, LEAVING)
        acc = warpgroup_mma_wait(1, (acc,))
        for _ in range(1, steps_k):
            step += 1
            acc = _multiply(rings, full, step, acc, True, WHICH, META)
            acc = warpgroup_mma_wait(1, (acc,))
            mbarrier.arrive(free.index((step - 1) % SLOTS), count=1)
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(free.index(step % SLOTS), count=1)
        step += 1
        residual_first = 0
        if descs[3] is not None:
            # Each group sees every slot full: the parity of a barrier tells one phase from the
            # next only.
            for group in gl.static_range(GROUPS):
                mbarrier.wait(full.index((step + group) % SLOTS), (step + group) // SLOTS & 1)
            residual_first = (step + WHICH) % SLOTS * (rings[2].shape[0] // SLOTS)
            mbarrier.arrive(free.index((step + 1 - WHICH) % SLOTS), count=1)
        if descs[2] is None:
            x, y = acc, None
        else:
            x, y = _halves(acc)
        _finish(
            x, y, descs, rings, epilogue, (bias, up_bias, rows, columns), place, residual_first, 0,
            PARTS, WHICH, META,
        )  # fmt: skip
        if descs[3] is not None:
            mbarrier.arrive(free.index((step + WHICH) % SLOTS), count=1)
            step += GROUPS
    tma.store_wait(0)


@gluon.jit
def multiply_0(descs, rings, barriers, epilogue, sizes, META: gl.constexpr):
    """`multiply_loop` of the first four multiplying warps."""
    multiply_loop(descs, rings, barriers, epilogue, sizes, META, 0)


@gluon.jit
def multiply_1(descs, rings, barriers, epilogue, sizes, META: gl.constexpr):
    """`multiply_loop` of the second four multiplying warps."""
    multiply_loop(descs, rings, barriers, epilogue, sizes, META, 1)


@gluon.jit
def _ring(desc, COUNT: gl.constexpr):
    """A ring of COUNT slots in shared memory, each for a block of a descriptor."""
    SHAPE: gl.constexpr = [COUNT] + desc.block_type.shape  # noqa: RUF005  no stars in Triton
    return gl.allocate_shared_memory(desc.dtype, SHAPE, desc.layout)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers in shared memory, each of which ARRIVALS arrivals complete."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=ARRIVALS)
    return barriers


@gluon.jit
def matmul_hopper_kernel(
    a_desc, b_desc, up_desc, residual_desc, out_desc, pre_desc, up_pre_desc, bias_ptr, up_bias_ptr,
    a_scale_ptr, b_scale_ptr, stride_x0, stride_x1, stride_xm, stride_y0, stride_y1, stride_yn,
    scale, inner_batches, batches, M, N, K,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, A_STEPS: gl.constexpr, B_STEPS: gl.constexpr,
    R_STEPS: gl.constexpr, A_PER_TENSOR: gl.constexpr, B_PER_TENSOR: gl.constexpr,
    BATCHED: gl.constexpr, PARTED: gl.constexpr, SCALED: gl.constexpr, ACTIVATION: gl.constexpr,
    PRECISE: gl.constexpr, ACCUMULATE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    SLOTS: gl.constexpr, LEAVING_SLOTS: gl.constexpr,
):  # fmt: skip
    """out = activation(scale a b + bias) (scale a up + up_bias) + residual, for what TMA can read.

    Grid: programs, one a multiprocessor at most, which stride over the tiles of all batches. The
    first four warps copy; the other two groups of four have half of the rows of a tile each. Reads
    a [M, K], b and up [K, N] and residual [M, N] by descriptors. Reads bias and up_bias [N], and
    a_scale [M] and b_scale [N], the factors of rows and columns, by pointers. A_PER_TENSOR,
    B_PER_TENSOR: a_scale or b_scale is one number for all batches instead. A group loads it once
    and multiplies it into scale.
    Writes out, pre and up_pre [M, N] by descriptors; each but a, b and out may be None. With
    ACCUMULATE the result is added to out. Accumulates in float32.

    A tile has BLOCK_M rows and BLOCK_N columns, of which b and up have half each if up is not None.
    Blocks of a_desc: [BLOCK_M / 2, BLOCK_K], or A_TURNED that of a transposed. Blocks of b_desc and
    up_desc: [columns, BLOCK_K] of b transposed, or B_TURNED that of b. The others have blocks of
    BLOCK_M / 2 rows, and as many columns as leave at a time. BATCHED: descriptors have two
    dimensions of batches before these, with blocks of one. A_STEPS, B_STEPS, R_STEPS: 2 if the
    outer batch moves a, b or the residual, plus 1 if the inner one does. PARTED: inner batches are
    equal parts of K instead, in whole steps; copies put zeros past the end. SLOTS: of the ring.
    LEAVING_SLOTS: of a group for columns that leave. GROUP_M: rows of tiles that share columns of b
    in the L2 cache. The rows of a group in a residual fit in the place of b in a slot.
    """
    COLUMNS: gl.constexpr = BLOCK_N if up_desc is None else BLOCK_N // 2
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, COLUMNS)
    steps_k = gl.cdiv(K, BLOCK_K)
    if PARTED:
        steps_k = gl.cdiv(steps_k, inner_batches)
    sizes = tiles_m, tiles_n, steps_k, inner_batches, tiles_m * tiles_n * batches
    a_ring = _ring(a_desc, GROUPS * SLOTS)
    b_ring = _ring(b_desc, SLOTS if up_desc is None else 2 * SLOTS)
    both = b_ring
    residual_ring = b_ring
    if up_desc is not None:
        ROWS: gl.constexpr = BLOCK_K if B_TURNED else BLOCK_N
        SHAPE: gl.constexpr = [SLOTS, ROWS, BLOCK_N * BLOCK_K // ROWS]
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE[1:], b_desc.dtype)
        both = b_ring._reinterpret(b_desc.dtype, SHAPE, LAYOUT)
    if residual_desc is not None:
        BYTES: gl.constexpr = b_ring.shape[0] // SLOTS * b_desc.block_type.nbytes
        ROOM: gl.constexpr = BYTES // residual_desc.block_type.nbytes
        BLOCKS: gl.constexpr = [SLOTS * ROOM] + residual_desc.block_type.shape  # noqa: RUF005
        residual_ring = b_ring._reinterpret(residual_desc.dtype, BLOCKS, residual_desc.layout)
    stage = _ring(out_desc, GROUPS * LEAVING_SLOTS)
    barriers = _barriers(SLOTS, 1), _barriers(SLOTS, GROUPS)
    fence_async_shared()
    descs = a_desc, b_desc, up_desc, residual_desc, out_desc, pre_desc, up_pre_desc
    rings = a_ring, b_ring, residual_ring, stage, both
    strides = stride_x0, stride_x1, stride_xm, stride_y0, stride_y1, stride_yn
    epilogue = bias_ptr, up_bias_ptr, scale, a_scale_ptr, b_scale_ptr, M, N, strides
    META: gl.constexpr = (
        BLOCK_M, BLOCK_N, BLOCK_K, SLOTS, GROUP_M, BATCHED, (A_TURNED, B_TURNED),
        (A_STEPS, B_STEPS, R_STEPS), SCALED or A_PER_TENSOR or B_PER_TENSOR, ACTIVATION, PRECISE,
        ACCUMULATE, PARTED, (A_PER_TENSOR, B_PER_TENSOR),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (copy_loop, (descs, rings, barriers, epilogue, sizes, META)),
            (multiply_0, (descs, rings, barriers, epilogue, sizes, META)),
            (multiply_1, (descs, rings, barriers, epilogue, sizes, META)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def _config(m, n, k, group, slots, leaving_slots):
    return {
        "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group, "SLOTS": slots,
        "LEAVING_SLOTS": leaving_slots, "num_warps": 4,
    }  # fmt: skip


CONFIGS = (
    _config(128, 256, 64, 8, 4, 2),
    _config(128, 256, 64, 8, 3, 4),
    _config(256, 128, 64, 8, 4, 1),
    _config(128, 128, 64, 8, 6, 2),
    _config(128, 64, 128, 8, 4, 1),
)


def choose(
    m, n, k, batches, sms, shared, itemsize, transposed, activation, gated, staged, whole_sectors
):  # fmt: skip
    """Return the configuration that ends first."""

    def us(config):
        # In the gated form a tile has half of its columns from either factor.
        tile, columns = (config["BLOCK_M"], config["BLOCK_N"]), n * (1 + gated)
        return cost.tiles_us(
            cost.HOPPER, tile, m, columns, k, batches, sms, itemsize, whole_sectors
        )

    # A slot has as many bytes for items of 8 bits.
    best = min(CONFIGS, key=us)
    return best if itemsize == 2 else {**best, "BLOCK_K": 2 * best["BLOCK_K"]}


HOPPER = Configs(matmul_hopper_kernel, CONFIGS, choose, family="matmul")


def suits(walk, config) -> bool:
    """Return whether the kernel takes the operands of a launch with a configuration."""
    a, residual = (walk.operands[name] for name in ("a", "residual"))
    if not is_hopper(a.matrix.device) or a.matrix.dtype == torch.int8:
        return False
    if residual is None:
        return True
    # The rows of a group lie in the place of b in a slot.
    rows = config["BLOCK_M"] // GROUPS.value * residual.matrix.element_size()
    return residual.describable() and rows <= config["BLOCK_K"] * a.matrix.element_size()


@functools.cache
def _layout(dtype, *block):
    kinds = {
        torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32,
        torch.float8_e4m3fn: gl.float8e4nv,
    }  # fmt: skip
    return gl.NVMMASharedLayout.get_default_for(block, kinds[dtype])


def _described(operand, walk, *block):
    """A descriptor of the matrices of an operand, or None."""
    if operand is None:
        return None
    x = operand.matrix
    shape, strides, block = map(list, walk.described(operand, block))
    return TensorDescriptor(x, shape, strides, block, _layout(x.dtype, *block))


def leaving_columns(dtype, columns):
    """Return how many columns of a tile leave at a time: 128 bytes."""
    return min(128 // dtype.itemsize, columns)


def launch_product(walk, epilogue, config, sms):
    """Start the kernel for the operands of a launch, which TMA can read.

    epilogue: arguments of the kernel that all launches of a product share.
    """
    a, b, up, out = (walk.operands[name] for name in ("a", "b", "up", "out"))
    a_turned, b_turned = a.by_columns(), not b.by_columns()
    (m, k), n = a.matrix.shape, b.matrix.shape[1]
    rows, inner = config["BLOCK_M"] // GROUPS.value, config["BLOCK_K"]
    columns = config["BLOCK_N"] // (1 if up is None else 2)
    own = (lambda x: x) if b_turned else (lambda x: x and x.transposed)
    b_block = (inner, columns) if b_turned else (columns, inner)
    leaving = rows, leaving_columns(out.matrix.dtype, columns)
    tiles = -(-m // config["BLOCK_M"]) * -(-n // columns) * walk.count
    residual, a_scale, b_scale = (
        walk.operands[name] for name in ("residual", "a_scale", "b_scale")
    )
    matmul_hopper_kernel[(min(sms, tiles),)](
        a_desc=_described(a.transposed, walk, inner, rows)
        if a_turned
        else _described(a, walk, rows, inner),
        b_desc=_described(own(b), walk, *b_block), up_desc=_described(own(up), walk, *b_block),
        **{
            f"{name}_desc": _described(walk.operands[name], walk, *leaving)
            for name in ("residual", "out", "pre", "up_pre")
        },
        inner_batches=walk.sizes[1], batches=walk.count, M=m, N=n, K=k, A_TURNED=a_turned,
        B_TURNED=b_turned, A_STEPS=a.moving(), B_STEPS=b.moving(),
        R_STEPS=0 if residual is None else residual.moving(),
        A_PER_TENSOR=a_scale is not None and a_scale.is_one_number(),
        B_PER_TENSOR=b_scale is not None and b_scale.is_one_number(),
        BATCHED=walk.count > 1, PARTED=walk.parted, **epilogue, **config,
    )  # fmt: skip

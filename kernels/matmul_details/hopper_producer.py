"""The producer of the product on Hopper: a group of warps that copies into the ring of slots.

The ring goes on through all tiles of a program. A slot holds one step of K of a and b, and in the
gated form of up. After the steps of a tile the rows of a residual come, a slot for each group.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .hopper_tiles import GROUPS, batched_tile_coords


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
        outer, inner, tile_m, tile_n = batched_tile_coords(number, sizes, META)
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

"""The consumers of the product on Hopper: two groups of warps, each with half of a tile's rows.

A group multiplies the steps of K in the slots of the ring, with one product under way while it
waits for the next slot. `hopper_epilogue.py` has the rest of a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_epilogue import by_parts, finish, of_batch, rows_from
from .hopper_tiles import GROUPS, as_matrix, batched_tile_coords, halves


@gluon.jit
def _multiply(rings, full, step, acc, further, WHICH: gl.constexpr, META: gl.constexpr):
    """Start the products of a step after its copies; return accumulators still being written.

    further: False if nothing has been accumulated yet.
    """
    SLOTS: gl.constexpr = META[3]
    TURNED: gl.constexpr = META[6]
    slot = step % SLOTS
    mbarrier.wait(full.index(slot), step // SLOTS & 1)
    a, b = as_matrix(rings[0].index(GROUPS * slot + WHICH)), as_matrix(rings[4].index(slot))
    if TURNED[0]:
        a = a.permute((1, 0))
    if not TURNED[1]:
        b = b.permute((1, 0))
    return warpgroup_mma(a, b, acc, use_acc=further, is_async=True)


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
        outer, inner, tile_m, tile_n = batched_tile_coords(number, sizes, META)
        place = outer, inner, tile_m * BLOCK_M + WHICH * ROWS, tile_n * COLUMNS
        # The operands of the epilogue travel beneath the products of the tile. Factors of columns
        # do so without biases only: the registers do not hold both.
        bias, up_bias, rows, columns = None, None, None, None
        if bias_ptr is not None:
            bias = by_parts(bias_ptr, place[3], 1, N, PARTS, LEAVING)
        if up_bias_ptr is not None:
            up_bias = by_parts(up_bias_ptr, place[3], 1, N, PARTS, LEAVING)
        if rows_ptr is not None:
            ptr = of_batch(rows_ptr, place, strides[0], strides[1], META)
            rows = rows_from(ptr, place[2], strides[2], M, ROWS, LEAVING)
        if columns_ptr is not None and bias_ptr is None and up_bias_ptr is None:
            ptr = of_batch(columns_ptr, place, strides[3], strides[4], META)
            columns = by_parts(ptr, place[3], strides[5], N, PARTS, LEAVING)
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
            x, y = halves(acc)
        finish(
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

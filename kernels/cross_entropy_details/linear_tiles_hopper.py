"""The tiles of `linear_tiles.py` on Hopper: two warpgroups that fall out of step.

A tile has 128 rows and 256 classes; each group multiplies 64 rows. The weight has one ring of
slots, which both groups read. Each group has a ring of its own for its rows of x. Nothing else
holds the groups together, so the tensor cores work for one group while the other computes
exponentials. The first products of a tile put no zeros into accumulators. The divisions that find
the next tile run while products are under way. docs/lab/linear_cross_entropy.md has the cycles.

The number of rows is free: a group whose rows do not exist multiplies the zeros that TMA puts in
their place. The number of classes must be a multiple of 256. The idea that groups take turns, so
that products need not wait for exponentials, is from QuACK 0.6.5 (Apache 2.0). Its groups have a
tile of 128 x 192 each.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .._runtime.configs import Config
from .._runtime.device import sm_count
from .._triton.math import LOG2E

GROUPS = gl.constexpr(2)
# Rows of a group, classes and columns of a tile.
ROWS, CLASSES, INNER = 64, 256, 64
# Slots of the ring of weight and of each group's ring of x, 208 KB in all.
SLOTS, OWN_SLOTS = gl.constexpr(5), gl.constexpr(3)
# Registers of a thread of the second group; the accumulators take 128.
REGISTERS = gl.constexpr(240)
CONFIGS = tuple({"GROUP_M": group, "num_warps": 4} for group in (16, 32, 8))


def choose(v, h):
    return CONFIGS[0]


def suits(v: int, h: int) -> bool:
    """Return whether every tile of classes is full and has more steps than the ring has slots."""
    return v % CLASSES == 0 and h > INNER * SLOTS.value


@gluon.jit
def tile_coords(pid, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """The row and the column of tile pid, in groups of GROUP_M rows of tiles."""
    first = pid // (GROUP_M * tiles_n) * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    within = pid % (GROUP_M * tiles_n)
    return first + within % rows, within // rows


@gluon.jit
def _fetch_weight(operands, barriers, step, tile_n, inner):
    """Start the copy of the weight of a step, into a slot that both groups have released."""
    desc, ring, full = operands[1], operands[3], barriers[1]
    slot = step % SLOTS
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(
        desc, [tile_n * desc.block_type.shape[0], inner * desc.block_type.shape[1]],
        full.index(slot), ring.index(slot),
    )  # fmt: skip


@gluon.jit
def _fetch_rows(operands, barriers, step, tile_m, inner, WHICH: gl.constexpr):
    """Start the copy of a group's rows of a step, into a slot that the group has released."""
    desc, ring, full = operands[0], operands[2], barriers[0]
    slot = WHICH * OWN_SLOTS + step % OWN_SLOTS
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(
        desc,
        [(tile_m * GROUPS + WHICH) * desc.block_type.shape[0], inner * desc.block_type.shape[1]],
        full.index(slot), ring.index(slot),
    )  # fmt: skip


@gluon.jit
def _multiply(operands, barriers, step, acc, further, WHICH: gl.constexpr):
    """Start the products of a step after both copies; return accumulators still being written.

    further: False if nothing has been accumulated yet.
    """
    slot, own_slot = step % SLOTS, WHICH * OWN_SLOTS + step % OWN_SLOTS
    mbarrier.wait(barriers[1].index(slot), step // SLOTS & 1)
    mbarrier.wait(barriers[0].index(own_slot), step // OWN_SLOTS & 1)
    return warpgroup_mma(
        operands[2].index(own_slot), operands[3].index(slot).permute((1, 0)), acc,
        use_acc=further, is_async=True,
    )  # fmt: skip


@gluon.jit
def release_and_refill(
    operands, barriers, step, inner, steps_h, here, after, more, WHICH: gl.constexpr,
):  # fmt: skip
    """Release the slots of a step whose products have ended, and refill them.

    The group refills its slot of rows; the second group refills that of the weight. The new content
    is as many steps ahead as there are slots, in the same tile or, if there is one, the next.
    tests/kernels/test_hopper_protocol.py visits every order.
    """
    gl.thread_barrier()
    ahead = inner + OWN_SLOTS
    same = ahead < steps_h
    if same or more:
        _fetch_rows(
            operands, barriers, step + OWN_SLOTS, gl.where(same, here[0], after[0]),
            gl.where(same, ahead, ahead - steps_h), WHICH,
        )  # fmt: skip
    if WHICH == 0:
        mbarrier.arrive(barriers[2].index(step % SLOTS), count=1)
    else:
        ahead = inner + SLOTS
        same = ahead < steps_h
        if same or more:
            mbarrier.wait(barriers[2].index(step % SLOTS), step // SLOTS & 1)
            # No copy before all warps have seen that phase end. A warp that slept through the next
            # one as well would find the parity as it was, and wait for ever.
            gl.thread_barrier()
            _fetch_weight(
                operands, barriers, step + SLOTS, gl.where(same, here[1], after[1]),
                gl.where(same, ahead, ahead - steps_h),
            )  # fmt: skip


@gluon.jit
def _halves(x):
    """The left and the right half of the columns of x."""
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def _write_part(acc, part_ptrs, further, mask):
    """Store m of each row and, `further` on, l = sum exp(x - m)."""
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    a, b = _halves(acc)
    m = gl.convert_layout(gl.max(gl.maximum(a, b), 1), rows)
    # A row that has only minus infinity must not subtract it from itself.
    m_safe = gl.where(m == -float("inf"), 0.0, m) * LOG2E
    a, b = _halves(acc * LOG2E - m_safe[:, None])
    l = gl.convert_layout(gl.sum(gl.exp2(a) + gl.exp2(b), 1), rows)
    gl.store(part_ptrs, m, mask=mask)
    gl.store(part_ptrs + further, l, mask=mask)


@gluon.jit
def consumer_loop(
    operands, barriers, parts_ptr, M, sizes,
    WHICH: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Multiply the rows of one group in each tile of the program, and store their m and l."""
    tiles_m, tiles_n, steps_h = sizes
    ROWS: gl.constexpr = operands[2].shape[1]
    CLASSES: gl.constexpr = operands[3].shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CLASSES, 16])
    zeros = gl.zeros([ROWS, CLASSES], gl.float32, LAYOUT)
    tiles, programs = tiles_m * tiles_n, gl.num_programs(0)
    here = tile_coords(gl.program_id(0), tiles_m, tiles_n, GROUP_M)
    for step in gl.static_range(OWN_SLOTS):
        _fetch_rows(operands, barriers, step, here[0], step, WHICH)
    if WHICH > 0:
        for step in gl.static_range(SLOTS):
            _fetch_weight(operands, barriers, step, here[1], step)
    step = 0
    for pid in range(gl.program_id(0), tiles, programs):
        acc = _multiply(operands, barriers, step, zeros, False, WHICH)
        after = tile_coords(pid + programs, tiles_m, tiles_n, GROUP_M)
        more = pid + programs < tiles
        acc = warpgroup_mma_wait(1, (acc,))
        for inner in range(1, steps_h):
            step += 1
            acc = _multiply(operands, barriers, step, acc, True, WHICH)
            acc = warpgroup_mma_wait(1, (acc,))
            release_and_refill(
                operands, barriers, step - 1, inner - 1, steps_h, here, after, more, WHICH
            )
        acc = warpgroup_mma_wait(0, (acc,))
        release_and_refill(operands, barriers, step, steps_h - 1, steps_h, here, after, more, WHICH)
        step += 1
        offs_m = (here[0] * GROUPS + WHICH) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        part_ptrs = parts_ptr + offs_m.to(gl.int64) * tiles_n + here[1]
        _write_part(acc, part_ptrs, gl.cast(M, gl.int64) * tiles_n, offs_m < M)
        here = after


@gluon.jit
def warpgroup_0(operands, barriers, parts_ptr, M, sizes, GROUP_M: gl.constexpr):
    """`consumer_loop` of the first four warps."""
    consumer_loop(operands, barriers, parts_ptr, M, sizes, 0, GROUP_M)


@gluon.jit
def warpgroup_1(operands, barriers, parts_ptr, M, sizes, GROUP_M: gl.constexpr):
    """`consumer_loop` of the second four warps."""
    consumer_loop(operands, barriers, parts_ptr, M, sizes, 1, GROUP_M)


@gluon.jit
def _ring(desc, COUNT: gl.constexpr):
    """A ring of COUNT slots in shared memory, each for a block of a descriptor."""
    rows: gl.constexpr = desc.block_type.shape[0]
    return gl.allocate_shared_memory(
        desc.dtype, [COUNT, rows, desc.block_type.shape[1]], desc.layout
    )


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    """COUNT barriers in shared memory, each of which one arrival completes."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=1)
    return barriers


@gluon.jit
def linear_tiles_hopper_kernel(x_desc, weight_desc, parts_ptr, M, V, H, GROUP_M: gl.constexpr):
    """m = max z and l = sum exp(z - m) of each row and tile of classes of the logits z = x wᵀ.

    Grid: programs, one a multiprocessor at most. A program takes every such tile of 128 rows and
    256 classes in turn; its first four warps have the first 64 rows, the other four the rest. Reads
    x [M, H] and weight [V, H] by descriptors of blocks [64, 64] and [256, 64]. Writes parts
    float32 [2, M, V / 256], maxima and then sums. Needs V % 256 == 0 and more blocks of 64 columns
    than SLOTS; rows past M are zeros and are not written. GROUP_M: rows of tiles that stay beside
    each other.
    """
    sizes = (
        gl.cdiv(M, GROUPS * x_desc.block_type.shape[0]),
        V // weight_desc.block_type.shape[0],
        gl.cdiv(H, x_desc.block_type.shape[1]),
    )
    x_ring, weight_ring = _ring(x_desc, GROUPS * OWN_SLOTS), _ring(weight_desc, SLOTS)
    # Barriers of full slots of rows, of full slots of the weight, and of free ones of the weight.
    barriers = _barriers(GROUPS * OWN_SLOTS), _barriers(SLOTS), _barriers(SLOTS)
    fence_async_shared()
    operands = x_desc, weight_desc, x_ring, weight_ring
    gl.warp_specialize(
        [
            (warpgroup_0, (operands, barriers, parts_ptr, M, sizes, GROUP_M)),
            (warpgroup_1, (operands, barriers, parts_ptr, M, sizes, GROUP_M)),
        ],
        [4],
        [REGISTERS],
    )


@functools.cache
def _layout(dtype, rows):
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, INNER], kind)


def _described(x, rows):
    layout = _layout(x.dtype, rows)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, INNER], layout)


def write_parts(x: torch.Tensor, weight: torch.Tensor, config: Config) -> torch.Tensor:
    """Return m and l of each row and tile of classes: float32, [2, M, V / CLASSES].

    x: [M, H] and weight: [V, H] of float16 or bfloat16, which TMA can read; V and H as `suits`
    accepts them.
    """
    (m, h), v = x.shape, weight.shape[0]
    tiles = v // CLASSES
    parts = torch.empty((2, m, tiles), dtype=torch.float32, device=x.device)
    programs = min(sm_count(x.device), -(-m // (GROUPS.value * ROWS)) * tiles)
    linear_tiles_hopper_kernel[(programs,)](
        x_desc=_described(x, ROWS), weight_desc=_described(weight, CLASSES), parts_ptr=parts,
        M=m, V=v, H=h, **config,
    )  # fmt: skip
    return parts

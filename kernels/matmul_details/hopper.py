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

    hopper_tiles.py        the order of tiles, and views of their parts
    hopper_producer.py     the group that copies
    hopper_consumers.py    the groups that multiply
    hopper_epilogue.py     all that happens to a tile after its products
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .._runtime.configs import Configs
from .._runtime.device import is_hopper
from . import cost
from .hopper_consumers import multiply_0, multiply_1
from .hopper_producer import copy_loop
from .hopper_tiles import GROUPS

# Registers of a thread of the multiplying groups.
REGISTERS = gl.constexpr(240)


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

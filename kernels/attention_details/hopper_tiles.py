"""Parts that attention's kernels for Hopper share: products of a tile, softmax, rings, barriers.

A kernel has warps that copy and groups of warps that multiply. A group starts the scores of a tile
of keys, then the product of the previous tile's weights and values, and takes exponentials under
both. The tiles come from rings in shared memory, which barriers guard.
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

from .._triton.math import LN2

# Slots of each group's query rows: those of a tile are loaded while the tile before is computed.
Q_SLOTS = gl.constexpr(2)
# The first hardware barrier by which groups take turns; the compiler takes those below.
FIRST_TURN = gl.constexpr(8)
# Types that TMA copies here.
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@gluon.jit
def await_turn(WHICH: gl.constexpr):
    """Wait until the group before has issued its products."""
    gl.inline_asm_elementwise(
        f"bar.sync {FIRST_TURN + WHICH}, 256; // $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def pass_turn(WHICH: gl.constexpr, GROUPS: gl.constexpr):
    """Let the next group issue its products."""
    gl.inline_asm_elementwise(
        f"bar.arrive {FIRST_TURN + (WHICH + 1) % GROUPS}, 256; // $0",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def row_sums(p):
    """Sums over the columns of p that a thread holds: [rows, 8]. No thread reads another's."""
    return gl.sum(gl.reshape(p, (p.shape[0], p.shape[1] // 8, 8)), 1)


@gluon.jit
def block_matrix(block):
    """A block in shared memory as a matrix, whose rows are those of each head in turn."""
    return block.reshape((block.shape[-3] * block.shape[-2], block.shape[-1]))


@gluon.jit
def matrix_of(ring, slot):
    """A slot of a ring as a matrix."""
    return block_matrix(ring.index(slot))


@gluon.jit
def start_scores(q, rings, barriers, step, zeros, K_SLOTS: gl.constexpr):
    """Start q kᵀ of a tile of keys; return scores that are still being written.

    zeros: `[ROWS, n]`; only the first n keys of the tile take part.
    """
    slot = step % K_SLOTS
    mbarrier.wait(barriers[2].index(slot), step // K_SLOTS % 2)
    keys = matrix_of(rings[1], slot)
    if zeros.shape[1] < keys.shape[0]:
        keys = keys.slice(0, zeros.shape[1])
    return warpgroup_mma(q, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def start_values(rings, barriers, step, p, acc, V_SLOTS: gl.constexpr):
    """Start acc + p v of a tile of values; return accumulators that are still being written."""
    slot = step % V_SLOTS
    mbarrier.wait(barriers[4].index(slot), step // V_SLOTS % 2)
    return warpgroup_mma(p, matrix_of(rings[2], slot), acc, is_async=True)


@gluon.jit
def first_scores(rings, barriers, zeros, WHICH: gl.constexpr, options: gl.constexpr):
    """The scores of the first tile of keys of a program."""
    K_SLOTS: gl.constexpr = options[5]
    mbarrier.wait(barriers[0].index(WHICH), 0)
    scores = start_scores(matrix_of(rings[0], WHICH), rings, barriers, 0, zeros, K_SLOTS)
    scores = warpgroup_mma_wait(0, (scores,))
    mbarrier.arrive(barriers[3].index(0), count=1)
    return scores


@gluon.jit
def scores_of_next(
    acc, p, slot, step, rings, barriers, zeros, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr
):
    """The first scores of the next tile of rows, and the last values of this one.

    slot: of the next tile's rows, which are there. The accumulators are still being written.
    """
    scores = start_scores(matrix_of(rings[0], slot), rings, barriers, step, zeros, K_SLOTS)
    acc = start_values(rings, barriers, step - 1, p, acc, V_SLOTS)
    scores = warpgroup_mma_wait(1, (scores,))
    mbarrier.arrive(barriers[3].index(step % K_SLOTS), count=1)
    return scores, acc


@gluon.jit
def next_scores(
    acc, p, turn, step, rings, barriers, zeros, WHICH: gl.constexpr, options: gl.constexpr
):
    """The same as `scores_of_next`, after a wait for the rows.

    turn: the number of the next tile in the program.
    """
    GROUPS: gl.constexpr = options[4]
    K_SLOTS: gl.constexpr = options[5]
    V_SLOTS: gl.constexpr = options[6]
    slot = turn % Q_SLOTS * GROUPS + WHICH
    mbarrier.wait(barriers[0].index(slot), turn // Q_SLOTS % 2)
    return scores_of_next(acc, p, slot, step, rings, barriers, zeros, K_SLOTS, V_SLOTS)


@gluon.jit
def mask_scores(scores, start, rows, sizes, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Scores with minus infinity for keys that a row does not see. rows: the row's number."""
    LAYOUT: gl.constexpr = scores.type.layout
    keys = gl.arange(0, scores.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    SK, left, right = sizes[1], sizes[4], sizes[5]
    end = SK - start
    if RIGHT:
        end = gl.minimum(rows + (right + 1 - start), end)[:, None]
    keep = keys < end
    if LEFT:
        keep = keep & (keys >= (rows + (left - start))[:, None])
    return gl.where(keep, scores, -float("inf"))


@gluon.jit
def softmax(scores, m, l, factor):
    """The weights of a tile, the factor of what was before, and m and l with the tile."""
    m_new = gl.maximum(m, gl.max(scores, 1) * factor)
    # A row that has only seen minus infinity must not subtract it from itself.
    base = gl.where(m_new == -float("inf"), 0.0, m_new)
    p = gl.exp2(scores * factor - base[:, None])
    shrink = gl.exp2(m - base)
    SUMS: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    l = l * gl.convert_layout(shrink, SUMS)[:, None] + row_sums(p)
    return p, shrink, m_new, l


@gluon.jit
def begin_softmax(scores, nothing, no_sums, factor, BLOCK_N: gl.constexpr):
    """The weights of the first tile of BLOCK_N keys that rows see, and m and l with it.

    scores: of all keys of the tile or of its first half. The weights of the other keys are zero.
    nothing, no_sums: m and l before, laid out for scores of a whole tile.
    """
    LAYOUT: gl.constexpr = scores.type.layout
    ROWS: gl.constexpr = scores.shape[0]
    SEEN: gl.constexpr = scores.shape[1]
    if SEEN < BLOCK_N:
        blank = gl.zeros([ROWS, SEEN], gl.float32, LAYOUT)
        none = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
        p, _, m, l = softmax(scores, none, row_sums(blank), factor)
        p = gl.join(p, blank).permute((0, 2, 1)).reshape((ROWS, BLOCK_N))
        m, l = gl.convert_layout(m, nothing.type.layout), gl.convert_layout(l, no_sums.type.layout)
    else:
        p, _, m, l = softmax(scores, nothing, no_sums, factor)
    return p, m, l


@gluon.jit
def computed(l):
    """l, whose sums are complete before any wait for products that follows.

    The assembler takes a wait ahead of arithmetic that does not need it. Here that would be all
    exponentials, and none would run under the product. It takes no wait ahead of a meeting of the
    warp's threads, and the threads that meet are chosen by l: all of them, as no sum is negative.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .pred negative;
        .reg .b32 threads;
        .reg .f32 first, second;
        add.f32 first, $4, $5;
        add.f32 second, $6, $7;
        add.f32 first, first, second;
        setp.lt.f32 negative, first, 0f00000000;
        selp.b32 threads, 1, -1, negative;
        bar.warp.sync threads;
        mov.b32 $0, $4;
        mov.b32 $1, $5;
        mov.b32 $2, $6;
        mov.b32 $3, $7;
        }
        """,
        "=r,=r,=r,=r,r,r,r,r", [l], dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def attend_key_tile(
    acc, p, m, l, step, start, cut_by_mask, q, rings, barriers, rows, sizes, factor, zeros,
    WHICH: gl.constexpr, options: gl.constexpr,
):  # fmt: skip
    """Take the tile of keys from `start` into m and l, and the tile before it into acc.

    p: the weights of the tile before, as a factor. Returns those of this tile.
    """
    LEFT: gl.constexpr = options[0]
    RIGHT: gl.constexpr = options[1]
    GROUPS: gl.constexpr = options[4]
    K_SLOTS: gl.constexpr = options[5]
    V_SLOTS: gl.constexpr = options[6]
    TURNS: gl.constexpr = options[7]
    PINNED: gl.constexpr = options[8]
    ACC: gl.constexpr = acc.type.layout
    if TURNS:
        await_turn(WHICH)
    scores = start_scores(q, rings, barriers, step, zeros, K_SLOTS)
    acc = start_values(rings, barriers, step - 1, p, acc, V_SLOTS)
    if TURNS:
        pass_turn(WHICH, GROUPS)
    scores = warpgroup_mma_wait(1, (scores,))
    mbarrier.arrive(barriers[3].index(step % K_SLOTS), count=1)
    if LEFT or RIGHT:  # noqa: SIM102 (a constant and a value have no `and`)
        if cut_by_mask:
            scores = mask_scores(scores, start, rows, sizes, LEFT, RIGHT)
    p_new, shrink, m, l = softmax(scores, m, l, factor)
    if PINNED:
        l = computed(l)
    # The compiler must not reuse the registers of p before the product has read them.
    acc, p = warpgroup_mma_wait(0, (acc, p))
    mbarrier.arrive(barriers[5].index((step - 1) % V_SLOTS), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, ACC))[:, None]
    p = gl.convert_layout(p_new.to(p.dtype), p.type.layout)
    return acc, p, m, l, step + 1


@gluon.jit
def drawn(counter_ptr, tiles):
    """The next index of a tile by the counter, which the last of all draws sets to zero again.

    Programs begin with the index of their own and draw until they get one past the end. So there
    are `tiles` draws.
    """
    ticket = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    if ticket == tiles - 1:
        gl.store(counter_ptr, 0)
    return gl.num_programs(0) + ticket


@gluon.jit
def write_number(slots, which, number):
    """Write a number to a slot of shared memory.

    Each thread writes it, so one that arrives at a barrier afterwards has written it itself.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slots.index(which).store(gl.full([1], number, gl.int32, LAYOUT))


@gluon.jit
def read_number(slots, which):
    """The number in a slot of shared memory."""
    return gl.sum(slots.index(which).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def tell(numbers, slots, told_barrier, read_barrier, turn):
    """Tell the groups six numbers of a tile, after they have read those of the tile before."""
    mbarrier.wait(read_barrier.index(0), turn % 2 ^ 1)
    for which in gl.static_range(6):
        write_number(slots, which, numbers[which])
    mbarrier.arrive(told_barrier.index(0), count=1)


@gluon.jit
def told(slots, told_barrier, read_barrier, turn):
    """The six numbers that `tell` tells."""
    mbarrier.wait(told_barrier.index(0), turn % 2)
    a, b, c = read_number(slots, 0), read_number(slots, 1), read_number(slots, 2)
    d, e, f = read_number(slots, 3), read_number(slots, 4), read_number(slots, 5)
    mbarrier.arrive(read_barrier.index(0), count=1)
    return a, b, c, d, e, f


@gluon.jit
def numbers_to_tell(COUNT: gl.constexpr = 6):
    """Shared memory for numbers, as many as `tell` tells if not said otherwise."""
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def results_of_rows(m, l, ACC: gl.constexpr):
    """1 / l by the layout of acc, m + log2(l), and whether a row saw no key: its l is zero."""
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    empty = l == 0.0
    log_l = gl.log2(gl.where(empty, 1.0, l))
    inverse = gl.convert_layout(1.0 / gl.where(empty, 1.0, l), gl.SliceLayout(1, ACC))
    return inverse, m + log_l, empty


@gluon.jit
def store_row_numbers(lse_ptr, stats_ptr, place, log_sums, empty, inside):
    """Write lse and the statistics of rows, as `attention_fwd` returns them, unless None."""
    if lse_ptr is not None:
        gl.store(lse_ptr + place, log_sums * LN2, mask=inside)
    if stats_ptr is not None:
        # To the backward pass it is a row whose weights are all zero.
        gl.store(stats_ptr + place, gl.where(empty, float("inf"), log_sums), mask=inside)


@gluon.jit
def store_rows(acc, m, l, place, inside, at, out_desc, out_ring, numbers, WHICH: gl.constexpr):
    """Write the results of a group's rows; the copy of the last tile's may be under way.

    place: of the rows in lse and in the statistics, as far as they are inside. at: coordinates.
    """
    lse_ptr, stats_ptr, _ = numbers
    ACC: gl.constexpr = acc.type.layout
    inverse, log_sums, empty = results_of_rows(m, l, ACC)
    store_row_numbers(lse_ptr, stats_ptr, place, log_sums, empty, inside)
    # The last tile's copy has read its slot.
    tma.store_wait(0)
    matrix_of(out_ring, WHICH).store((acc * inverse[:, None]).to(out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, at, out_ring.index(WHICH))


@gluon.jit
def make_ring(desc, COUNT: gl.constexpr):
    """A ring of COUNT slots in shared memory, each for a block of a descriptor."""
    SHAPE: gl.constexpr = [COUNT] + desc.block_type.shape  # noqa: RUF005 (Triton unpacks no list)
    return gl.allocate_shared_memory(desc.dtype, SHAPE, desc.layout)


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers in shared memory, each of which so many arrivals complete."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=ARRIVALS)
    return barriers


@functools.cache
def layout_of(dtype: torch.dtype, *block: int) -> gl.NVMMASharedLayout:
    """Return the layout in shared memory of a block of this shape."""
    return gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])


def described(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Return a descriptor of x [B, H, S, D] with blocks of so many rows of one head."""
    d = x.shape[3]
    # The stride of an axis of one item is never used, and need not be one that TMA takes.
    strides = [
        d if size == 1 else step for size, step in zip(x.shape[:3], x.stride(), strict=False)
    ]
    block = 1, 1, rows, d
    return TensorDescriptor(
        x, list(x.shape), [*strides, 1], list(block), layout_of(x.dtype, *block)
    )


def flat(x: torch.Tensor, *block: int) -> TensorDescriptor:
    """Return a descriptor of x, contiguous, with blocks of this shape."""
    layout = layout_of(x.dtype, *block)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)


def readable(x: torch.Tensor) -> bool:
    """Return whether TMA can read x: [B, H, S, D]."""
    # A tensor of a build has no memory, but it may begin past an aligned address.
    address = x.storage_offset() * x.element_size() if x.is_meta else x.data_ptr()
    steps = [s for size, s in zip(x.shape[:3], x.stride(), strict=False) if size > 1]
    aligned = all(s > 0 and s * x.element_size() % 16 == 0 for s in steps)
    return x.stride(3) == 1 and aligned and address % 16 == 0

"""The forward pass of attention on Hopper: warps that load, and groups of warps that multiply.

A program has four warps that only start copies and two or three warpgroups of 64 query rows each.
The groups share one ring of keys and one of values, which TMA fills. A group issues the scores of a
tile of keys before the product of the previous tile's weights and values. So the exponentials of
one tile run under a product of the other, of the same group and of the others. The last product
of a tile of rows runs under the first exponentials of the next one, whose rows have slots of their
own.

The kernel walks keys from the last that any row sees to the first. Only tiles that the diagonal, a
window or the end of the keys cuts are masked. If the tile of keys on the diagonal is a square, the
group of the upper rows sees half of its keys, and leaves out the others. Then no other tile is
masked, unless a window cuts it. Programs stay and stride over the tiles of rows. If these differ in
length, programs draw them from a counter, the longest first. The warps that copy find the tile, the
batch and the head, and write them beside the slot of the rows. So a group divides no numbers.

The scheme is FlashAttention-3's (Shah et al., 2024), written anew for Gluon.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from .._runtime.configs import Config, Configs
from .._runtime.device import is_hopper, sm_count
from .._triton.arrival_counter import arrival_counter
from .._triton.math import LOG2E
from .hopper_tiles import (
    Q_SLOTS,
    attend_key_tile,
    begin_softmax,
    computed,
    described,
    drawn,
    first_scores,
    make_barriers,
    make_ring,
    mask_scores,
    matrix_of,
    numbers_to_tell,
    pass_turn,
    read_number,
    readable,
    row_sums,
    scores_of_next,
    start_values,
    store_rows,
    write_number,
)

# Shared memory of a program, and at most so much of it for barriers.
SHARED_BYTES, BARRIER_BYTES = 232448, 1024


def tile(block_n, groups, k_slots, v_slots, turns, pinned, q_loaded=0, split=0, rows=64):
    return {
        "ROWS": rows, "BLOCK_N": block_n, "GROUPS": groups, "K_SLOTS": k_slots, "V_SLOTS": v_slots,
        "TURNS": turns, "PINNED": pinned, "Q_LOADED": q_loaded, "SPLIT": split,
        "REGISTERS": 240 if groups == 2 else 160, "num_warps": 4,
    }  # fmt: skip


PAIR, TRIPLE = tile(128, 2, 2, 2, 0, 0), tile(128, 3, 4, 4, 0, 0, split=1)
# Rings of four tiles, where heads of 64 leave room for them.
DEEP = tile(128, 2, 4, 4, 0, 0)
# Tiles that are cut in half reach less far beyond the diagonal.
SHORT = tile(64, 2, 4, 4, 0, 0)
CONFIGS = (
    PAIR,
    TRIPLE,
    SHORT,
    DEEP,
    tile(128, 2, 4, 4, 1, 0),
    tile(128, 2, 4, 4, 0, 1),
    tile(128, 2, 4, 4, 0, 1, q_loaded=1),
    tile(128, 2, 2, 2, 0, 1, q_loaded=1),
    tile(128, 2, 2, 2, 1, 0),
)


# Rows and keys of a square on the diagonal.
SQUARE = 128


def ends_in_square(sq: int, sk: int, right: int | None) -> bool:
    """Return whether the keys that a tile of SQUARE rows sees end in a square on the diagonal."""
    return right == 0 and (sk - sq) % SQUARE == 0


def choose(s, d, causal, square):
    # See the lab book: the tiles' order by a counter; heads of 128 at short sequences; the square
    # on the diagonal, of which narrower tiles leave out less.
    if d == 128:
        return SHORT if causal and not square and s <= 1024 else PAIR
    # Three groups with masks have registers that spill. Their tiles of 192 rows reach far beyond
    # the end of a short sequence.
    return DEEP if causal else TRIPLE if s >= 2048 else PAIR


def fits(config, d, **key):
    """Return whether the slots of a configuration fit in shared memory."""
    rows = (Q_SLOTS.value + 1) * config["GROUPS"] * config["ROWS"]
    rows += (config["K_SLOTS"] + config["V_SLOTS"]) * config["BLOCK_N"]
    return 2 * rows * d + BARRIER_BYTES <= SHARED_BYTES


@gluon.jit
def tile_of(index, sizes, RIGHT: gl.constexpr):
    """The tile of rows and the head with this index.

    NEAR heads come side by side, so that their keys stay in L2; the longest rows come first.
    """
    tiles_m, heads, near = sizes[6], sizes[7], sizes[8]
    first = index // (near * tiles_m) * near
    width = min(near, heads - first)
    within = index - first * tiles_m
    tile = within // width
    if RIGHT:
        tile = tiles_m - 1 - tile
    return tile, first + within % width


@gluon.jit
def _tell_rows(numbers, slot, tile, b, h):
    """Write tile, batch and head beside a free slot of rows, before an arrival at its barrier."""
    write_number(numbers, 3 * slot, tile)
    write_number(numbers, 3 * slot + 1, b)
    write_number(numbers, 3 * slot + 2, h)


@gluon.jit
def _told_rows(numbers, barriers, turn, slot):
    """Wait for the rows of a slot; return their tile, batch and head. The tile is -1 at the end."""
    mbarrier.wait(barriers[0].index(slot), turn // Q_SLOTS % 2)
    tile, b = read_number(numbers, 3 * slot), read_number(numbers, 3 * slot + 1)
    return tile, b, read_number(numbers, 3 * slot + 2)


@gluon.jit
def key_tiles(
    tile, sizes, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The tiles of keys that a tile of rows sees: first, whole, cut, last.

    All rows see the tiles from whole to cut. Those from first to whole and from cut to last need a
    mask. There is at least one, so that a row without keys has a tile to be zero in.
    """
    SK, left, right = sizes[1], sizes[4], sizes[5]
    start = tile * BLOCK_M
    first, end, cut = 0, SK, SK
    if RIGHT:
        end = max(1, min(SK, start + BLOCK_M + right))
        cut = max(0, min(SK, start + 1 + right))
    last = gl.cdiv(end, BLOCK_N)
    whole = first
    if LEFT:
        first = min(max(0, start + left) // BLOCK_N, last - 1)
        whole = gl.cdiv(max(0, start + BLOCK_M - 1 + left), BLOCK_N)
        whole = max(first, min(whole, last))
    cut = max(whole, cut // BLOCK_N)
    return first, whole, cut, last


@gluon.jit
def producer(descs, rings, barriers, sizes, counter_ptr, options: gl.constexpr):
    """Start all copies of a program: the rows of each group, then tiles of keys and values.

    Each group is told the tile, batch and head of its rows, and the end after the last.
    """
    LEFT: gl.constexpr = options[0]
    RIGHT: gl.constexpr = options[1]
    BLOCK_N: gl.constexpr = options[3]
    GROUPS: gl.constexpr = options[4]
    K_SLOTS: gl.constexpr = options[5]
    V_SLOTS: gl.constexpr = options[6]
    q_desc, k_desc, v_desc = descs[0], descs[1], descs[2]
    q_ring, k_ring, v_ring = rings[0], rings[1], rings[2]
    q_full, q_free, k_full, k_free, v_full, v_free = barriers[:6]
    H, GROUP = sizes[2], sizes[3]
    ROWS: gl.constexpr = q_desc.block_type.shape[-2]
    index, turn, step = gl.program_id(0), 0, 0
    while index < sizes[6] * sizes[7]:
        tile, head = tile_of(index, sizes, RIGHT)
        b, h = head // H, head % H
        tiles = key_tiles(tile, sizes, LEFT, RIGHT, GROUPS * ROWS, BLOCK_N)
        for which in gl.static_range(GROUPS):
            slot = turn % Q_SLOTS * GROUPS + which
            mbarrier.wait(q_free.index(slot), turn // Q_SLOTS % 2 ^ 1)
            _tell_rows(rings[4], slot, tile, b, h)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q_desc, [b, h, (tile * GROUPS + which) * ROWS, 0], q_full.index(slot),
                q_ring.index(slot),
            )  # fmt: skip
        for back in range(tiles[3] - tiles[0]):
            start = (tiles[3] - 1 - back) * BLOCK_N
            slot = step % K_SLOTS
            mbarrier.wait(k_free.index(slot), step // K_SLOTS % 2 ^ 1)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc, [b, h // GROUP, start, 0], k_full.index(slot), k_ring.index(slot)
            )
            slot = step % V_SLOTS
            mbarrier.wait(v_free.index(slot), step // V_SLOTS % 2 ^ 1)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc, [b, h // GROUP, start, 0], v_full.index(slot), v_ring.index(slot)
            )
            step += 1
        if counter_ptr is None:
            index += gl.num_programs(0)
        else:
            index = drawn(counter_ptr, sizes[6] * sizes[7])
        turn += 1
    for which in gl.static_range(GROUPS):
        slot = turn % Q_SLOTS * GROUPS + which
        mbarrier.wait(q_free.index(slot), turn // Q_SLOTS % 2 ^ 1)
        _tell_rows(rings[4], slot, -1, 0, 0)
        mbarrier.arrive(q_full.index(slot), count=1)


@gluon.jit
def _begun(
    scores, tile, nothing, no_sums, sizes, factor, WHICH: gl.constexpr, options: gl.constexpr
):
    """Weights, m and l of the first tile of keys that a group's rows of a tile walk.

    scores: of the first keys of the tile, as `begin_softmax` takes them.
    """
    LEFT: gl.constexpr = options[0]
    RIGHT: gl.constexpr = options[1]
    WHOLE: gl.constexpr = options[2]
    BLOCK_N: gl.constexpr = options[3]
    GROUPS: gl.constexpr = options[4]
    ROWS: gl.constexpr = scores.shape[0]
    if not WHOLE:
        _, _, _, last = key_tiles(tile, sizes, LEFT, RIGHT, GROUPS * ROWS, BLOCK_N)
        first_row = (tile * GROUPS + WHICH) * ROWS
        rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, scores.type.layout))
        scores = mask_scores(scores, (last - 1) * BLOCK_N, rows, sizes, LEFT, RIGHT)
    return begin_softmax(scores, nothing, no_sums, factor, BLOCK_N)


@gluon.jit
def consumer(descs, rings, barriers, sizes, numbers, WHICH: gl.constexpr, options: gl.constexpr):
    """Compute the rows of one group in each tile of the program."""
    factor = numbers[2]
    LEFT: gl.constexpr = options[0]
    RIGHT: gl.constexpr = options[1]
    BLOCK_N: gl.constexpr = options[3]
    GROUPS: gl.constexpr = options[4]
    K_SLOTS: gl.constexpr = options[5]
    V_SLOTS: gl.constexpr = options[6]
    TURNS: gl.constexpr = options[7]
    PINNED: gl.constexpr = options[8]
    Q_LOADED: gl.constexpr = options[9]
    SPLIT: gl.constexpr = options[10]
    DIAGONAL: gl.constexpr = options[11]
    # Under a square on the diagonal no tile of keys but the first needs a mask.
    CUT: gl.constexpr = LEFT or not DIAGONAL
    out_desc, out_ring = descs[3], rings[3]
    q_free, v_free = barriers[1], barriers[5]
    SQ, H = sizes[0], sizes[2]
    ROWS: gl.constexpr = out_desc.block_type.shape[-2]
    D: gl.constexpr = out_desc.block_type.shape[-1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    # Keys of the first tile that some row of the group sees.
    SEEN: gl.constexpr = (WHICH + 1) * ROWS if DIAGONAL else BLOCK_N
    FIRST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SEEN, 16])
    no_scores = gl.zeros([ROWS, SEEN], gl.float32, FIRST)
    no_sums = row_sums(zeros)
    nothing = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
    if TURNS and WHICH == GROUPS - 1:
        pass_turn(WHICH, GROUPS)
    turn, step = 0, 0
    # There is a tile for each program. The first scores of the others come at the end of the loop.
    tile, b, h = _told_rows(rings[4], barriers, turn, WHICH)
    scores = first_scores(rings, barriers, no_scores, WHICH, options)
    p, m, l = _begun(scores, tile, nothing, no_sums, sizes, factor, WHICH, options)
    p = gl.convert_layout(p.to(out_desc.dtype), FACTOR)
    while tile >= 0:
        first, whole, cut, last = key_tiles(tile, sizes, LEFT, RIGHT, GROUPS * ROWS, BLOCK_N)
        start_m = (tile * GROUPS + WHICH) * ROWS
        rows = start_m + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        acc = gl.zeros([ROWS, D], gl.float32, ACC)
        slot = turn % Q_SLOTS * GROUPS + WHICH
        if Q_LOADED:
            q = matrix_of(rings[0], slot).load(gl.DotOperandLayout(0, SCORES, 2))
            mbarrier.arrive(q_free.index(slot), count=1)
        else:
            q = matrix_of(rings[0], slot)
        step += 1
        if SPLIT and RIGHT:
            for back in range(2, last - cut + 1):
                acc, p, m, l, step = attend_key_tile(
                    acc, p, m, l, step, (last - back) * BLOCK_N, True, q, rings, barriers, rows,
                    sizes, factor, zeros, WHICH, options,
                )  # fmt: skip
            for back in range(max(2, last - cut + 1), last - whole + 1):
                acc, p, m, l, step = attend_key_tile(
                    acc, p, m, l, step, (last - back) * BLOCK_N, False, q, rings, barriers, rows,
                    sizes, factor, zeros, WHICH, options,
                )  # fmt: skip
            if LEFT:
                for back in range(max(2, last - whole + 1), last - first + 1):
                    acc, p, m, l, step = attend_key_tile(
                        acc, p, m, l, step, (last - back) * BLOCK_N, True, q, rings, barriers, rows,
                        sizes, factor, zeros, WHICH, options,
                    )  # fmt: skip
        else:
            for back in range(2, last - first + 1):
                key_tile = last - back
                acc, p, m, l, step = attend_key_tile(
                    acc, p, m, l, step, key_tile * BLOCK_N,
                    (key_tile < whole) | (key_tile >= cut) if CUT else False,
                    q, rings, barriers, rows, sizes, factor, zeros, WHICH, options,
                )  # fmt: skip
        if not Q_LOADED:
            mbarrier.arrive(q_free.index(slot), count=1)
        turn += 1
        m_next, l_next = m, l
        slot = turn % Q_SLOTS * GROUPS + WHICH
        tile_next, b_next, h_next = _told_rows(rings[4], barriers, turn, slot)
        if tile_next >= 0:
            scores, acc = scores_of_next(
                acc, p, slot, step, rings, barriers, no_scores, K_SLOTS, V_SLOTS
            )
            p_next, m_next, l_next = _begun(
                scores, tile_next, nothing, no_sums, sizes, factor, WHICH, options
            )
            if PINNED:
                l_next = computed(l_next)
            acc, p = warpgroup_mma_wait(0, (acc, p))
            p = gl.convert_layout(p_next.to(p.dtype), p.type.layout)
        else:
            acc = start_values(rings, barriers, step - 1, p, acc, V_SLOTS)
            acc, p = warpgroup_mma_wait(0, (acc, p))
        mbarrier.arrive(v_free.index((step - 1) % V_SLOTS), count=1)
        place, at = gl.cast(b * H + h, gl.int64) * SQ + rows, [b, h, start_m, 0]
        store_rows(acc, m, l, place, rows < SQ, at, out_desc, out_ring, numbers, WHICH)
        m, l = m_next, l_next
        tile, b, h = tile_next, b_next, h_next
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["H", "GROUP", "SQ", "SK", "left", "right", "heads", "near"])
def forward_hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, stats_ptr, counter_ptr,
    H, GROUP, SQ, SK, left, right, heads, near, scale,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, WHOLE: gl.constexpr, DIAGONAL: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr,
    K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr,
    TURNS: gl.constexpr, PINNED: gl.constexpr, Q_LOADED: gl.constexpr,
    SPLIT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """out = softmax(scale q kᵀ) v and lse = log sum exp(scale q kᵀ), for each head.

    Grid: programs, one a multiprocessor at most, that share all tiles of GROUPS * ROWS rows. Reads
    q and writes out by descriptors of blocks [1, 1, ROWS, D], reads k and v by blocks [1, 1,
    BLOCK_N, D]. Writes lse, natural, and stats, m + log2(l) in base 2; both are [B, H, SQ] in
    float32 or None.

    counter: one int32, zero, that hands out tiles; if None each program strides over them.
    H, GROUP: query heads of a batch and of a key head. All batches together have `heads`.
    `near` of them run side by side. left, right: bounds if LEFT, RIGHT, as in `scores.py`.

    WHOLE: no tile needs a mask. DIAGONAL: the first tile of keys of a tile of rows is a square on
    the diagonal. K_SLOTS, V_SLOTS: of the rings of keys and of values.
    TURNS: groups issue products in turn. PINNED: exponentials run under the product with v.
    Q_LOADED: q is in registers. SPLIT: masked tiles have
    a loop of their own. REGISTERS: of a thread of a group.
    """
    sizes = (SQ, SK, H, GROUP, left, right, gl.cdiv(SQ, GROUPS * ROWS), heads, near)
    factor = gl.cast(scale, gl.float32) * LOG2E
    descs = q_desc, k_desc, v_desc, out_desc
    rings = (
        make_ring(q_desc, Q_SLOTS * GROUPS), make_ring(k_desc, K_SLOTS), make_ring(v_desc, V_SLOTS),
        make_ring(out_desc, GROUPS),
        numbers_to_tell(3 * Q_SLOTS * GROUPS),
    )  # fmt: skip
    barriers = (
        make_barriers(Q_SLOTS * GROUPS, 1), make_barriers(Q_SLOTS * GROUPS, 1),
        make_barriers(K_SLOTS, 1), make_barriers(K_SLOTS, GROUPS),
        make_barriers(V_SLOTS, 1), make_barriers(V_SLOTS, GROUPS),
    )  # fmt: skip
    fence_async_shared()
    numbers = lse_ptr, stats_ptr, factor
    OPTIONS: gl.constexpr = (
        LEFT, RIGHT, WHOLE, BLOCK_N, GROUPS, K_SLOTS, V_SLOTS, TURNS, PINNED, Q_LOADED, SPLIT,
        DIAGONAL,
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (producer, (descs, rings, barriers, sizes, counter_ptr, OPTIONS)),
                (consumer, (descs, rings, barriers, sizes, numbers, 0, OPTIONS)),
                (consumer, (descs, rings, barriers, sizes, numbers, 1, OPTIONS)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (producer, (descs, rings, barriers, sizes, counter_ptr, OPTIONS)),
                (consumer, (descs, rings, barriers, sizes, numbers, 0, OPTIONS)),
                (consumer, (descs, rings, barriers, sizes, numbers, 1, OPTIONS)),
                (consumer, (descs, rings, barriers, sizes, numbers, 2, OPTIONS)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )


# Bytes of keys and values that stay in L2 while programs of some heads run side by side.
NEAR_BYTES = 2**25
# Heads side by side at most, without a diagonal and with one (docs/lab/attention.md).
NEAR_HEADS, NEAR_HEADS_CAUSAL = 16, 32


def near_heads(q: torch.Tensor, k: torch.Tensor, causal: bool, longest: int | None = None) -> int:
    """Return how many heads of all batches run side by side, whole groups of a key head.

    longest: the most keys that a row may see, if k holds several sequences.
    """
    (b, h, _, d), (heads, sk) = q.shape, k.shape[1:3]
    sk = sk if longest is None else min(sk, longest)
    group, most = h // heads, NEAR_HEADS_CAUSAL if causal else NEAR_HEADS
    return min(b * h, max(1, min(NEAR_BYTES // (4 * sk * d), most // group)) * group)


def suits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether Hopper's kernels can take q, k and v, on the device where they are.

    Items have two bytes, D is 64 or 128, and TMA can read all three. A traced graph has no
    addresses, so the answer there is False.
    """
    return (
        not torch.compiler.is_compiling()
        and is_hopper(q.device)
        and q.element_size() == 2
        and q.shape[3] in (64, 128)
        and k.shape[2] > 0
        and all(map(readable, (q, k, v)))
    )


def forward_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    stats: torch.Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    config: Config,
) -> None:
    """Write out, and lse and stats unless None, as `attention_fwd` returns them.

    q, k, v, out: as `suits` accepts them. left, right: sizes of the window, None if unbounded.
    """
    (b, h, sq, _), (key_heads, sk) = q.shape, k.shape[1:3]
    rows, block_n, groups = config["ROWS"], config["BLOCK_N"], config["GROUPS"]
    near = near_heads(q, k, right is not None)
    tiles = triton.cdiv(sq, groups * rows) * b * h
    counter = None
    if left is not None or right is not None:
        # Tiles differ in length, so a program takes the next when it is done with one.
        counter = arrival_counter(q.device)
    forward_hopper_kernel[(min(sm_count(q.device), tiles),)](
        q_desc=described(q, rows), k_desc=described(k, block_n), v_desc=described(v, block_n),
        out_desc=described(out, rows), lse_ptr=lse, stats_ptr=stats, counter_ptr=counter,
        H=h, GROUP=h // key_heads, SQ=sq, SK=sk,
        left=0 if left is None else sk - sq - left, right=0 if right is None else sk - sq + right,
        heads=b * h, near=near, scale=scale, LEFT=left is not None, RIGHT=right is not None,
        WHOLE=left is None and right is None and sk % block_n == 0,
        DIAGONAL=ends_in_square(sq, sk, right) and block_n == groups * rows == SQUARE, **config,
    )  # fmt: skip


FORWARD = Configs(forward_hopper_kernel, CONFIGS, choose, fits, family="attention")

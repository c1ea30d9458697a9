"""The forward pass of block-sparse attention on Hopper: attention's, over the lists of a mask.

A program has the warps and rings of `attention_details/forward_hopper.py`. It owns 128 rows at a
time, which lie in one block of rows, and walks the kept blocks of its list from the last to the
first. The warps that copy read the list. They draw the next tile of rows from a counter, the
longest lists of a head first, and tell the other warps the numbers of that tile. Meanwhile these
compute the tiles of keys that were copied before. So no group of warps waits for a list.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from .._runtime.configs import Config, Configs
from .._runtime.device import sm_count
from .._triton.arrival_counter import arrival_counter
from .._triton.math import LOG2E
from ..attention_details.forward_hopper import DEEP, PAIR, fits, near_heads, tile_of
from ..attention_details.forward_hopper import suits as suits_attention
from ..attention_details.hopper_tiles import (
    Q_SLOTS,
    attend_key_tile,
    described,
    drawn,
    first_scores,
    make_barriers,
    make_ring,
    mask_scores,
    matrix_of,
    next_scores,
    numbers_to_tell,
    row_sums,
    softmax,
    start_values,
    store_rows,
    tell,
    told,
)
from .lists_hopper import entries_below, tile_start

CONFIGS = (PAIR, DEEP)
# The tiles of all configurations have so many rows and keys.
LEAST_BLOCK = 128


def choose(d, causal):
    # See the lab book: heads of 64, by lists. A diagonal changes nothing.
    return DEEP if d == 64 else PAIR


def suits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_size: int) -> bool:
    """Return whether the kernel can take q, k, v and blocks of this size, where they are."""
    return block_size >= LEAST_BLOCK and suits_attention(q, k, v)


@gluon.jit
def _scheduled(
    index, lists, sizes, CAUSAL: gl.constexpr, BLOCK: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The tile of rows with this index, its head, steps, cut, last, and the first key of `last`.

    steps: tiles of keys that it walks, from tile `last` of all lists downwards. cut: so many of the
    first ones need a mask. A tile of rows without a key walks one tile, past the end of the keys.
    """
    offsets_ptr, indices_ptr, order_ptr, blocks, stride_lb, stride_lh = lists
    SK, H, right = sizes[1], sizes[2], sizes[5]
    ROW_PARTS: gl.constexpr = BLOCK // BLOCK_M
    KEY_PARTS: gl.constexpr = BLOCK // BLOCK_N
    place, head = tile_of(index, sizes, False)
    line = gl.cast(head // H * stride_lb + head % H * stride_lh, gl.int64)
    block = gl.load(order_ptr + (line * blocks + place // ROW_PARTS))
    first = gl.load(offsets_ptr + (line * (blocks + 1) + block))
    last = gl.load(offsets_ptr + (line * (blocks + 1) + block + 1))
    tile = block * ROW_PARTS + place % ROW_PARTS
    # Keys from `end` on are seen by no row, those before `full` by all.
    end, full = SK, SK
    if CAUSAL:
        end = min(SK, max(0, tile * BLOCK_M + BLOCK_M + right))
        full = min(SK, max(0, tile * BLOCK_M + 1 + right))
        last = entries_below(indices_ptr, first, last, gl.cdiv(end, BLOCK))
    whole = entries_below(indices_ptr, first, last, full // BLOCK)
    newest = gl.load(indices_ptr + (last - 1), mask=first < last, other=0) * BLOCK
    parts = min(KEY_PARTS, gl.cdiv(end - newest, BLOCK_N))
    at = last * KEY_PARTS - KEY_PARTS + parts - 1
    steps, cut = at + 1 - first * KEY_PARTS, at + 1 - whole * KEY_PARTS
    start = newest + (parts - 1) * BLOCK_N
    empty = first >= last
    steps, cut = gl.where(empty, 1, steps), gl.where(empty, 1, max(0, cut))
    return tile, head, steps, cut, at, gl.where(empty, SK, start)


@gluon.jit
def _copy_keys(
    begin, end, start, step, numbers, descs, rings, barriers, sizes, indices_ptr,
    options: gl.constexpr,
):  # fmt: skip
    """Start the copies of the tiles of keys and values from number `begin` of a walk to `end`.

    start: the first key of the first one. Returns that of the next one, and its step.
    """
    BLOCK_N: gl.constexpr = options[3]
    K_SLOTS: gl.constexpr = options[5]
    V_SLOTS: gl.constexpr = options[6]
    BLOCK: gl.constexpr = options[9]
    k_desc, v_desc, k_ring, v_ring = descs[1], descs[2], rings[1], rings[2]
    k_full, k_free, v_full, v_free = barriers[2:6]
    head, steps, at = numbers[1], numbers[2], numbers[4]
    H, GROUP = sizes[2], sizes[3]
    b, key_head = head // H, head % H // GROUP
    for back in range(begin, end):
        following = tile_start(indices_ptr, at - back - 1, back + 1 < steps, BLOCK, BLOCK_N)
        slot = step % K_SLOTS
        mbarrier.wait(k_free.index(slot), step // K_SLOTS % 2 ^ 1)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            k_desc, [b, key_head, start, 0], k_full.index(slot), k_ring.index(slot)
        )
        slot = step % V_SLOTS
        mbarrier.wait(v_free.index(slot), step // V_SLOTS % 2 ^ 1)
        mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            v_desc, [b, key_head, start, 0], v_full.index(slot), v_ring.index(slot)
        )
        start = following
        step += 1
    return start, step


@gluon.jit
def producer(descs, rings, barriers, sizes, lists, counter_ptr, options: gl.constexpr):
    """Start all copies of a program, and tell the groups which tiles of rows it takes."""
    CAUSAL: gl.constexpr = options[1]
    BLOCK_N: gl.constexpr = options[3]
    GROUPS: gl.constexpr = options[4]
    K_SLOTS: gl.constexpr = options[5]
    BLOCK: gl.constexpr = options[9]
    q_desc, q_ring = descs[0], rings[0]
    q_full = barriers[0]
    indices_ptr = lists[1]
    H, tiles = sizes[2], sizes[6] * sizes[7]
    ROWS: gl.constexpr = q_desc.block_type.shape[-2]
    index, turn, step = gl.program_id(0), 0, 0
    tile, head, steps, cut, at, start = _scheduled(
        index, lists, sizes, CAUSAL, BLOCK, GROUPS * ROWS, BLOCK_N
    )
    tell((tile, head, steps, cut, at, start), rings[4], barriers[1], barriers[6], 0)
    while steps > 0:
        numbers = tile, head, steps, cut, at, start
        # The groups have read the numbers of the tile before, so they are done with the rows of the
        # one before that, and its slots are free.
        for which in gl.static_range(GROUPS):
            slot = turn % Q_SLOTS * GROUPS + which
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q_desc, [head // H, head % H, (tile * GROUPS + which) * ROWS, 0],
                q_full.index(slot), q_ring.index(slot),
            )  # fmt: skip
        early = min(steps, K_SLOTS)
        key, step = _copy_keys(
            0, early, start, step, numbers, descs, rings, barriers, sizes, indices_ptr, options
        )
        # The groups have work, so the next list is read in time.
        index = drawn(counter_ptr, tiles)
        tile, head, steps, cut, at, start = _scheduled(
            min(index, tiles - 1), lists, sizes, CAUSAL, BLOCK, GROUPS * ROWS, BLOCK_N
        )
        _, step = _copy_keys(
            early, numbers[2], key, step, numbers, descs, rings, barriers, sizes, indices_ptr,
            options,
        )  # fmt: skip
        # No steps: there is no further tile.
        steps = gl.where(index < tiles, steps, 0)
        turn += 1
        tell((tile, head, steps, cut, at, start), rings[4], barriers[1], barriers[6], turn)


@gluon.jit
def _begun(scores, cut, start, rows, nothing, no_sums, sizes, factor, CAUSAL: gl.constexpr):
    """Weights, m and l of the first tile of keys that a group's rows of a tile walk."""
    if cut > 0:
        scores = mask_scores(scores, start, rows, sizes, False, CAUSAL)
    p, _, m, l = softmax(scores, nothing, no_sums, factor)
    return p, m, l


@gluon.jit
def consumer(
    descs, rings, barriers, sizes, indices_ptr, numbers, WHICH: gl.constexpr,
    options: gl.constexpr,
):  # fmt: skip
    """Compute the rows of one group in each tile of the program."""
    factor = numbers[2]
    CAUSAL: gl.constexpr = options[1]
    BLOCK_N: gl.constexpr = options[3]
    GROUPS: gl.constexpr = options[4]
    V_SLOTS: gl.constexpr = options[6]
    BLOCK: gl.constexpr = options[9]
    out_desc, out_ring = descs[3], rings[3]
    v_free = barriers[5]
    SQ, H = sizes[0], sizes[2]
    ROWS: gl.constexpr = out_desc.block_type.shape[-2]
    D: gl.constexpr = out_desc.block_type.shape[-1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    no_sums = row_sums(zeros)
    nothing = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
    own = WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    turn, step = 0, 0
    # There is a tile for each program. The first scores of the others come at the end of the loop.
    tile, head, steps, cut, at, start = told(rings[4], barriers[1], barriers[6], turn)
    scores = first_scores(rings, barriers, zeros, WHICH, options)
    rows = tile * (GROUPS * ROWS) + own
    p, m, l = _begun(scores, cut, start, rows, nothing, no_sums, sizes, factor, CAUSAL)
    p = gl.convert_layout(p.to(out_desc.dtype), FACTOR)
    while steps > 0:
        start_m = (tile * GROUPS + WHICH) * ROWS
        rows = tile * (GROUPS * ROWS) + own
        acc = gl.zeros([ROWS, D], gl.float32, ACC)
        q = matrix_of(rings[0], turn % Q_SLOTS * GROUPS + WHICH)
        step += 1
        for back in range(1, steps):
            # Only a tile that is masked needs to know its keys.
            first_key = tile_start(indices_ptr, at - back, back < cut, BLOCK, BLOCK_N)
            acc, p, m, l, step = attend_key_tile(
                acc, p, m, l, step, first_key, back < cut, q, rings, barriers, rows, sizes, factor,
                zeros, WHICH, options,
            )  # fmt: skip
        turn += 1
        place = gl.cast(head, gl.int64) * SQ + rows
        b, h = head // H, head % H
        tile, head, steps, cut, at, start = told(rings[4], barriers[1], barriers[6], turn)
        m_next, l_next = m, l
        if steps > 0:
            scores, acc = next_scores(acc, p, turn, step, rings, barriers, zeros, WHICH, options)
            p_next, m_next, l_next = _begun(
                scores, cut, start, tile * (GROUPS * ROWS) + own, nothing, no_sums, sizes, factor,
                CAUSAL,
            )  # fmt: skip
            acc, p = warpgroup_mma_wait(0, (acc, p))
            p = gl.convert_layout(p_next.to(p.dtype), p.type.layout)
        else:
            acc = start_values(rings, barriers, step - 1, p, acc, V_SLOTS)
            acc, p = warpgroup_mma_wait(0, (acc, p))
        mbarrier.arrive(v_free.index((step - 1) % V_SLOTS), count=1)
        at_rows = [b, h, start_m, 0]
        store_rows(acc, m, l, place, rows < SQ, at_rows, out_desc, out_ring, numbers, WHICH)
        m, l = m_next, l_next
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "stride_lb", "stride_lh", "H", "GROUP", "SQ", "SK", "blocks", "right", "heads", "near"
    ]
)  # fmt: skip
def block_sparse_forward_hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, stats_ptr, offsets_ptr, indices_ptr, order_ptr,
    counter_ptr, stride_lb, stride_lh, H, GROUP, SQ, SK, blocks, right, heads, near, scale,
    CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr,
    K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr,
    TURNS: gl.constexpr, PINNED: gl.constexpr, Q_LOADED: gl.constexpr,
    SPLIT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """out = softmax(scale q kᵀ) v over kept blocks, lse = log sum exp(scale q kᵀ), for each head.

    Grid: programs, one a multiprocessor at most, that share all tiles of GROUPS * ROWS rows. They
    read q, k and v and write out, lse and stats as `forward_hopper_kernel` of attention does.

    offsets, indices, order: those of rows of a BlockMask, with `blocks` rows a head. stride_lb,
    stride_lh: heads of the mask from a batch, and a head, to the next. The number `right` is
    SK - SQ. BLOCK: a multiple of GROUPS * ROWS and of BLOCK_N. TURNS, PINNED, Q_LOADED and SPLIT
    are zero.

    counter: one int32, zero, that hands out tiles. Other parameters are those of attention's
    kernel.
    """
    sizes = (SQ, SK, H, GROUP, 0, right, blocks * (BLOCK // (GROUPS * ROWS)), heads, near)
    lists = offsets_ptr, indices_ptr, order_ptr, blocks, stride_lb, stride_lh
    factor = gl.cast(scale, gl.float32) * LOG2E
    descs = q_desc, k_desc, v_desc, out_desc
    rings = (
        make_ring(q_desc, Q_SLOTS * GROUPS), make_ring(k_desc, K_SLOTS),
        make_ring(v_desc, V_SLOTS), make_ring(out_desc, GROUPS),
        numbers_to_tell(),
    )  # fmt: skip
    barriers = (
        make_barriers(Q_SLOTS * GROUPS, 1), make_barriers(1, 1),
        make_barriers(K_SLOTS, 1), make_barriers(K_SLOTS, GROUPS),
        make_barriers(V_SLOTS, 1), make_barriers(V_SLOTS, GROUPS), make_barriers(1, GROUPS),
    )  # fmt: skip
    fence_async_shared()
    numbers = lse_ptr, stats_ptr, factor
    OPTIONS: gl.constexpr = (
        False, CAUSAL, False, BLOCK_N, GROUPS, K_SLOTS, V_SLOTS, TURNS, PINNED, BLOCK
    )  # fmt: skip
    gl.warp_specialize(
        [
            (producer, (descs, rings, barriers, sizes, lists, counter_ptr, OPTIONS)),
            (consumer, (descs, rings, barriers, sizes, indices_ptr, numbers, 0, OPTIONS)),
            (consumer, (descs, rings, barriers, sizes, indices_ptr, numbers, 1, OPTIONS)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def forward_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    stats: torch.Tensor | None,
    offsets: torch.Tensor,
    indices: torch.Tensor,
    order: torch.Tensor,
    block_size: int,
    scale: float,
    causal: bool,
    config: Config,
) -> None:
    """Write out, and lse and stats unless None, as `block_sparse_fwd` returns them.

    q, k, v, out: as `suits` of attention accepts them. offsets, indices, order: those of rows of a
    BlockMask.
    """
    (b, h, sq, _), (key_heads, sk) = q.shape, k.shape[1:3]
    rows, block_n, groups = config["ROWS"], config["BLOCK_N"], config["GROUPS"]
    batches, mask_heads, blocks = order.shape
    tiles = blocks * (block_size // (groups * rows)) * b * h
    block_sparse_forward_hopper_kernel[(min(sm_count(q.device), tiles),)](
        q_desc=described(q, rows), k_desc=described(k, block_n), v_desc=described(v, block_n),
        out_desc=described(out, rows), lse_ptr=lse, stats_ptr=stats,
        offsets_ptr=offsets, indices_ptr=indices, order_ptr=order,
        counter_ptr=arrival_counter(q.device),
        stride_lb=mask_heads if batches > 1 else 0, stride_lh=1 if mask_heads > 1 else 0,
        H=h, GROUP=h // key_heads, SQ=sq, SK=sk, blocks=blocks, right=sk - sq, heads=b * h,
        near=near_heads(q, k, causal), scale=scale, CAUSAL=causal, BLOCK=block_size, **config,
    )  # fmt: skip


FORWARD = Configs(
    block_sparse_forward_hopper_kernel,
    CONFIGS,
    choose,
    fits,
    family="block_sparse_attention",
)

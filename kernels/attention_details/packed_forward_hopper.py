"""The forward pass of attention over packed sequences on Hopper.

A program has the warps and rings of `forward_hopper.py`. The warps that copy find the sequence of a
tile of rows by the boundaries, as `sequences_hopper.py` has it. They draw the next tile from a
counter and tell the other warps its numbers. Meanwhile these compute the tiles of keys that were
copied before.

Query heads that share keys share tiles, up to eight of them. A tile has the same rows of each. So
more tiles are full where sequences are short, keys are read once for all, and a diagonal leaves
fewer scores to mask. Source: "PackGQA" of FlashAttention-3 (BSD 3-clause).

Lengths are known to the device alone. If rows and keys have one tensor of boundaries, the host
knows that they are as many in each sequence. So the tile of keys on the diagonal is a square. The
group of the upper rows sees half of its keys, and leaves out the others.

A tile ends with its sequence: past the end TMA reads zeros and writes nothing. Scores of keys there
are masked. Values of the next sequence would have weights of zero, but zero times an infinity is no
zero.
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
from .forward_hopper import (
    DEEP,
    PAIR,
    SHORT,
    SQUARE,
    fits,
    key_tiles,
    near_heads,
    suits,
    tile_of,
)
from .hopper_tiles import (
    Q_SLOTS,
    attend_key_tile,
    begin_softmax,
    drawn,
    first_scores,
    make_barriers,
    make_ring,
    mask_scores,
    matrix_of,
    next_scores,
    numbers_to_tell,
    row_sums,
    start_values,
    store_rows,
    tell,
    told,
)
from .sequences_hopper import (
    SORTED,
    TOO_MANY_ROWS,
    bounds_in,
    described_rows,
    order_of_sequences,
    put_longest_first,
    rows_at,
    rows_of,
    tile_at,
)

CONFIGS = (PAIR, DEEP, SHORT)
# Rows of the tiles of all configurations, and query heads that share one at most. Shared memory is
# laid out by eight rows, so a head has that many in a group, or more.
TILE_ROWS, MOST_SHARING = 128, 8


def ends_in_squares(q: torch.Tensor, k: torch.Tensor, same: bool, right: int | None) -> bool:
    """Return whether the keys that each tile of rows sees end in a square on the diagonal.

    same: whether rows and keys have the same boundaries. These are cut off at the end of a tensor,
    so lengths agree for sure only if the totals do.
    """
    return same and right == 0 and q.shape[0] == k.shape[0] and heads_of_a_tile(q, k) == 1


def choose(s, mean, d, causal, square):
    # See the lab book: heads that share keys share tiles; heads of 128 at short sequences; the
    # square on the diagonal, of which narrower tiles leave out less.
    if d == 64:
        return SHORT if mean < (512 if causal else 256) else DEEP
    return SHORT if causal and (mean < 512 or (s <= 1024 and not square)) else PAIR


@gluon.jit
def _scheduled(
    index, order, boundaries, totals, shape, RIGHT: gl.constexpr, ORDERED: gl.constexpr,
    BLOCK_M: gl.constexpr,
):  # fmt: skip
    """The tile of rows with this index: its head, number, first row, rows, first key, keys.

    The last four are those of its sequence. An idle slot's tile is past the end of the rows.
    """
    cu_q_ptr, cu_k_ptr, stride_cq, stride_ck, B = boundaries
    total_q, total_k = totals
    slot, head = tile_of(index, shape, False)
    found, tile = tile_at(slot, order, boundaries, total_q, ORDERED, BLOCK_M)
    first_row, rows = rows_of(found, cu_q_ptr, stride_cq, B, total_q, True)
    first_key, keys = rows_of(found, cu_k_ptr, stride_ck, B, total_k, False)
    if RIGHT:
        # The longest rows first; an idle slot gets a tile before the first.
        tile = gl.cdiv(rows, BLOCK_M) - 1 - tile
    return head, tile, first_row, rows, first_key, keys


@gluon.jit
def _next(
    index, counter_ptr, order, boundaries, totals, shape, RIGHT: gl.constexpr,
    ORDERED: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """The first tile of rows from this index on that is not idle, as `_scheduled` returns it.

    If there is none, the head is -1. The indices that follow are drawn from a counter.
    """
    tiles = shape[6] * shape[7]
    head, tile, first_row, rows, first_key, keys = _scheduled(
        gl.minimum(index, tiles - 1), order, boundaries, totals, shape, RIGHT, ORDERED, BLOCK_M
    )
    idle = (tile < 0) | (tile * BLOCK_M >= rows)
    while idle & (index < tiles):
        index = drawn(counter_ptr, tiles)
        head, tile, first_row, rows, first_key, keys = _scheduled(
            gl.minimum(index, tiles - 1), order, boundaries, totals, shape, RIGHT, ORDERED, BLOCK_M
        )
        idle = (tile < 0) | (tile * BLOCK_M >= rows)
    head = gl.where(index < tiles, head, -1)
    return head, tile, first_row, rows, first_key, keys


@gluon.jit
def _sizes(rows, keys, shape, window):
    """The sizes that `forward_hopper.py` knows, of one sequence."""
    before, after = window
    left, right = bounds_in(rows, keys, before, after)
    return rows, keys, shape[2], shape[3], left, right, shape[6], shape[7], shape[8]


@gluon.jit
def _walk(tile, sizes, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_M: gl.constexpr,
          BLOCK_N: gl.constexpr):  # fmt: skip
    """The tiles of keys that a tile of rows walks, as `key_tiles`; at least one."""
    SQ, SK, H, GROUP, left, right, tiles_m, heads, near = sizes
    padded = SQ, gl.maximum(1, SK), H, GROUP, left, right, tiles_m, heads, near
    return key_tiles(tile, padded, LEFT, RIGHT, BLOCK_M, BLOCK_N)


@gluon.jit
def _copy_keys(
    begin, end, last, step, numbers, descs, rings, barriers, shape, options: gl.constexpr
):
    """Start the copies of the tiles of keys and values from number `begin` of a walk to `end`.

    last: the end of the walk, which begins there. Returns the step.
    """
    BLOCK_N: gl.constexpr = options[3]
    K_SLOTS: gl.constexpr = options[5]
    V_SLOTS: gl.constexpr = options[6]
    k_desc, v_desc, k_ring, v_ring = descs[1], descs[2], rings[1], rings[2]
    k_full, k_free, v_full, v_free = barriers[2:6]
    head, first_key, keys = numbers[0], numbers[4], numbers[5]
    key_head = head // shape[3]
    for back in range(begin, end):
        at = rows_at(key_head, first_key, keys, (last - 1 - back) * BLOCK_N)
        slot = step % K_SLOTS
        mbarrier.wait(k_free.index(slot), step // K_SLOTS % 2 ^ 1)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, at, k_full.index(slot), k_ring.index(slot))
        slot = step % V_SLOTS
        mbarrier.wait(v_free.index(slot), step // V_SLOTS % 2 ^ 1)
        mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, at, v_full.index(slot), v_ring.index(slot))
        step += 1
    return step


@gluon.jit
def producer(
    descs, rings, barriers, shape, boundaries, totals, window, counter_ptr, options: gl.constexpr
):
    """Start all copies of a program, and tell the groups which tiles of rows it takes."""
    LEFT: gl.constexpr = options[0]
    RIGHT: gl.constexpr = options[1]
    BLOCK_N: gl.constexpr = options[3]
    GROUPS: gl.constexpr = options[4]
    K_SLOTS: gl.constexpr = options[5]
    q_desc, q_ring, q_full = descs[0], rings[0], barriers[0]
    tiles = shape[6] * shape[7]
    SHARING: gl.constexpr = q_desc.block_type.shape[-3]
    GROUP_ROWS: gl.constexpr = q_desc.block_type.shape[-2]
    BLOCK_M: gl.constexpr = GROUPS * GROUP_ROWS
    turn, step = 0, 0
    ORDERED: gl.constexpr = options[9]
    order = rings[5]
    head, tile, first_row, rows, first_key, keys = _next(
        gl.program_id(0), counter_ptr, order, boundaries, totals, shape, RIGHT, ORDERED, BLOCK_M
    )
    tell((head, tile, first_row, rows, first_key, keys), rings[4], barriers[1], barriers[6], 0)
    while head >= 0:
        numbers = head, tile, first_row, rows, first_key, keys
        first, _, _, last = _walk(
            tile, _sizes(rows, keys, shape, window), LEFT, RIGHT, BLOCK_M, BLOCK_N
        )
        # The groups have read the numbers of the tile before, so they are done with the rows of the
        # one before that, and its slots are free.
        for which in gl.static_range(GROUPS):
            slot = turn % Q_SLOTS * GROUPS + which
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            row = (tile * GROUPS + which) * GROUP_ROWS
            at = rows_at(head * SHARING, first_row, rows, row)
            tma.async_copy_global_to_shared(q_desc, at, q_full.index(slot), q_ring.index(slot))
        steps = last - first
        early = gl.minimum(steps, K_SLOTS)
        step = _copy_keys(0, early, last, step, numbers, descs, rings, barriers, shape, options)
        # The groups have work, so the next sequence is found in time.
        head, tile, first_row, rows, first_key, keys = _next(
            drawn(counter_ptr, tiles), counter_ptr, order, boundaries, totals, shape, RIGHT,
            ORDERED, BLOCK_M,
        )  # fmt: skip
        step = _copy_keys(early, steps, last, step, numbers, descs, rings, barriers, shape, options)
        turn += 1
        tell(
            (head, tile, first_row, rows, first_key, keys), rings[4], barriers[1], barriers[6], turn
        )


@gluon.jit
def _begun(
    scores, tile, last, own, sizes, nothing, no_sums, factor, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Weights, m and l of the first tile of keys that a group's rows of a tile walk.

    scores: of the first keys of the tile, as `begin_softmax` takes them.
    """
    rows = gl.convert_layout(tile * BLOCK_M + own, gl.SliceLayout(1, scores.type.layout))
    scores = mask_scores(scores, (last - 1) * BLOCK_N, rows, sizes, LEFT, RIGHT)
    return begin_softmax(scores, nothing, no_sums, factor, BLOCK_N)


@gluon.jit
def consumer(
    descs, rings, barriers, shape, totals, window, numbers, WHICH: gl.constexpr,
    options: gl.constexpr,
):  # fmt: skip
    """Compute the rows of one group in each tile of the program."""
    factor = numbers[2]
    LEFT: gl.constexpr = options[0]
    RIGHT: gl.constexpr = options[1]
    BLOCK_N: gl.constexpr = options[3]
    GROUPS: gl.constexpr = options[4]
    V_SLOTS: gl.constexpr = options[6]
    DIAGONAL: gl.constexpr = options[10]
    out_desc, out_ring = descs[3], rings[3]
    v_free = barriers[5]
    SHARING: gl.constexpr = out_desc.block_type.shape[-3]
    GROUP_ROWS: gl.constexpr = out_desc.block_type.shape[-2]
    ROWS: gl.constexpr = SHARING * GROUP_ROWS
    BLOCK_M: gl.constexpr = GROUPS * GROUP_ROWS
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
    index = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    own, member = WHICH * GROUP_ROWS + index % GROUP_ROWS, index // GROUP_ROWS
    turn, step = 0, 0
    head, tile, first_row, rows, _, keys = told(rings[4], barriers[1], barriers[6], turn)
    p = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    m, l = nothing, no_sums
    if head >= 0:
        # The first scores of the other tiles come at the end of the loop.
        sizes = _sizes(rows, keys, shape, window)
        _, _, _, last = _walk(tile, sizes, LEFT, RIGHT, BLOCK_M, BLOCK_N)
        scores = first_scores(rings, barriers, no_scores, WHICH, options)
        p_next, m, l = _begun(
            scores, tile, last, own, sizes, nothing, no_sums, factor, LEFT, RIGHT, BLOCK_M, BLOCK_N
        )
        p = gl.convert_layout(p_next, SCORES)
    p = gl.convert_layout(p.to(out_desc.dtype), FACTOR)
    while head >= 0:
        sizes = _sizes(rows, keys, shape, window)
        first, whole, cut, last = _walk(tile, sizes, LEFT, RIGHT, BLOCK_M, BLOCK_N)
        acc = gl.zeros([ROWS, D], gl.float32, ACC)
        q = matrix_of(rings[0], turn % Q_SLOTS * GROUPS + WHICH)
        step += 1
        for back in range(2, last - first + 1):
            key_tile = last - back
            acc, p, m, l, step = attend_key_tile(
                acc, p, m, l, step, key_tile * BLOCK_N, (key_tile < whole) | (key_tile >= cut),
                q, rings, barriers, tile * BLOCK_M + own, sizes, factor, zeros, WHICH, options,
            )  # fmt: skip
        turn += 1
        own_head, start_m, own_row, own_rows = head, tile * BLOCK_M, first_row, rows
        head, tile, first_row, rows, _, keys = told(rings[4], barriers[1], barriers[6], turn)
        m_next, l_next = m, l
        if head >= 0:
            scores, acc = next_scores(
                acc, p, turn, step, rings, barriers, no_scores, WHICH, options
            )
            sizes = _sizes(rows, keys, shape, window)
            _, _, _, last = _walk(tile, sizes, LEFT, RIGHT, BLOCK_M, BLOCK_N)
            p_next, m_next, l_next = _begun(
                scores, tile, last, own, sizes, nothing, no_sums, factor, LEFT, RIGHT, BLOCK_M,
                BLOCK_N,
            )  # fmt: skip
            acc, p = warpgroup_mma_wait(0, (acc, p))
            p = gl.convert_layout(p_next.to(p.dtype), p.type.layout)
        else:
            acc = start_values(rings, barriers, step - 1, p, acc, V_SLOTS)
            acc, p = warpgroup_mma_wait(0, (acc, p))
        mbarrier.arrive(v_free.index((step - 1) % V_SLOTS), count=1)
        own_head *= SHARING
        place = gl.cast(own_head + member, gl.int64) * totals[0] + own_row + start_m + own
        at = rows_at(own_head, own_row, own_rows, start_m + WHICH * GROUP_ROWS)
        inside = start_m + own < own_rows
        store_rows(acc, m, l, place, inside, at, out_desc, out_ring, numbers, WHICH)
        m, l = m_next, l_next
    tma.store_wait(0)


CHANGING = [
    "stride_cq", "stride_ck", "B", "TOTAL_Q", "TOTAL_K", "H", "GROUP", "before",
    "after", "slots", "near",
]  # fmt: skip


@gluon.jit(do_not_specialize=CHANGING)
def packed_forward_hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, stats_ptr, cu_q_ptr, cu_k_ptr, counter_ptr,
    stride_cq, stride_ck, B, TOTAL_Q, TOTAL_K, H, GROUP, before, after, slots, near, scale,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, ORDERED: gl.constexpr, DIAGONAL: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr,
    K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr,
    TURNS: gl.constexpr, PINNED: gl.constexpr, Q_LOADED: gl.constexpr,
    SPLIT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """out = softmax(scale q kᵀ) v, lse = log sum exp(scale q kᵀ), for each head and sequence.

    Grid: programs, one a multiprocessor at most, that share the `slots` of each head. A slot holds
    a tile of rows of one sequence, or none, as in `packed.py`, or, if ORDERED, as in
    `sequences_hopper.py`, whose `described_rows` makes the descriptors. Blocks of q and out are
    [1, 1, n, ROWS / n, D] if n heads share a tile. Those of k and v have BLOCK_N rows of a head.
    Writes lse and stats, [heads, TOTAL_Q] in float32 or None.

    cu_q, cu_k: boundaries [B + 1]. Heads that share tiles count as one in H, GROUP and near.
    GROUP: query heads of one key head. before, after: sizes of the window if LEFT, RIGHT. counter:
    one int32, zero, that hands out slots. TURNS, PINNED, Q_LOADED and SPLIT are zero; other
    parameters are those of attention's kernel.

    DIAGONAL: keys end in squares. It needs RIGHT with `after` zero, and as many rows as keys in
    each sequence that has keys. Tiles have SQUARE rows of one head and SQUARE keys.
    """
    shape = (TOTAL_Q, TOTAL_K, H, GROUP, 0, 0, slots, H, near)
    boundaries = cu_q_ptr, cu_k_ptr, stride_cq, stride_ck, B
    totals, window = (TOTAL_Q, TOTAL_K), (before, after)
    factor = gl.cast(scale, gl.float32) * LOG2E
    descs = q_desc, k_desc, v_desc, out_desc
    rings = (
        make_ring(q_desc, Q_SLOTS * GROUPS), make_ring(k_desc, K_SLOTS),
        make_ring(v_desc, V_SLOTS), make_ring(out_desc, GROUPS), numbers_to_tell(),
        order_of_sequences(),
    )  # fmt: skip
    barriers = (
        make_barriers(Q_SLOTS * GROUPS, 1), make_barriers(1, 1),
        make_barriers(K_SLOTS, 1), make_barriers(K_SLOTS, GROUPS),
        make_barriers(V_SLOTS, 1), make_barriers(V_SLOTS, GROUPS), make_barriers(1, GROUPS),
    )  # fmt: skip
    # Here, where a thread has registers for it.
    if ORDERED:
        BLOCK_M: gl.constexpr = GROUPS * q_desc.block_type.shape[-2]
        put_longest_first(rings[5], boundaries, totals, BLOCK_M)
    fence_async_shared()
    numbers = lse_ptr, stats_ptr, factor
    OPTIONS: gl.constexpr = (
        LEFT, RIGHT, False, BLOCK_N, GROUPS, K_SLOTS, V_SLOTS, TURNS, PINNED, ORDERED, DIAGONAL
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                producer,
                (descs, rings, barriers, shape, boundaries, totals, window, counter_ptr, OPTIONS),
            ),
            (consumer, (descs, rings, barriers, shape, totals, window, numbers, 0, OPTIONS)),
            (consumer, (descs, rings, barriers, shape, totals, window, numbers, 1, OPTIONS)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def packed_forward_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    stats: torch.Tensor | None,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    left: int | None,
    right: int | None,
    longest_k: int,
    square: bool,
    config: Config,
) -> None:
    """Write out, and lse and stats unless None, as `varlen_fwd` returns them.

    q, k, v, out: as `suits_packed` accepts them. left, right: sizes of the window, None if
    unbounded. longest_k: at least the keys of the longest sequence.

    square: whether `ends_in_squares`.
    """
    sharing, count = heads_of_a_tile(q, k), cu_q.shape[0] - 1
    rows, block_n = config["ROWS"] // sharing, config["BLOCK_N"]
    h, group = q.shape[1] // sharing, q.shape[1] // k.shape[1] // sharing
    near = near_heads(as_batch(q), as_batch(k), right is not None, longest_k) // sharing
    slots = q.shape[0] // (rows * config["GROUPS"]) + cu_q.shape[0]
    packed_forward_hopper_kernel[(min(sm_count(q.device), slots * h),)](
        q_desc=described_rows(q, rows, sharing), k_desc=described_rows(k, block_n),
        v_desc=described_rows(v, block_n), out_desc=described_rows(out, rows, sharing),
        lse_ptr=lse, stats_ptr=stats, cu_q_ptr=cu_q, cu_k_ptr=cu_k,
        counter_ptr=arrival_counter(q.device), stride_cq=cu_q.stride(0), stride_ck=cu_k.stride(0),
        B=count, TOTAL_Q=q.shape[0], TOTAL_K=k.shape[0], H=h, GROUP=group, before=left or 0,
        after=right or 0, slots=slots, near=near, scale=scale, LEFT=left is not None,
        RIGHT=right is not None, ORDERED=count < SORTED.value,
        DIAGONAL=square and block_n == rows * config["GROUPS"] == SQUARE, **config,
    )  # fmt: skip


def as_batch(x: torch.Tensor) -> torch.Tensor:
    """Return packed x, [total, H, D], as a batch of one: [1, H, total, D]."""
    return x.transpose(0, 1).unsqueeze(0)


def heads_of_a_tile(q: torch.Tensor, k: torch.Tensor) -> int:
    """Return how many query heads of a key head share tiles of rows: a power of two."""
    group = q.shape[1] // max(1, k.shape[1])
    # Its lowest bit is the largest power of two that divides it.
    return min(MOST_SHARING, max(1, group & -group))


def mean_length(x: torch.Tensor, cu: torch.Tensor) -> int:
    """Return the average length of sequences of packed x, rounded down to a power of two, or 0."""
    mean = x.shape[0] // max(1, cu.shape[0] - 1)
    return 1 << mean.bit_length() - 1 if mean else 0


def suits_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, longest: int) -> bool:
    """Return whether the kernel can take q, k and v, and so many rows of a head fill its tiles."""
    bounded = max(q.shape[0], k.shape[0]) < TOO_MANY_ROWS
    return longest >= TILE_ROWS and bounded and suits(*map(as_batch, (q, k, v)))


FORWARD = Configs(
    packed_forward_hopper_kernel,
    CONFIGS,
    choose,
    fits,
    family="attention_varlen",
)

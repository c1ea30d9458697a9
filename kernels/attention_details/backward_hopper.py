"""The backward pass of attention on Hopper: five products a tile, dq summed in memory in float32.

A program owns 128 keys of one key head: two warpgroups of 64 keys each. It walks the rows that see
them, which four loading warps bring by TMA, and whose numbers they tell. A group holds its scores
transposed, [keys, rows]. So the transposes of P and of dS are factors in registers, for dv and dk.
The dS of both groups meet in shared memory for dq; each group computes half of dq.

TMA adds dq to memory in float32 (`dq_sums_hopper.py`). The order of these sums may differ from run
to run, and with it the last bits of dq; the form in `backward.py` has one order.
"""

from collections.abc import Callable

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .._runtime.configs import Config
from .._triton.math import LOG2E
from .dq_sums_hopper import GROUPS, add_dq, begun, no_dq_of, rounded, sums_of
from .forward_hopper import NEAR_BYTES
from .hopper_tiles import block_matrix, described, flat, layout_of, make_barriers, make_ring
from .launch import like

# Keys of a warpgroup.
KEYS = 64
# Registers of a thread of a group.
REGISTERS = gl.constexpr(240)


def tile(rows, slots, early_m=0, delta_first=0):
    return {
        "BLOCK_M": rows, "SLOTS": slots, "EARLY_M": early_m, "DELTA_FIRST": delta_first,
        "num_warps": 4,
    }  # fmt: skip


EARLY, WIDE, DEEP, PLAIN = tile(64, 2, early_m=1), tile(128, 2), tile(64, 3), tile(64, 2)
WIDE_CAUSAL = tile(128, 2, delta_first=1)
CONFIGS = (EARLY, WIDE, DEEP, PLAIN, WIDE_CAUSAL)


def choose(d, causal):
    # See the lab book: sums of dq as threads hold them.
    return EARLY if d == 128 else WIDE_CAUSAL if causal else WIDE


@gluon.jit
def meet():
    """Both groups wait for each other."""
    gl.inline_asm_elementwise(
        "bar.sync 9, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def key_tile_of(sizes, BLOCK_N: gl.constexpr):
    """The tile of keys and the key head of this program; NEAR key heads run side by side."""
    SK, heads, near = sizes[1], sizes[6], sizes[7]
    tiles = gl.cdiv(SK, BLOCK_N)
    pid = gl.program_id(0)
    first = pid // (near * tiles) * near
    width = min(near, heads - first)
    within = pid - first * tiles
    return within // width, first + within % width


@gluon.jit
def row_tiles(
    tile, sizes, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The tiles of rows that see a tile of keys: first, whole, cut, last.

    Those from whole to cut see all its keys. Those from first to whole and from cut to last need a
    mask, as do all of a tile that the end of the keys cuts.
    """
    SQ, SK, left, right = sizes[0], sizes[1], sizes[4], sizes[5]
    start = tile * BLOCK_N
    first, end, cut = 0, SQ, SQ
    if LEFT:
        end = max(0, min(SQ, start + BLOCK_N - left))
        cut = max(0, min(SQ, start + 1 - left))
    last = gl.cdiv(end, BLOCK_M)
    whole = first
    if RIGHT:
        first = min(max(0, start - right) // BLOCK_M, last)
        whole = gl.cdiv(max(0, start + BLOCK_N - 1 - right), BLOCK_M)
        whole = max(first, min(whole, last))
    # Rows past the end have weights of zero without a mask.
    cut = max(whole, gl.where(cut == SQ, last, cut // BLOCK_M))
    cut = gl.where(start + BLOCK_N > SK, whole, cut)
    return first, whole, cut, last


@gluon.jit
def copy_keys(at, descs, rings, barriers):
    """Start the copies of a tile of keys and values."""
    k_desc, v_desc, kv_full = descs[1], descs[2], barriers[0]
    mbarrier.expect(kv_full.index(0), 2 * k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, at, kv_full.index(0), rings[1])
    tma.async_copy_global_to_shared(v_desc, at, kv_full.index(0), rings[2])


@gluon.jit
def copy_rows(at, place, told, step, descs, rings, barriers, SLOTS: gl.constexpr):
    """Tell the groups a tile of rows, and start the copies of its q, dO, m and delta.

    at: coordinates in q and dO. place: that of the first row in m and delta. told: the tile's
    numbers, as `tell_rows` takes them.
    """
    q_desc, dout_desc, m_desc, delta_desc = descs[0], descs[3], descs[4], descs[5]
    q_ring, dout_ring, m_ring, delta_ring = rings[0], rings[3], rings[4], rings[5]
    q_full, dout_full, free = barriers[1:]
    slot = step % SLOTS
    mbarrier.wait(free.index(slot), step // SLOTS % 2 ^ 1)
    row_tile, head, masked = told
    tell_rows(rings[8], row_tile, head, masked, slot)
    mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes + m_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, at, q_full.index(slot), q_ring.index(slot))
    tma.async_copy_global_to_shared(m_desc, [place], q_full.index(slot), m_ring.index(slot))
    mbarrier.expect(
        dout_full.index(slot), dout_desc.block_type.nbytes + delta_desc.block_type.nbytes
    )
    tma.async_copy_global_to_shared(dout_desc, at, dout_full.index(slot), dout_ring.index(slot))
    tma.async_copy_global_to_shared(
        delta_desc, [place], dout_full.index(slot), delta_ring.index(slot)
    )


@gluon.jit
def producer(descs, rings, barriers, sizes, owned, options: gl.constexpr):
    """Start all copies of a program: its keys and values, then rows of q, dO, m and delta."""
    q_desc, k_desc = descs[0], descs[1]
    key_heads, GROUP, padded = sizes[2], sizes[3], sizes[8]
    LEFT: gl.constexpr = options[0]
    RIGHT: gl.constexpr = options[1]
    SLOTS: gl.constexpr = options[2]
    MASKED: gl.constexpr = options[5]
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[-2]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[-2]
    tile, b, key_head = owned
    tiles = row_tiles(tile, sizes, LEFT, RIGHT, BLOCK_M, BLOCK_N)
    copy_keys([b, key_head, tile * BLOCK_N, 0], descs, rings, barriers)
    step = 0
    for member in range(GROUP):
        h = key_head * GROUP + member
        place = (b * key_heads * GROUP + h) * padded
        for row_tile in range(tiles[0], tiles[3]):
            start = row_tile * BLOCK_M
            masked = 0
            if MASKED:
                masked = gl.where((row_tile < tiles[1]) | (row_tile >= tiles[2]), 1, 0)
            told = row_tile, b * key_heads * GROUP + h, masked
            copy_rows([b, h, start, 0], place + start, told, step, descs, rings, barriers, SLOTS)
            step += 1
    tell_end(step, rings, barriers, SLOTS)


@gluon.jit
def _kept(p, start_n, start_m, sizes, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """p [keys, rows], zero where a row does not see a key."""
    SK, left, right = sizes[1], sizes[4], sizes[5]
    LAYOUT: gl.constexpr = p.type.layout
    keys = start_n + gl.arange(0, p.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    rows = start_m + gl.arange(0, p.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    keep = keys < SK
    if RIGHT:
        keep = keep & (keys <= rows + right)
    if LEFT:
        keep = keep & (keys >= rows + left)
    return gl.where(keep, p, 0.0)


@gluon.jit
def _take_row_tile(
    dk, dv, step, told, start_n, descs, rings, barriers, sizes, factor, no_scores, no_dq,
    MASKED: gl.constexpr, WHICH: gl.constexpr, options: gl.constexpr,
):  # fmt: skip
    """Take a tile of rows into dk and dv, and add what it gives of dq to memory.

    told: what `_told_next` returned of the tile. Returns dk, dv, the next step and what is told of
    its tile.
    """
    LEFT: gl.constexpr = options[0]
    RIGHT: gl.constexpr = options[1]
    SLOTS: gl.constexpr = options[2]
    EARLY_M: gl.constexpr = options[3]
    DELTA_FIRST: gl.constexpr = options[4]
    q_ring, k_tile, v_tile, dout_ring, m_ring, delta_ring, ds_ring = rings[:7]
    dout_full, free = barriers[2], barriers[3]
    KEYS: gl.constexpr = dk.shape[0]
    D: gl.constexpr = dk.shape[1]
    BLOCK_M: gl.constexpr = no_scores.shape[1]
    ROWS: gl.constexpr = gl.SliceLayout(0, no_scores.type.layout)
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    row_tile, head, cut_by_mask, m = told
    slot, phase = step % SLOTS, step // SLOTS % 2
    q, dout = block_matrix(q_ring.index(slot)), block_matrix(dout_ring.index(slot))
    k, v = block_matrix(k_tile), block_matrix(v_tile)
    dp = no_scores
    if DELTA_FIRST:
        # After the product for scores has begun, the assembler would wait for it before this.
        mbarrier.wait(dout_full.index(slot), phase)
        dp = no_scores - delta_ring.index(slot).load(ROWS)[None, :]
    scores = warpgroup_mma(
        k.slice(WHICH * KEYS, KEYS), q.permute((1, 0)), no_scores, use_acc=False, is_async=True
    )
    if not DELTA_FIRST:
        mbarrier.wait(dout_full.index(slot), phase)
    dp = warpgroup_mma(
        v.slice(WHICH * KEYS, KEYS), dout.permute((1, 0)), dp, use_acc=DELTA_FIRST > 0,
        is_async=True,
    )  # fmt: skip
    scores = warpgroup_mma_wait(1, (scores,))
    if not EARLY_M:
        m = m_ring.index(slot).load(ROWS)
    p = gl.exp2(scores * factor - m[None, :])
    if MASKED:  # noqa: SIM102 (a constant and a value have no `and`)
        if cut_by_mask > 0:
            p = _kept(p, start_n + WHICH * KEYS, row_tile * BLOCK_M, sizes, LEFT, RIGHT)
    factor_p = gl.convert_layout(p.to(q.dtype), FACTOR)
    dv = warpgroup_mma(factor_p, dout, dv, is_async=True)
    dp = warpgroup_mma_wait(1, (dp,))
    if not DELTA_FIRST:
        dp = dp - delta_ring.index(slot).load(ROWS)[None, :]
    ds = (p * dp).to(q.dtype)
    factor_ds = gl.convert_layout(ds, FACTOR)
    dk = warpgroup_mma(factor_ds, q, dk, is_async=True)
    # Two slots: the other group has read this one before it came to the last meeting.
    shared = ds_ring.index(step % 2)
    shared.slice(WHICH * KEYS, KEYS).store(ds)
    fence_async_shared()
    meet()
    OWN: gl.constexpr = no_dq.shape[0]
    if OWN < BLOCK_M:
        mine = shared.slice(WHICH * OWN, OWN, dim=1)
        dq = warpgroup_mma(mine.permute((1, 0)), k, no_dq, use_acc=False, is_async=True)
    else:
        mine = k.slice(WHICH * (D // 2), D // 2, dim=1)
        dq = warpgroup_mma(shared.permute((1, 0)), mine, no_dq, use_acc=False, is_async=True)
    # The compiler must not reuse the registers of a factor before its product has read them.
    dv, dk, factor_p, factor_ds = warpgroup_mma_wait(1, (dv, dk, factor_p, factor_ds))
    mbarrier.arrive(free.index(slot), count=1)
    following = _told_next(step + 1, rings, barriers, no_scores, options)
    dq = warpgroup_mma_wait(0, (dq,))
    add_dq(dq, head * sizes[8] + row_tile * BLOCK_M, descs, rings, WHICH, BLOCK_M)
    return dk, dv, step + 1, following


@gluon.jit
def tell_rows(numbers, row_tile, head, masked, slot):
    """Put the numbers of a tile of rows beside its slot."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    numbers.index(3 * slot).store(gl.full([1], row_tile, gl.int32, LAYOUT))
    numbers.index(3 * slot + 1).store(gl.full([1], head, gl.int32, LAYOUT))
    numbers.index(3 * slot + 2).store(gl.full([1], masked, gl.int32, LAYOUT))


@gluon.jit
def _told_rows(numbers, slot):
    """The numbers that `tell_rows` puts there."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row_tile = gl.sum(numbers.index(3 * slot).load(LAYOUT), 0)
    head = gl.sum(numbers.index(3 * slot + 1).load(LAYOUT), 0)
    return row_tile, head, gl.sum(numbers.index(3 * slot + 2).load(LAYOUT), 0)


@gluon.jit
def _told_next(step, rings, barriers, no_scores, options: gl.constexpr):
    """The numbers of a step's tile of rows, and its m if the configuration reads it so early."""
    SLOTS: gl.constexpr = options[2]
    EARLY_M: gl.constexpr = options[3]
    slot = step % SLOTS
    mbarrier.wait(barriers[1].index(slot), step // SLOTS % 2)
    row_tile, head, masked = _told_rows(rings[8], slot)
    m = 0
    if EARLY_M:
        m = rings[4].index(slot).load(gl.SliceLayout(0, no_scores.type.layout))
    return row_tile, head, masked, m


@gluon.jit
def tell_end(step, rings, barriers, SLOTS: gl.constexpr):
    """Tell the groups that there is no further tile of rows: it has the number -1."""
    q_full, free = barriers[1], barriers[3]
    slot = step % SLOTS
    mbarrier.wait(free.index(slot), step // SLOTS % 2 ^ 1)
    tell_rows(rings[8], -1, 0, 0, slot)
    mbarrier.arrive(q_full.index(slot), count=1)


@gluon.jit
def numbers_of_rows(SLOTS: gl.constexpr):
    """Shared memory for the numbers of `tell_rows`."""
    return gl.allocate_shared_memory(
        gl.int32, [3 * SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )


@gluon.jit
def take_told_rows(
    start_n, descs, rings, barriers, sizes, factor, MASKED: gl.constexpr, WHICH: gl.constexpr,
    options: gl.constexpr,
):  # fmt: skip
    """dk and dv of a group's keys, from all tiles of rows whose numbers `tell_rows` tells.

    The groups hold gradients in nearly all registers, so they do not find these numbers themselves.
    """
    BLOCK_M: gl.constexpr = descs[0].block_type.shape[-2]
    KEYS: gl.constexpr = descs[7].block_type.shape[-2]
    D: gl.constexpr = descs[7].block_type.shape[-1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    no_scores = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES)
    no_dq = no_dq_of(BLOCK_M, D)
    dk, dv = gl.zeros([KEYS, D], gl.float32, ACC), gl.zeros([KEYS, D], gl.float32, ACC)
    mbarrier.wait(barriers[0].index(0), 0)
    step, told = 0, _told_next(0, rings, barriers, no_scores, options)
    while told[0] >= 0:
        dk, dv, step, told = _take_row_tile(
            dk, dv, step, told, start_n, descs, rings, barriers, sizes, factor, no_scores, no_dq,
            MASKED, WHICH, options,
        )  # fmt: skip
    return dk, dv


@gluon.jit
def store_keys(dk, dv, scale, at, descs, rings, WHICH: gl.constexpr):
    """Write dk and dv of a group's keys from `at` on."""
    dk_desc, dv_desc, k_tile, v_tile = descs[7], descs[8], rings[1], rings[2]
    KEYS: gl.constexpr = dk.shape[0]
    # Both groups have read all keys: their slots may hold what is to be written.
    meet()
    mine_k = k_tile.slice(WHICH * KEYS, KEYS, dim=-2)
    mine_v = v_tile.slice(WHICH * KEYS, KEYS, dim=-2)
    block_matrix(k_tile).slice(WHICH * KEYS, KEYS).store((dk * scale).to(dk_desc.dtype))
    block_matrix(v_tile).slice(WHICH * KEYS, KEYS).store(dv.to(dv_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_desc, at, mine_k)
    tma.async_copy_shared_to_global(dv_desc, at, mine_v)
    tma.store_wait(0)


@gluon.jit
def consumer(
    descs, rings, barriers, sizes, owned, scales, WHICH: gl.constexpr, options: gl.constexpr
):
    """Compute dk and dv of a group's keys, and a half of what the program gives of dq."""
    scale, factor = scales
    MASKED: gl.constexpr = options[5]
    KEYS: gl.constexpr = descs[7].block_type.shape[-2]
    tile, b, key_head = owned
    start_n = tile * (GROUPS * KEYS)
    dk, dv = take_told_rows(start_n, descs, rings, barriers, sizes, factor, MASKED, WHICH, options)
    store_keys(dk, dv, scale, [b, key_head, start_n + WHICH * KEYS, 0], descs, rings, WHICH)


@gluon.jit
def rings_of(descs, DS: gl.constexpr, SLOTS: gl.constexpr):
    """Shared memory for the blocks of the first seven descriptors, and between them for dS.

    DS: the layout of dS. There is one block of k, and one of v.
    """
    q_desc, k_desc, v_desc, dout_desc, m_desc, delta_desc, dq_desc = descs[:7]
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[-2]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[-2]
    return (
        make_ring(q_desc, SLOTS), make_ring(k_desc, 1).index(0), make_ring(v_desc, 1).index(0),
        make_ring(dout_desc, SLOTS), make_ring(m_desc, SLOTS), make_ring(delta_desc, SLOTS),
        gl.allocate_shared_memory(q_desc.dtype, [2, BLOCK_N, BLOCK_M], DS),
        make_ring(dq_desc, GROUPS),
    )  # fmt: skip


@gluon.jit
def barriers_of(SLOTS: gl.constexpr):
    """Barriers for keys and values, for q, for dO, and for slots that are free."""
    return (
        make_barriers(1, 1), make_barriers(SLOTS, 1), make_barriers(SLOTS, 1),
        make_barriers(SLOTS, GROUPS),
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=["GROUP", "SQ", "SK", "key_heads", "left", "right", "heads", "near", "padded"]
)
def backward_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc, m_desc, delta_desc, dq_desc, dk_desc, dv_desc,
    key_heads, GROUP, SQ, SK, left, right, heads, near, padded, scale,
    DS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, WHOLE: gl.constexpr,
    BLOCK_M: gl.constexpr, SLOTS: gl.constexpr, EARLY_M: gl.constexpr, DELTA_FIRST: gl.constexpr,
):  # fmt: skip
    """dv = Pᵀ dO, dk = scale dSᵀ q, and sums of dS k in memory, for each key head.

    Grid: cdiv(SK, 128) * heads programs. Reads q and dO by descriptors of blocks [1, 1, BLOCK_M,
    D], k and v by blocks [1, 1, 128, D]. Reads m and delta, [B * H * padded], by blocks [BLOCK_M].
    m is in base 2, and infinity for a row that sees nothing. Adds to dq float32 [B * H * padded, D]
    by the blocks of `sums_of`. Writes dk and dv by blocks [1, 1, 64, D].

    heads: key heads of all batches, key_heads: of one. DS: the layout of dS in shared memory.
    EARLY_M: whether the next m is read under the product for dq. DELTA_FIRST: whether the product
    for dP begins at -delta. Other parameters are those of the forward kernel. `padded` is a
    multiple of BLOCK_M.
    """
    sizes = (SQ, SK, key_heads, GROUP, left, right, heads, near, padded)
    scale = gl.cast(scale, gl.float32)
    scales = scale, scale * LOG2E
    descs = (
        q_desc, k_desc, v_desc, dout_desc, m_desc, delta_desc, dq_desc, dk_desc, dv_desc
    )  # fmt: skip
    rings = rings_of(descs, DS, SLOTS) + (numbers_of_rows(SLOTS),)  # noqa: RUF005 (Triton unpacks no tuple)
    barriers = barriers_of(SLOTS)
    fence_async_shared()
    OPTIONS: gl.constexpr = (LEFT, RIGHT, SLOTS, EARLY_M, DELTA_FIRST, not WHOLE)
    tile, key_head = key_tile_of(sizes, k_desc.block_type.shape[-2])
    owned = tile, key_head // key_heads, key_head % key_heads
    gl.warp_specialize(
        [
            (producer, (descs, rings, barriers, sizes, owned, OPTIONS)),
            (consumer, (descs, rings, barriers, sizes, owned, scales, 0, OPTIONS)),
            (consumer, (descs, rings, barriers, sizes, owned, scales, 1, OPTIONS)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def descriptors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    m: torch.Tensor,
    delta: torch.Tensor,
    sums: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    block_m: int,
    of: Callable = described,
) -> dict[str, object]:
    """Return the descriptors of a kernel by parameter, and DS, the layout of dS.

    of: makes the descriptor of a tensor of rows or keys, with blocks of so many.
    """
    return {
        "q_desc": of(q, block_m),
        "k_desc": of(k, 2 * KEYS),
        "v_desc": of(v, 2 * KEYS),
        "dout_desc": of(dout, block_m),
        "m_desc": flat(m, block_m),
        "delta_desc": flat(delta, block_m),
        "dq_desc": sums_of(sums, block_m),
        "dk_desc": of(dk, KEYS),
        "dv_desc": of(dv, KEYS),
        "DS": layout_of(q.dtype, 2 * KEYS, block_m),
    }


def near_key_heads(q: torch.Tensor, k: torch.Tensor, longest: int | None = None) -> int:
    """Return how many key heads of all batches run side by side.

    longest: the most rows that may see a key, if q holds several sequences.
    """
    (b, h, sq, d), heads = q.shape, k.shape[1]
    sq = sq if longest is None else min(sq, longest)
    return min(b * heads, max(1, NEAR_BYTES // (8 * sq * d * (h // heads))))


def backward_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    config: Config,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv; the last bits of dq may differ from call to call.

    Tensors as `attention_bwd` takes them, and as `suits` accepts q, k, v and dout.
    """
    (b, h, sq, _), (key_heads, sk) = q.shape, k.shape[1:3]
    dk, dv = like(k), like(v)
    padded, m, delta, sums = begun(q, out, stats, dout, dlse)
    backward_hopper_kernel[(triton.cdiv(sk, 2 * KEYS) * b * key_heads,)](
        **descriptors(q, k, v, dout, m, delta, sums, dk, dv, config["BLOCK_M"]),
        key_heads=key_heads, GROUP=h // key_heads, SQ=sq, SK=sk,
        left=0 if left is None else sk - sq - left, right=0 if right is None else sk - sq + right,
        heads=b * key_heads, near=near_key_heads(q, k), padded=padded, scale=scale,
        LEFT=left is not None, RIGHT=right is not None,
        WHOLE=left is None and right is None and sk % (2 * KEYS) == 0, **config,
    )  # fmt: skip
    return rounded(q, sums, padded, scale, config["BLOCK_M"]), dk, dv

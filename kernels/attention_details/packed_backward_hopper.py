"""The backward pass of attention over packed sequences on Hopper.

A program has the warps and rings of `backward_hopper.py`. It owns 128 keys of one sequence and key
head, which it finds by the boundaries, as `sequences_hopper.py` has it. The numbers m and delta and
the sums of dq have an own place for each sequence, a multiple of the rows of a tile. So no tile
reaches into the place of another sequence.

A tile of q, dO, k or v ends with its sequence: past the end TMA reads zeros and writes nothing.
Rows of the next sequence would have weights of zero, but zero times an infinity is no zero.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .._runtime.configs import Config, Configs
from .._triton.math import LOG2E
from .backward_hopper import (
    CONFIGS,
    DEEP,
    KEYS,
    PLAIN,
    REGISTERS,
    barriers_of,
    choose,
    copy_keys,
    copy_rows,
    descriptors,
    near_key_heads,
    numbers_of_rows,
    rings_of,
    row_tiles,
    store_keys,
    take_told_rows,
    tell_end,
)
from .dq_sums_hopper import GROUPS, NEARBY_ROWS, rounding, rows_of_held
from .hopper_tiles import readable
from .launch import like, strides_of
from .packed import rows_in, tile_in
from .packed_forward_hopper import as_batch, suits_packed
from .sequences_hopper import (
    SORTED,
    bounds_in,
    described_rows,
    order_of_sequences,
    put_longest_first,
    rows_at,
    rows_of,
    tile_at,
)


@gluon.jit
def _owned(
    boundaries, totals, shape, ORDERED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """The numbers of this program's tile of keys; its sizes are those `backward_hopper.py` knows.

    They are the tile, its key head, the first key and row of its sequence, and the place of its
    first row in m and delta. An idle program has a tile past the end of the keys.
    """
    cu_q_ptr, cu_k_ptr, stride_cq, stride_ck, B, before, after = boundaries
    total_q, total_k = totals
    key_heads, GROUP, slots, near, _ = shape
    pid = gl.program_id(0)
    first = pid // (near * slots) * near
    width = min(near, key_heads - first)
    within = pid - first * slots
    key_head = first + within % width
    # Here sequences own keys, and see rows.
    turned, order = (cu_k_ptr, cu_q_ptr, stride_ck, stride_cq, B), order_of_sequences()
    if ORDERED:
        put_longest_first(order, turned, (total_k, total_q), BLOCK_N)
    found, tile = tile_at(within // width, order, turned, total_k, ORDERED, BLOCK_N)
    first_key, keys = rows_of(found, cu_k_ptr, stride_ck, B, total_k, True)
    first_row, rows = rows_of(found, cu_q_ptr, stride_cq, B, total_q, False)
    left, right = bounds_in(rows, keys, before, after)
    place = (first_row // BLOCK_M + found) * BLOCK_M
    # The place of a row stands in for its head, so a head has one row.
    sizes = rows, keys, key_heads, GROUP, left, right, key_heads, near, 1
    return sizes, tile, key_head, first_key, first_row, place


@gluon.jit
def producer(descs, rings, barriers, sizes, owned, padded, options: gl.constexpr):
    """Start all copies of a program: its keys and values, then rows of q, dO, m and delta."""
    LEFT: gl.constexpr = options[0]
    RIGHT: gl.constexpr = options[1]
    SLOTS: gl.constexpr = options[2]
    BLOCK_M: gl.constexpr = descs[0].block_type.shape[-2]
    BLOCK_N: gl.constexpr = descs[1].block_type.shape[-2]
    tile, key_head, first_key, first_row, place = owned
    SQ, SK, GROUP = sizes[0], sizes[1], sizes[3]
    step = 0
    if tile * BLOCK_N < SK:
        copy_keys(rows_at(key_head, first_key, SK, tile * BLOCK_N), descs, rings, barriers)
        first, whole, cut, last = row_tiles(tile, sizes, LEFT, RIGHT, BLOCK_M, BLOCK_N)
        for member in range(GROUP):
            h = key_head * GROUP + member
            for row_tile in range(first, last):
                start = row_tile * BLOCK_M
                masked = gl.where((row_tile < whole) | (row_tile >= cut), 1, 0)
                told = row_tile, h * padded + place, masked
                at = rows_at(h, first_row, SQ, start)
                copy_rows(at, h * padded + place + start, told, step, descs, rings, barriers, SLOTS)
                step += 1
        tell_end(step, rings, barriers, SLOTS)


@gluon.jit
def consumer(
    descs, rings, barriers, sizes, owned, scales, WHICH: gl.constexpr, options: gl.constexpr
):
    """Compute dk and dv of a group's keys, and a half of what the program gives of dq."""
    scale, factor = scales
    KEYS: gl.constexpr = descs[7].block_type.shape[-2]
    tile, key_head, first_key, _, _ = owned
    SK, start_n = sizes[1], tile * (GROUPS * KEYS)
    if start_n < SK:
        dk, dv = take_told_rows(
            start_n, descs, rings, barriers, sizes, factor, True, WHICH, options
        )
        at = rows_at(key_head, first_key, SK, start_n + WHICH * KEYS)
        store_keys(dk, dv, scale, at, descs, rings, WHICH)


CHANGING = [
    "stride_cq", "stride_ck", "B", "TOTAL_Q", "TOTAL_K", "key_heads",
    "GROUP", "before", "after", "slots", "near", "padded",
]  # fmt: skip


@gluon.jit(do_not_specialize=CHANGING)
def packed_backward_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc, m_desc, delta_desc, dq_desc, dk_desc, dv_desc,
    cu_q_ptr, cu_k_ptr, stride_cq, stride_ck, B, TOTAL_Q, TOTAL_K, key_heads, GROUP, before, after,
    slots, near, padded, scale,
    DS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, ORDERED: gl.constexpr,
    BLOCK_M: gl.constexpr, SLOTS: gl.constexpr, EARLY_M: gl.constexpr, DELTA_FIRST: gl.constexpr,
):  # fmt: skip
    """dv = Pᵀ dO, dk = scale dSᵀ q, and sums of dS k in memory, for each sequence and key head.

    Grid: slots * key_heads programs. A slot holds a tile of 128 keys of one sequence, or none, as
    in `packed.py`, or, if ORDERED, as in `sequences_hopper.py`. Descriptors are those of
    `backward_hopper_kernel`, but those of rows and keys are of `described_rows`. A head has
    `padded` rows in m, delta and the sums.

    cu_q, cu_k: boundaries [B + 1]. before, after: sizes of the window if LEFT, RIGHT. Other
    parameters are those of `backward_hopper_kernel`.
    """
    boundaries = cu_q_ptr, cu_k_ptr, stride_cq, stride_ck, B, before, after
    totals, shape = (TOTAL_Q, TOTAL_K), (key_heads, GROUP, slots, near, padded)
    scale = gl.cast(scale, gl.float32)
    scales = scale, scale * LOG2E
    descs = (
        q_desc, k_desc, v_desc, dout_desc, m_desc, delta_desc, dq_desc, dk_desc, dv_desc
    )  # fmt: skip
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[-2]
    rings = rings_of(descs, DS, SLOTS) + (numbers_of_rows(SLOTS),)  # noqa: RUF005 (Triton unpacks no tuple)
    barriers = barriers_of(SLOTS)
    fence_async_shared()
    OPTIONS: gl.constexpr = (LEFT, RIGHT, SLOTS, EARLY_M, DELTA_FIRST)
    sizes, tile, key_head, first_key, first_row, place = _owned(
        boundaries, totals, shape, ORDERED, BLOCK_M, BLOCK_N
    )
    # The arguments of the groups may lie where the search had its numbers.
    gl.thread_barrier()
    owned = tile, key_head, first_key, first_row, place
    gl.warp_specialize(
        [
            (producer, (descs, rings, barriers, sizes, owned, padded, OPTIONS)),
            (consumer, (descs, rings, barriers, sizes, owned, scales, 0, OPTIONS)),
            (consumer, (descs, rings, barriers, sizes, owned, scales, 1, OPTIONS)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


@triton.jit
def _place_of(cu_ptr, stride, B, TOTAL, slots, H, SLOT: tl.constexpr, BLOCK_M: tl.constexpr):
    """The head of a program, its first row in memory, its rows there, and its place when padded."""
    PARTS: tl.constexpr = SLOT // BLOCK_M
    parts = slots * PARTS
    head, at = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    index, tile = tile_in(cu_ptr, stride, B, TOTAL, at // PARTS, SLOT)
    first, rows = rows_in(cu_ptr, stride, B, TOTAL, index, True)
    start = tile * SLOT + at % PARTS * BLOCK_M
    return head, first + start, rows - start, head * slots * SLOT + at * BLOCK_M


@triton.jit(do_not_specialize=["B", "TOTAL", "slots"])
def _delta_kernel(
    out_ptr, dout_ptr, dlse_ptr, stats_ptr, m_ptr, delta_ptr, sums_ptr, cu_ptr,
    stride_os, stride_oh, stride_dos, stride_doh, stride_cu, B, TOTAL, slots, H,
    SLOT: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO O) - dlse, m with infinity beside each sequence, and zeros for dq's sums.

    Grid: slots * SLOT / BLOCK_M * H programs. A program owns BLOCK_M padded rows of one head.
    """
    head, first, rows, place = _place_of(cu_ptr, stride_cu, B, TOTAL, slots, H, SLOT, BLOCK_M)
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, D)
    inside, row = offs_m < rows, (first + offs_m).to(tl.int64)
    at = row[:, None] * stride_os + head * stride_oh + offs_d[None, :]
    out = tl.load(out_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    at = row[:, None] * stride_dos + head * stride_doh + offs_d[None, :]
    dout = tl.load(dout_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + head * TOTAL + row, mask=inside, other=0.0)
    m = tl.load(stats_ptr + head * TOTAL + row, mask=inside, other=float("inf"))
    tl.store(delta_ptr + place + offs_m, delta)
    tl.store(m_ptr + place + offs_m, m)
    zeros = tl.zeros((BLOCK_M, D), tl.float32)
    tl.store(sums_ptr + (place + offs_m)[:, None] * D + offs_d[None, :], zeros)


@triton.jit(do_not_specialize=["B", "TOTAL", "slots"])
def _round_kernel(
    sums_ptr, dq_ptr, cu_ptr, stride_dqs, stride_dqh, stride_cu, B, TOTAL, slots, H, scale,
    SLOT: tl.constexpr, PART_ROWS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dq = scale sums, rounded. Grid: slots * SLOT / BLOCK_M * H programs of BLOCK_M rows.

    PART_ROWS: as in the dense kernel of this name.
    """
    head, first, rows, place = _place_of(cu_ptr, stride_cu, B, TOTAL, slots, H, SLOT, BLOCK_M)
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, D)
    inside, row = offs_m < rows, (first + offs_m).to(tl.int64)
    sums = tl.load(sums_ptr + place * D + tl.arange(0, BLOCK_M * D))
    dq = (sums * tl.cast(scale, tl.float32)).to(dq_ptr.dtype.element_ty)
    dq = rows_of_held(dq, PART_ROWS, BLOCK_M, D)
    at = row[:, None] * stride_dqs + head * stride_dqh + offs_d[None, :]
    tl.store(dq_ptr + at, dq, mask=inside[:, None])


def packed_backward_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    left: int | None,
    right: int | None,
    longest_q: int,
    config: Config,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv; the last bits of dq may differ from call to call.

    Tensors as `varlen_bwd` takes them and `suits_backward` accepts them. left, right: sizes of the
    window, None if unbounded. longest_q: at least the rows of the longest sequence.
    """
    (total_q, h, d), (total_k, heads, _) = q.shape, k.shape
    dq, dk, dv = like(q), like(k), like(v)
    count, slot = cu_q.shape[0] - 1, config["BLOCK_M"]
    slots_q, slots_k = total_q // slot + count + 1, total_k // (2 * KEYS) + count + 1
    padded = slots_q * slot
    m, delta = torch.empty((2, h * padded), dtype=torch.float32, device=q.device)
    sums = torch.empty((h * padded, d), dtype=torch.float32, device=q.device)
    nearby = {
        "cu_ptr": cu_q, "stride_cu": cu_q.stride(0), "B": count, "TOTAL": total_q, "slots": slots_q,
        "H": h, "SLOT": slot, "D": d, "BLOCK_M": NEARBY_ROWS, "num_warps": 4,
    }  # fmt: skip
    grid = (padded // NEARBY_ROWS * h,)
    _delta_kernel[grid](
        out_ptr=out, dout_ptr=dout, dlse_ptr=None if dlse is None else dlse.contiguous(),
        stats_ptr=stats, m_ptr=m, delta_ptr=delta, sums_ptr=sums,
        **strides_of("sh", o=out, do=dout), **nearby,
    )  # fmt: skip
    packed_backward_hopper_kernel[(slots_k * heads,)](
        **descriptors(
            q, k, v, dout, m, delta, sums, dk, dv, config["BLOCK_M"], of=described_rows
        ),
        cu_q_ptr=cu_q, cu_k_ptr=cu_k, stride_cq=cu_q.stride(0), stride_ck=cu_k.stride(0),
        B=count, TOTAL_Q=total_q, TOTAL_K=total_k, key_heads=heads, GROUP=h // heads,
        before=left or 0, after=right or 0, slots=slots_k,
        near=near_key_heads(as_batch(q), as_batch(k), longest_q), padded=padded, scale=scale,
        LEFT=left is not None, RIGHT=right is not None, ORDERED=count < SORTED.value, **config,
    )  # fmt: skip
    nearby |= rounding(slot)
    _round_kernel[(padded // nearby["BLOCK_M"] * h,)](
        sums_ptr=sums, dq_ptr=dq, scale=scale, **strides_of("sh", dq=dq), **nearby
    )
    return dq, dk, dv


def suits_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    cu_q: torch.Tensor,
    longest: int,
) -> bool:
    """Return whether the kernels can take these, and the sums of dq thrice their rows at most.

    longest: the smaller of the longest rows and keys of a sequence.
    """
    spare = PLAIN["BLOCK_M"] * cu_q.shape[0] <= 2 * q.shape[0]
    return spare and suits_packed(q, k, v, longest) and readable(as_batch(dout))


def choose_packed(mean, d, causal):
    # See the lab book: heads that share keys share tiles. An early m spills here.
    if d == 128:
        return PLAIN
    return DEEP if mean < 1024 else choose(d, causal)


def spares(config, mean, d, causal):
    """Return whether the sums of dq take thrice their rows at most, as `suits_backward` says."""
    return config["BLOCK_M"] <= max(PLAIN["BLOCK_M"], 2 * mean)


BACKWARD = Configs(
    packed_backward_hopper_kernel, CONFIGS, choose_packed, spares, family="attention_varlen"
)

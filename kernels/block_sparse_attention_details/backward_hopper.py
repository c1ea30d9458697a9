"""The backward pass of block-sparse attention on Hopper: attention's, over the lists of a mask.

A program has the warps and rings of `attention_details/backward_hopper.py`. It owns 128 keys of one
key head, which lie in one block of keys, and walks the kept blocks of rows of their lists. There is
a list for each query head. The keys with the longest lists of a head start first.

TMA adds dq to memory in float32, as there. So the last bits of dq may differ from run to run.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .._runtime.configs import Config, Configs
from .._triton.math import LOG2E
from ..attention_details.backward_hopper import (
    CONFIGS,
    KEYS,
    REGISTERS,
    barriers_of,
    choose,
    consumer,
    copy_keys,
    copy_rows,
    descriptors,
    near_key_heads,
    numbers_of_rows,
    rings_of,
    tell_end,
)
from ..attention_details.dq_sums_hopper import begun, rounded
from ..attention_details.launch import like
from .lists_hopper import entries_below, tile_start


@gluon.jit
def _owned(lists, sizes, BLOCK: gl.constexpr, BLOCK_N: gl.constexpr):
    """The tile of keys and the key head of this program; `near` key heads run side by side.

    The order of the tiles is that of the first query head.
    """
    _, _, order_ptr, blocks, stride_lb, stride_lh = lists
    key_heads, GROUP, heads, near = sizes[2], sizes[3], sizes[6], sizes[7]
    PARTS: gl.constexpr = BLOCK // BLOCK_N
    tiles, pid = blocks * PARTS, gl.program_id(0)
    first = pid // (near * tiles) * near
    width = min(near, heads - first)
    within = pid - first * tiles
    place, head = within // width, first + within % width
    line = head // key_heads * stride_lb + head % key_heads * GROUP * stride_lh
    block = gl.load(order_ptr + (gl.cast(line, gl.int64) * blocks + place // PARTS))
    return block * PARTS + place % PARTS, head


@gluon.jit
def _walk(
    tile, b, h, lists, sizes, CAUSAL: gl.constexpr, BLOCK: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The tiles of rows, of all lists, that a query head walks for a tile of keys.

    They are begin, whole, end: those before `whole` need a mask for the diagonal. No row of a tile
    outside sees a key.
    """
    offsets_ptr, indices_ptr, _, blocks, stride_lb, stride_lh = lists
    SQ, right = sizes[0], sizes[5]
    PARTS: gl.constexpr = BLOCK // BLOCK_M
    line = gl.cast(b * stride_lb + h * stride_lh, gl.int64) * (blocks + 1)
    block = tile // (BLOCK // BLOCK_N)
    first = gl.load(offsets_ptr + (line + block))
    last = gl.load(offsets_ptr + (line + block + 1))
    skipped, whole = 0, first
    if CAUSAL:
        unseen = max(0, tile * BLOCK_N - right)
        full = gl.cdiv(max(0, tile * BLOCK_N + BLOCK_N - 1 - right), BLOCK)
        first = entries_below(indices_ptr, first, last, unseen // BLOCK)
        whole = entries_below(indices_ptr, first, last, full)
        oldest = gl.load(indices_ptr + first, mask=first < last, other=0)
        skipped = max(0, unseen - oldest * BLOCK) // BLOCK_M
    newest = gl.load(indices_ptr + (last - 1), mask=first < last, other=0)
    parts = min(PARTS, gl.cdiv(SQ - newest * BLOCK, BLOCK_M))
    end = gl.where(first < last, last * PARTS - PARTS + parts, first * PARTS)
    return first * PARTS + skipped, whole * PARTS, end


@gluon.jit
def producer(descs, rings, barriers, sizes, lists, owned, options: gl.constexpr):
    """Start all copies of a program: its keys and values, then rows of q, dO, m and delta.

    The groups are told the number of each tile of rows, its head, and whether it needs a mask.
    """
    CAUSAL: gl.constexpr = options[1]
    SLOTS: gl.constexpr = options[2]
    BLOCK: gl.constexpr = options[6]
    BLOCK_M: gl.constexpr = descs[0].block_type.shape[-2]
    BLOCK_N: gl.constexpr = descs[1].block_type.shape[-2]
    key_heads, GROUP, padded = sizes[2], sizes[3], sizes[8]
    indices_ptr = lists[1]
    tile, b, key_head = owned
    copy_keys([b, key_head, tile * BLOCK_N, 0], descs, rings, barriers)
    keys_end = tile * BLOCK_N + BLOCK_N > sizes[1]
    step = 0
    for member in range(GROUP):
        h = key_head * GROUP + member
        head = b * key_heads * GROUP + h
        begin, whole, end = _walk(tile, b, h, lists, sizes, CAUSAL, BLOCK, BLOCK_M, BLOCK_N)
        start = tile_start(indices_ptr, begin, begin < end, BLOCK, BLOCK_M)
        for at in range(begin, end):
            following = tile_start(indices_ptr, at + 1, at + 1 < end, BLOCK, BLOCK_M)
            masked = gl.where((at < whole) | keys_end, 1, 0)
            told = start // BLOCK_M, head, masked
            place = head * padded + start
            copy_rows([b, h, start, 0], place, told, step, descs, rings, barriers, SLOTS)
            start = following
            step += 1
    tell_end(step, rings, barriers, SLOTS)


@gluon.jit(
    do_not_specialize=[
        "stride_lb", "stride_lh", "GROUP", "SQ", "SK", "key_heads", "blocks", "right", "heads",
        "near", "padded",
    ]
)  # fmt: skip
def block_sparse_backward_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc, m_desc, delta_desc, dq_desc, dk_desc, dv_desc,
    offsets_ptr, indices_ptr, order_ptr, stride_lb, stride_lh,
    key_heads, GROUP, SQ, SK, blocks, right, heads, near, padded, scale,
    DS: gl.constexpr, CAUSAL: gl.constexpr, WHOLE: gl.constexpr, BLOCK: gl.constexpr,
    BLOCK_M: gl.constexpr, SLOTS: gl.constexpr, EARLY_M: gl.constexpr, DELTA_FIRST: gl.constexpr,
):  # fmt: skip
    """dv = Pᵀ dO, dk = scale dSᵀ q, and sums of dS k in memory, over kept blocks.

    Grid: blocks * BLOCK / 128 * heads programs. Descriptors and parameters are those of attention's
    `backward_hopper_kernel`; the lists are those of columns of a BlockMask, with `blocks` a head.
    The number `right` is SK - SQ. WHOLE: neither the diagonal nor the end of the keys cuts a block.
    BLOCK: a multiple of BLOCK_M and of 128.
    """
    sizes = (SQ, SK, key_heads, GROUP, 0, right, heads, near, padded)
    lists = offsets_ptr, indices_ptr, order_ptr, blocks, stride_lb, stride_lh
    scale = gl.cast(scale, gl.float32)
    scales = scale, scale * LOG2E
    descs = (
        q_desc, k_desc, v_desc, dout_desc, m_desc, delta_desc, dq_desc, dk_desc, dv_desc
    )  # fmt: skip
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[-2]
    rings = rings_of(descs, DS, SLOTS) + (numbers_of_rows(SLOTS),)  # noqa: RUF005 (Triton unpacks no tuple)
    barriers = barriers_of(SLOTS)
    fence_async_shared()
    OPTIONS: gl.constexpr = (False, CAUSAL, SLOTS, EARLY_M, DELTA_FIRST, not WHOLE, BLOCK)
    tile, key_head = _owned(lists, sizes, BLOCK, BLOCK_N)
    owned = tile, key_head // key_heads, key_head % key_heads
    gl.warp_specialize(
        [
            (producer, (descs, rings, barriers, sizes, lists, owned, OPTIONS)),
            (consumer, (descs, rings, barriers, sizes, owned, scales, 0, OPTIONS)),
            (consumer, (descs, rings, barriers, sizes, owned, scales, 1, OPTIONS)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def backward_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    offsets: torch.Tensor,
    indices: torch.Tensor,
    order: torch.Tensor,
    block_size: int,
    scale: float,
    causal: bool,
    config: Config,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv; the last bits of dq may differ from call to call.

    Tensors as `block_sparse_bwd` takes them, and as `suits` of the forward pass accepts q, k, v and
    dout. offsets, indices, order: those of columns of a BlockMask.
    """
    (b, h, sq, _), (key_heads, sk) = q.shape, k.shape[1:3]
    dk, dv = like(k), like(v)
    batches, mask_heads, blocks = order.shape
    padded, m, delta, sums = begun(q, out, stats, dout, dlse)
    block_sparse_backward_hopper_kernel[(blocks * (block_size // (2 * KEYS)) * b * key_heads,)](
        **descriptors(q, k, v, dout, m, delta, sums, dk, dv, config["BLOCK_M"]),
        offsets_ptr=offsets, indices_ptr=indices, order_ptr=order,
        stride_lb=mask_heads if batches > 1 else 0, stride_lh=1 if mask_heads > 1 else 0,
        key_heads=key_heads, GROUP=h // key_heads, SQ=sq, SK=sk, blocks=blocks, right=sk - sq,
        heads=b * key_heads, near=near_key_heads(q, k), padded=padded, scale=scale, CAUSAL=causal,
        WHOLE=not causal and sk % block_size == 0, BLOCK=block_size, **config,
    )  # fmt: skip
    return rounded(q, sums, padded, scale, config["BLOCK_M"]), dk, dv


BACKWARD = Configs(
    block_sparse_backward_hopper_kernel, CONFIGS, choose, family="block_sparse_attention"
)

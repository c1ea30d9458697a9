"""Products with few tiles and a long K: parts of K are batches of one launch, and are added later.

A tile of 128x256 walks all of K alone, so a product with few of them leaves multiprocessors idle.
Here each part of K is a batch with a float32 result of its own. Items of K beyond equal parts are a
short product by themselves. A last kernel adds all of these in their order and finishes the tile.
They stay in the L2 cache.
"""

import torch
import triton
import triton.language as tl

from .._triton.memory import load_f32, store_as
from .batches import Operand, Walk
from .epilogue import activated, affine

# Parts of K at most. Each is a multiple of so many items.
MOST_PARTS, STEP = 8, 64
# The tile of the Hopper product.
ROWS, COLUMNS = 128, 256
# Nanoseconds of such a tile for each item of K, at three quarters of the rate of a full GPU. Those
# of the last kernel, and of the product of what is left (docs/lab/matmul.md). Tiles of a half would
# take half of the time each.
TILE_NS, COMBINE_NS, LEFT_NS = 12.6, 9000.0, 5000.0
# Items of a tile of the last kernel.
BLOCK_M, BLOCK_N = 8, 256


def parts_of(m: int, n: int, k: int, sms: int) -> int:
    """Return into how many parts to divide K; one if the tiles are many or K is short."""
    tiles = triton.cdiv(m, ROWS) * triton.cdiv(n, COLUMNS)
    parts = min(MOST_PARTS, sms // tiles, k // STEP)
    # Half of the multiprocessors are to have work, as small tiles would give it to all of them.
    if parts < 2 or 2 * tiles * parts < sms:
        return 1
    gain = k * TILE_NS * (1 / 2 - 1 / parts)
    return parts if gain > COMBINE_NS + LEFT_NS * (k % (parts * STEP) > 0) else 1


def launch_parts(walk: Walk, parts: int, epilogue: dict, launch) -> None:
    """Compute a product in parts of K, each of some times STEP items, and what is left of K.

    epilogue: arguments that finish a tile. launch: (walk, epilogue) -> starts a product.
    """
    a, b, out = (walk.operands[name].matrix for name in ("a", "b", "out"))
    (m, k), n = a.shape, b.shape[1]
    length = k // (parts * STEP) * STEP
    left = k - parts * length
    terms = parts + (left > 0)
    partial = torch.empty(
        (terms, m, triton.cdiv(n, 4) * 4), dtype=torch.float32, device=a.device
    ).narrow(2, 0, n)
    plain = {
        "bias_ptr": None, "up_bias_ptr": None, "scale": 1.0, "SCALED": False, "ACTIVATION": "none",
        "PRECISE": True, "ACCUMULATE": False,
    }  # fmt: skip

    def launch_from(first, count, items, place):
        """Start `count` products of so many items of K each, the first of them from `first` on."""
        operands = {
            "a": Operand(a.narrow(1, first, items), (0, items * a.stride(1))),
            "b": Operand(b.narrow(0, first, items), (0, items * b.stride(0))),
            "out": Operand(partial[place], (0, partial.stride(0))),
        }
        launch(Walk((1, count), dict.fromkeys(walk.operands) | operands), plain)

    launch_from(0, parts, length, 0)
    if left:
        launch_from(parts * length, 1, left, parts)
    residual = walk.operands["residual"]
    residual = residual and residual.matrix
    stride_rm, stride_rn = (0, 0) if residual is None else residual.stride()
    _combine_kernel[(triton.cdiv(m, BLOCK_M) * triton.cdiv(n, BLOCK_N),)](
        partial_ptr=partial, bias_ptr=epilogue["bias_ptr"], residual_ptr=residual, out_ptr=out,
        scale=epilogue["scale"], stride_p=partial.stride(0), stride_pm=partial.stride(1),
        stride_rm=stride_rm, stride_rn=stride_rn, stride_om=out.stride(0), stride_on=out.stride(1),
        M=m, N=n, PARTS=terms, SCALED=epilogue["SCALED"], ACTIVATION=epilogue["ACTIVATION"],
        PRECISE=epilogue["PRECISE"], ACCUMULATE=epilogue["ACCUMULATE"], BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N, num_warps=4,
    )  # fmt: skip


@triton.jit
def _combine_kernel(
    partial_ptr, bias_ptr, residual_ptr, out_ptr, scale, stride_p, stride_pm, stride_rm, stride_rn,
    stride_om, stride_on, M, N, PARTS: tl.constexpr, SCALED: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = activation(scale sum of partial + bias) + residual, [M, N].

    Grid: one program for each tile [BLOCK_M, BLOCK_N], by rows of tiles. Reads partial, PARTS
    matrices in float32 that lie stride_p apart, its columns side by side, and, unless its pointer
    is None, bias [N] and residual [M, N]. Writes out; with ACCUMULATE it adds to out. PRECISE:
    precision of the activation. M and N need not be multiples of the blocks.
    """
    across = tl.cdiv(N, BLOCK_N)
    offs_m = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, columns = offs_m.to(tl.int64)[:, None], offs_n.to(tl.int64)[None, :]
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    ptrs = partial_ptr + rows * stride_pm + columns
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in tl.static_range(PARTS):
        acc += tl.load(ptrs, mask=mask, other=0.0)
        ptrs += tl.cast(stride_p, tl.int64)
    acc = affine(acc, bias_ptr, scale, None, None, 0, 0, offs_m, offs_n, M, N, SCALED)
    out = activated(acc, ACTIVATION, PRECISE)
    if residual_ptr is not None:
        out += load_f32(residual_ptr + rows * stride_rm + columns * stride_rn, mask)
    offsets = rows * stride_om + columns * stride_on
    if ACCUMULATE:
        out += load_f32(out_ptr + offsets, mask)
    store_as(out_ptr + offsets, out, mask)

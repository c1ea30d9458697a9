"""Products with few tiles and a long K: parts of K are batches of one launch, and are added later.

A tile walks all of K alone, so a product with few of them leaves multiprocessors idle. Here each
part of K is a batch with a float32 result of its own (`cost.py` says how many parts pay). A last
kernel adds these in their order and finishes the tile. They stay in the L2 cache.
"""

import torch
import triton
import triton.language as tl

from .._runtime.vector_access import access_items
from .._triton.memory import load_f32, store_as
from .batches import Operand, Walk
from .epilogue import activated, affine

# Items of a tile of the last kernel.
BLOCK_M, BLOCK_N = 8, 256


def launch_parts(walk: Walk, parts: int, epilogue: dict, launch) -> None:
    """Compute a product in parts of K and add these.

    epilogue: arguments that finish a tile. launch: (walk, epilogue) -> starts a product.
    """
    out = walk.operands["out"].matrix
    m, n = out.shape
    partial = torch.empty(
        (parts, m, triton.cdiv(n, 4) * 4), dtype=torch.float32, device=out.device
    ).narrow(2, 0, n)
    plain = {
        "bias_ptr": None, "up_bias_ptr": None, "scale": 1.0, "SCALED": False, "ACTIVATION": "none",
        "PRECISE": True, "ACCUMULATE": False,
    }  # fmt: skip
    operands = dict.fromkeys(walk.operands) | {name: walk.operands[name] for name in ("a", "b")}
    operands["out"] = Operand(partial[0], (0, partial.stride(0)))
    launch(Walk((1, parts), operands, parted=True), plain)
    residual = walk.operands["residual"]
    residual = residual and residual.matrix
    stride_rm, stride_rn = (0, 0) if residual is None else residual.stride()
    _combine_kernel[(triton.cdiv(m, BLOCK_M) * triton.cdiv(n, BLOCK_N),)](
        partial_ptr=partial, bias_ptr=epilogue["bias_ptr"], residual_ptr=residual, out_ptr=out,
        scale=epilogue["scale"], stride_p=partial.stride(0), stride_pm=partial.stride(1),
        stride_rm=stride_rm, stride_rn=stride_rn, stride_om=out.stride(0), stride_on=out.stride(1),
        M=m, N=n, PARTS=parts, SCALED=epilogue["SCALED"], ACTIVATION=epilogue["ACTIVATION"],
        PRECISE=epilogue["PRECISE"], ACCUMULATE=epilogue["ACCUMULATE"],
        ITEMS=access_items(out.element_size(), n, out.stride(0)), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _combine_kernel(
    partial_ptr, bias_ptr, residual_ptr, out_ptr, scale, stride_p, stride_pm, stride_rm, stride_rn,
    stride_om, stride_on, M, N, PARTS: tl.constexpr, SCALED: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, ACCUMULATE: tl.constexpr, ITEMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = activation(scale sum of partial + bias) + residual, [M, N].

    Grid: one program for each tile [BLOCK_M, BLOCK_N], by rows of tiles. Reads partial, PARTS
    matrices in float32 that lie stride_p apart, its columns side by side, and, unless its pointer
    is None, bias [N] and residual [M, N]. Writes out; with ACCUMULATE it adds to out. PRECISE:
    precision of the activation. N and the distance of rows of out are multiples of ITEMS, and that
    of partial of 4. M and N need not be multiples of the blocks.
    """
    stride_pm, stride_om = stride_pm // 4 * 4, stride_om // ITEMS * ITEMS
    N = N // ITEMS * ITEMS
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

"""The losses of logits x wᵀ + b that are in memory at no time: a matmul keeps what its tiles weigh.

Of each row of a tile of logits, while it is in registers, the kernel of the product writes the
maximum, the sum of exp of what the entries lie below it and, for label smoothing, the plain sum; of
the tile that has the target of the row also its logit, which in any other order of summation might
pass the maximum and make the loss negative. A second kernel joins the tiles of a row as `walk` of
kernels/cross_entropy_details/row.py joins its lanes. After Hopper's kernel, which writes no such
logit, it computes that one anew, from two rows, and takes the maximum in the place of a greater
one. FLOPs: 2 M H V, and there 2 M H. Bytes: x and w, as often as they leave the L2 cache, and 8 or
12 for each row of a tile.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .._runtime.configs import Configs
from .._runtime.device import is_hopper, shared_bytes, sm_count
from .._runtime.layout import tma_compatible
from .._triton.math import LOG2E
from . import linear_tiles_hopper as hopper
from .row import row_loss

# Entries of two rows that are multiplied at a time.
MULTIPLIED = 1024
TILE_CONFIGS = tuple(
    {
        "BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": 64, "GROUP_M": group,
        "num_warps": 8, "num_stages": stages,
    }
    for rows, columns in ((128, 256), (256, 128))
    for group in (16, 8)
    for stages in (3, 4)
)  # fmt: skip


def choose_tile(v, h):
    return TILE_CONFIGS[0]


@triton.jit
def linear_tiles_kernel(
    x_desc, weight_desc, bias_ptr, targets_ptr, parts_ptr, own_ptr, M, V, H,
    SMOOTH: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(V, BLOCK_N)
    for pid in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        first = pid // (GROUP_M * tiles_n) * GROUP_M
        rows = tl.minimum(tiles_m - first, GROUP_M)
        within = pid % (GROUP_M * tiles_n)
        start_m, tile_n = (first + within % rows) * BLOCK_M, within // rows
        x = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, H, BLOCK_K):
            weight = weight_desc.load([tile_n * BLOCK_N, start])
            x = tl.dot(x_desc.load([start_m, start]), weight.T, x)
        classes = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + classes, mask=classes < V, other=0.0)
            x += bias.to(tl.float32)[None, :]
        offs_m = start_m + tl.arange(0, BLOCK_M)
        mask = offs_m < M
        part_ptrs = parts_ptr + offs_m.to(tl.int64) * tiles_n + tile_n
        further = tl.cast(M, tl.int64) * tiles_n
        if SMOOTH:
            # What the copy engine reads past the last class is zero, and so is the bias there.
            tl.store(part_ptrs + 2 * further, tl.sum(x, 1), mask=mask)
        targets = tl.load(targets_ptr + offs_m, mask=mask, other=-1)
        places = targets - tile_n * BLOCK_N
        here = mask & (places >= 0) & (places < BLOCK_N) & (targets < V)
        is_own = tl.arange(0, BLOCK_N)[None, :] == places.to(tl.int32)[:, None]
        tl.store(own_ptr + offs_m, tl.sum(tl.where(is_own, x, 0.0), 1), mask=here)
        if not WHOLE:
            x = tl.where((classes < V)[None, :], x, -float("inf"))
        top = tl.max(x, 1)
        # A row that has only minus infinity must not subtract it from itself.
        # Multiplied first, so that one instruction does for an entry what else takes two.
        base = tl.where(top == -float("inf"), 0.0, top) * LOG2E
        total = tl.sum(tl.exp2(x * LOG2E - base[:, None]), 1)
        tl.store(part_ptrs, top, mask=mask)
        tl.store(part_ptrs + further, total, mask=mask)


@triton.jit
def _join_kernel(
    parts_ptr, own_ptr, x_ptr, weight_ptr, targets_ptr, losses_ptr, stride_xm, stride_wv,
    M, V, H, tiles, ignore_index, smoothing, z_loss,
    SMOOTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row).to(tl.int64)
    loss = 0.0
    if target != ignore_index:
        inside = (target >= 0) & (target < V)
        if own_ptr is not None:
            own = tl.load(own_ptr + row, mask=inside, other=0.0)
        else:
            products = tl.zeros((BLOCK_H,), tl.float32)
            for start in range(0, H, BLOCK_H):
                offs = start + tl.arange(0, BLOCK_H)
                mask = (offs < H) & inside
                x = tl.load(x_ptr + row * stride_xm + offs, mask=mask, other=0.0)
                weight = tl.load(weight_ptr + target * stride_wv + offs, mask=mask, other=0.0)
                products += x.to(tl.float32) * weight.to(tl.float32)
            own = tl.sum(products, 0)
        own = tl.where(inside, own, float("nan"))
        offs = tl.arange(0, BLOCK_T)
        mask = offs < tiles
        part_ptrs = parts_ptr + row * tiles + offs
        further = tl.cast(M, tl.int64) * tiles
        tops = tl.load(part_ptrs, mask=mask, other=-float("inf"))
        totals = tl.load(part_ptrs + further, mask=mask, other=0.0)
        top = tl.max(tops, 0)
        base = tl.where(top == -float("inf"), 0.0, top)
        total = tl.sum(totals * tl.exp2((tops - base) * LOG2E), 0)
        # The maximum itself is one of the terms; where its exponent is rounded it is not quite one.
        total = tl.where(total < 1.0, 1.0, total)
        own = tl.where(own > top, top, own)
        plain = 0.0
        if SMOOTH:
            plain = tl.sum(tl.load(part_ptrs + 2 * further, mask=mask, other=0.0), 0)
        loss, _ = row_loss(own, top, total, plain, V, smoothing, z_loss, SMOOTH)
    tl.store(losses_ptr + row, loss)


TILES = Configs(linear_tiles_kernel, TILE_CONFIGS, choose_tile, family="linear_cross_entropy")
HOPPER_TILES = Configs(
    hopper.linear_tiles_hopper_kernel, hopper.CONFIGS, hopper.choose, family="linear_cross_entropy"
)


def suited(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there is a tile for each multiprocessor, the copy engine can walk x and weight, of
    two bytes an item, and one that traces a graph does not ask: it has no addresses."""
    if torch.compiler.is_compiling() or not (tma_compatible(x) and tma_compatible(weight)):
        return False
    (m, h), v, itemsize = x.shape, weight.shape[0], x.element_size()
    config = TILES.pick(x.device, v=v, h=h)
    rows, columns = config["BLOCK_M"], config["BLOCK_N"]
    staged = config["num_stages"] * (rows + columns) * config["BLOCK_K"] * itemsize + 1024
    tiles = -(-m // rows) * -(-v // columns)
    return itemsize == 2 and staged <= shared_bytes(x.device) and tiles >= sm_count(x.device)


def write_losses(
    losses: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> None:
    """losses: [M], float32, to write to; x: [M, H] and weight: [V, H], which are `suited`;
    targets: [M], and bias: [V] or None, contiguous."""
    m, (v, h), smooth = x.shape[0], weight.shape, smoothing > 0
    if bias is None and not smooth and is_hopper(x.device) and hopper.suits(v, h):
        own = None
        parts = hopper.write_parts(x, weight, HOPPER_TILES.pick(x.device, v=v, h=h))
    else:
        own = torch.empty(m, dtype=torch.float32, device=x.device)
        parts = _write_parts(own, x, weight, targets, bias, smooth)
    joined(losses, parts, own, x, weight, targets, ignore_index, smoothing, z_loss)


def joined(
    losses: torch.Tensor,
    parts: torch.Tensor,
    own: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> None:
    """Writes the losses from what the tiles of their rows have, as `_write_parts` has it; own: the
    logits of the targets, None where they are to be computed of x and weight."""
    (m, h), v, smooth, tiles = x.shape, weight.shape[0], smoothing > 0, parts.shape[2]
    _join_kernel[(m,)](
        parts_ptr=parts, own_ptr=own, x_ptr=x, weight_ptr=weight,
        targets_ptr=targets, losses_ptr=losses, stride_xm=x.stride(0), stride_wv=weight.stride(0),
        M=m, V=v, H=h, tiles=tiles, ignore_index=ignore_index, smoothing=smoothing, z_loss=z_loss,
        SMOOTH=smooth, BLOCK_T=triton.next_power_of_2(tiles),
        BLOCK_H=min(MULTIPLIED, triton.next_power_of_2(h)), num_warps=4,
    )  # fmt: skip


def _write_parts(own, x, weight, targets, bias, smooth):
    """Of each row and tile of classes [M, T] the maximum, the sum of exponentials below it and, if
    `smooth`, the plain sum: float32, [2 or 3, M, T]. The logit of each target goes to own: [M]."""
    (m, h), v = x.shape, weight.shape[0]
    config = TILES.pick(x.device, v=v, h=h)
    rows, columns, inner = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    tiles = -(-v // columns)
    parts = torch.empty((3 if smooth else 2, m, tiles), dtype=torch.float32, device=x.device)
    linear_tiles_kernel[(min(sm_count(x.device), -(-m // rows) * tiles),)](
        x_desc=TensorDescriptor.from_tensor(x, [rows, inner]),
        weight_desc=TensorDescriptor.from_tensor(weight, [columns, inner]),
        bias_ptr=bias, targets_ptr=targets, parts_ptr=parts, own_ptr=own, M=m, V=v, H=h,
        SMOOTH=smooth, WHOLE=v % columns == 0, **config,
    )  # fmt: skip
    return parts

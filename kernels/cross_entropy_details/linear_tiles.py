"""Losses of logits x wᵀ + b that are never in memory: each tile of a matmul keeps its statistics.

While a tile of logits is in registers, the kernel of the product writes the maximum m of each row
and the sum l of exp(x - m). For label smoothing it also writes the sum of x. The tile
that has the target of a row also writes its logit. Another order of summation might give a logit
above the maximum, and so a negative loss. A second kernel joins the tiles of a row as `loop_row` of
kernels/cross_entropy_details/row.py joins its lanes.

Hopper's kernel writes no logit of the target. After it the second kernel computes that logit anew,
from two rows, and limits it to the maximum. FLOPs: 2 M H V, and on Hopper 2 M H more. Bytes: x and
w, as often as they leave the L2 cache, and 8 or 12 for each row of a tile.
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
from .row import capped, row_loss

# Entries of two rows that the second kernel multiplies in a step.
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
    x_desc, weight_desc, bias_ptr, targets_ptr, parts_ptr, x_target_ptr, M, V, H, softcap,
    SMOOTH: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """m = max z, l = sum exp(z - m) and sum z of each row and tile of z = x wᵀ + bias, and z[t].

    Unless softcap is None, z is softcap tanh((x wᵀ + bias) / softcap).

    Grid: programs, one a multiprocessor at most, which stride over the tiles [BLOCK_M, BLOCK_N].
    Reads x [M, H] and weight [V, H] by descriptors of blocks [BLOCK_M, BLOCK_K] and [BLOCK_N,
    BLOCK_K], bias [V] unless None, and targets [M]. Writes parts float32 [2 or 3, M, tiles_n]: m, l
    and, if SMOOTH, sum z. Writes z[t], the logit of the target, to x_target float32 [M].
    WHOLE: V is a multiple of BLOCK_N. GROUP_M: rows of tiles that share columns in the L2 cache.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(V, BLOCK_N)
    for pid in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        first_m = pid // (GROUP_M * tiles_n) * GROUP_M
        rows = tl.minimum(tiles_m - first_m, GROUP_M)
        within = pid % (GROUP_M * tiles_n)
        start_m, tile_n = (first_m + within % rows) * BLOCK_M, within // rows
        x = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, H, BLOCK_K):
            weight = weight_desc.load([tile_n * BLOCK_N, start])
            x = tl.dot(x_desc.load([start_m, start]), weight.T, x)
        classes = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + classes, mask=classes < V, other=0.0)
            x += bias.to(tl.float32)[None, :]
        x = capped(x, softcap)
        offs_m = start_m + tl.arange(0, BLOCK_M)
        mask = offs_m < M
        part_ptrs = parts_ptr + offs_m.to(tl.int64) * tiles_n + tile_n
        plane = tl.cast(M, tl.int64) * tiles_n
        if SMOOTH:
            # The copy engine reads zeros past the last class, and the bias is zero there.
            tl.store(part_ptrs + 2 * plane, tl.sum(x, 1), mask=mask)
        targets = tl.load(targets_ptr + offs_m, mask=mask, other=-1)
        target_cols = targets - tile_n * BLOCK_N
        has_target = mask & (target_cols >= 0) & (target_cols < BLOCK_N) & (targets < V)
        is_target = tl.arange(0, BLOCK_N)[None, :] == target_cols.to(tl.int32)[:, None]
        tl.store(x_target_ptr + offs_m, tl.sum(tl.where(is_target, x, 0.0), 1), mask=has_target)
        if not WHOLE:
            x = tl.where((classes < V)[None, :], x, -float("inf"))
        m = tl.max(x, 1)
        # A row that has only minus infinity must not subtract it from itself.
        # The product with log2(e) comes first, so an entry takes one instruction instead of two.
        m_safe = tl.where(m == -float("inf"), 0.0, m) * LOG2E
        l = tl.sum(tl.exp2(x * LOG2E - m_safe[:, None]), 1)
        tl.store(part_ptrs, m, mask=mask)
        tl.store(part_ptrs + plane, l, mask=mask)


@triton.jit
def _join_kernel(
    parts_ptr, x_target_ptr, x_ptr, weight_ptr, targets_ptr, losses_ptr, z_losses_ptr,
    stride_xm, stride_wv,
    M, V, H, tiles, ignore_index, smoothing, z_loss,
    SMOOTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """losses[r] = lse - (1 - e) z[t] - e mean z + z_loss lse^2, from the parts of row r.

    Grid: M programs, one a row. Reads parts float32 [2 or 3, M, tiles], targets [M] and x_target
    [M]. If x_target_ptr is None, it computes z[t] from x [M, H] and weight [V, H], whose rows lie
    stride_xm and stride_wv apart. Writes losses float32 [M], and z_loss lse^2 to z_losses float32
    [M] unless its pointer is None.
    SMOOTH: smoothing > 0, and parts has three planes. BLOCK_T: a power of two, tiles or more.
    BLOCK_H: columns of x a step, a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row).to(tl.int64)
    loss = 0.0
    penalty = 0.0
    if target != ignore_index:
        inside = (target >= 0) & (target < V)
        if x_target_ptr is not None:
            x_target = tl.load(x_target_ptr + row, mask=inside, other=0.0)
        else:
            products = tl.zeros((BLOCK_H,), tl.float32)
            for start in range(0, H, BLOCK_H):
                offs = start + tl.arange(0, BLOCK_H)
                mask = (offs < H) & inside
                x = tl.load(x_ptr + row * stride_xm + offs, mask=mask, other=0.0)
                weight = tl.load(weight_ptr + target * stride_wv + offs, mask=mask, other=0.0)
                products += x.to(tl.float32) * weight.to(tl.float32)
            x_target = tl.sum(products, 0)
        x_target = tl.where(inside, x_target, float("nan"))
        offs = tl.arange(0, BLOCK_T)
        mask = offs < tiles
        part_ptrs = parts_ptr + row * tiles + offs
        plane = tl.cast(M, tl.int64) * tiles
        m_parts = tl.load(part_ptrs, mask=mask, other=-float("inf"))
        l_parts = tl.load(part_ptrs + plane, mask=mask, other=0.0)
        m = tl.max(m_parts, 0)
        m_safe = tl.where(m == -float("inf"), 0.0, m)
        l = tl.sum(l_parts * tl.exp2((m_parts - m_safe) * LOG2E), 0)
        # The maximum itself is a term; if its exponent is rounded, the term is not quite one.
        l = tl.where(l < 1.0, 1.0, l)
        x_target = tl.where(x_target > m, m, x_target)
        sum_x = 0.0
        if SMOOTH:
            sum_x = tl.sum(tl.load(part_ptrs + 2 * plane, mask=mask, other=0.0), 0)
        loss, penalty, _ = row_loss(x_target, m, l, sum_x, V, smoothing, z_loss, SMOOTH)
    tl.store(losses_ptr + row, loss)
    if z_losses_ptr is not None:
        tl.store(z_losses_ptr + row, penalty)


TILES = Configs(linear_tiles_kernel, TILE_CONFIGS, choose_tile, family="linear_cross_entropy")
HOPPER_TILES = Configs(
    hopper.linear_tiles_hopper_kernel, hopper.CONFIGS, hopper.choose, family="linear_cross_entropy"
)


def suited(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether `write_losses` can take x [M, H] and weight [V, H], and fills the device.

    Items have two bytes, TMA can read both tensors, and there is a tile for each multiprocessor.
    """
    if not (tma_compatible(x) and tma_compatible(weight)):
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
    softcap: float = 0.0,
    penalties: torch.Tensor | None = None,
) -> None:
    """Write the losses, and the z-losses to penalties if given: float32 [M].

    x: [M, H] and weight: [V, H], as `suited` accepts them. targets: [M] and bias: [V] or None, both
    contiguous. softcap: 0 for none.
    """
    m, (v, h), smooth = x.shape[0], weight.shape, smoothing > 0
    if bias is None and not (smooth or softcap) and is_hopper(x.device) and hopper.suits(v, h):
        x_target = None
        parts = hopper.write_parts(x, weight, HOPPER_TILES.pick(x.device, v=v, h=h))
    else:
        x_target = torch.empty(m, dtype=torch.float32, device=x.device)
        parts = _write_parts(x_target, x, weight, targets, bias, smooth, softcap)
    options = ignore_index, smoothing, z_loss
    joined(losses, parts, x_target, x, weight, targets, *options, penalties)


def joined(
    losses: torch.Tensor,
    parts: torch.Tensor,
    x_target: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    penalties: torch.Tensor | None = None,
) -> None:
    """Write the losses, and the z-losses to penalties if given, from the parts of `_write_parts`.

    x_target: the logits of the targets, or None to compute them from x and weight.
    """
    (m, h), v, smooth, tiles = x.shape, weight.shape[0], smoothing > 0, parts.shape[2]
    _join_kernel[(m,)](
        parts_ptr=parts, x_target_ptr=x_target, x_ptr=x, weight_ptr=weight,
        targets_ptr=targets, losses_ptr=losses, z_losses_ptr=penalties,
        stride_xm=x.stride(0), stride_wv=weight.stride(0), M=m, V=v, H=h, tiles=tiles,
        ignore_index=ignore_index, smoothing=smoothing, z_loss=z_loss,
        SMOOTH=smooth, BLOCK_T=triton.next_power_of_2(tiles),
        BLOCK_H=min(MULTIPLIED, triton.next_power_of_2(h)), num_warps=4,
    )  # fmt: skip


def _write_parts(x_target, x, weight, targets, bias, smooth, softcap=0.0):
    """Return m, l and, if `smooth`, the sum of each row and tile: float32, [2 or 3, M, tiles].

    Writes the logit of each target to x_target: [M].
    """
    (m, h), v = x.shape, weight.shape[0]
    config = TILES.pick(x.device, v=v, h=h)
    rows, columns, inner = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    tiles = -(-v // columns)
    parts = torch.empty((3 if smooth else 2, m, tiles), dtype=torch.float32, device=x.device)
    linear_tiles_kernel[(min(sm_count(x.device), -(-m // rows) * tiles),)](
        x_desc=TensorDescriptor.from_tensor(x, [rows, inner]),
        weight_desc=TensorDescriptor.from_tensor(weight, [columns, inner]),
        bias_ptr=bias, targets_ptr=targets, parts_ptr=parts, x_target_ptr=x_target, M=m, V=v, H=h,
        softcap=softcap or None, SMOOTH=smooth, WHOLE=v % columns == 0, **config,
    )  # fmt: skip
    return parts

"""Softmax over the last dimension, forward and backward: plain, scaled, causal, with a mask.

forward: z = scale x + mask, y = exp(z - max z) / sum exp(z - max z), over the keys that a causal
row sees. backward: dx = scale y (dy - sum y dy).

Bytes: forward reads x and writes y; backward reads y and dy and writes dx, 2 and 3 items an
element; past the diagonal zeros are written, nothing is read. FLOPs: about 5 an element either
way, so memory decides. A row is read once and kept in registers: short rows share a program, long
rows are shared by programs that meet (`kernels/_parts.py`). A row too long for that is walked in
blocks, the running maximum and sum of Milakov and Gimelshein, "Online normalizer calculation for
softmax" (2018), and read a second time. The exponential is exp2 with log2(e) folded into the scale.
"""

import functools
import math

import torch
import triton
import triton.language as tl

from kernels._cases import ROW_EDGE, ROW_SWEEP
from kernels._contract import Cost, Op, Tensor, case
from kernels._launch import launch, needs_grad
from kernels._layout import rows_of
from kernels._parts import MOST_PARTS, divide, holds_parts, meet, part_of_rows, programs
from kernels._rows import ROW_CONFIGS, suits_row
from kernels._scores import broadcast_mask, gradients, keys, mask_of, scores
from kernels._tile import store_as, widened, zero_after
from kernels._tuned import Configs

LOG2E = tl.constexpr(1.4426950408889634)
DTYPES_OF_X = (torch.float32, torch.float16, torch.bfloat16)


def softmax_reference(x, scale, causal, mask):
    scores = x * scale if mask is None else x * scale + mask
    if causal:
        future = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device)
        future = future.triu(1 + x.shape[-1] - x.shape[-2])
        scores = scores.masked_fill(future, -math.inf)
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    y = weights / weights.sum(dim=-1, keepdim=True)
    return y.masked_fill(future, 0.0) if causal else y


def _cost(a_case, direction, itemsize):
    m, n = a_case["M"], a_case["N"]
    seen = m * n - m * (m - 1) // 2 if "causal" in a_case.flags else m * n
    mask = n if "mask" in a_case.flags and direction == "forward" else 0
    reads = seen + mask if direction == "forward" else 2 * seen
    return Cost(reads * itemsize, m * n * itemsize, 5 * seen)


SOFTMAX = Op(
    "softmax",
    softmax_reference,
    {"x": Tensor("M N"), "mask": Tensor("N", grad=False, when="mask")},
    _cost,
    edge=(
        *ROW_EDGE,
        case(M=2, N=40000),
        case(M=1, N=270000, dtypes=("float32",)),
        case(M=5, N=300, values="inf"),
        case("scaled", M=5, N=300, values="large"),
        case("causal", M=65, N=65),
        case("causal", "scaled", M=40, N=129, layout="padded"),
        case("mask", M=5, N=300, values="inf"),
        case("mask", "causal", "scaled", M=7, N=40000),
    ),
    sweep=(
        *ROW_SWEEP,
        case("causal", "scaled", M=16384, N=16384, dtypes=("bfloat16",)),
        case("mask", "scaled", M=32768, N=4096, dtypes=("bfloat16",)),
    ),
    passes=("forward", "backward"),
    params={"scale": 1.0, "causal": False},
    flags={"scaled": {"scale": 0.125}, "causal": {"causal": True}, "mask": {}},
)
ACCUMULATES = {"softmax": "float32"}

# Longest row, in elements, that one program keeps in its registers, and that several do.
ROW_LIMIT = 16384
PARTS_LIMIT = 262144
# What a part takes of a row.
PART_BYTES = 32768
# What the blocks to come may take of the memory of a multiprocessor.
SHARED_BYTES = 220 * 1024
# (longest row, rows of a program, warps)
ROW_TILES = (
    (64, 16, 4),
    (128, 8, 4),
    (256, 4, 4),
    (512, 2, 4),
    (1024, 1, 2),
    (4096, 1, 4),
    (8192, 1, 8),
    (ROW_LIMIT, 1, 16),
)


def _row(rows, parts, stages, warps):
    return {"BLOCK_M": rows, "PARTS": parts, "STAGES": stages, "num_warps": warps}


def _choose_row(n, itemsize, causal, masked=False):
    if n > ROW_LIMIT:
        return _row(1, triton.next_power_of_2(n) * itemsize // PART_BYTES, 1, 16)
    rows, warps = next((rows, warps) for limit, rows, warps in ROW_TILES if n <= limit)
    return _row(rows, 1, 1, warps)


def _choose_backward_row(n, itemsize, causal):
    # Two tensors: half the length leaves room for two programs on a multiprocessor.
    config = _choose_row(n, itemsize, causal)
    return config | {"PARTS": min(MOST_PARTS, 2 * config["PARTS"])} if n > ROW_LIMIT else config


def _suits_row(candidate, n, itemsize, causal, masked=False, tensors=1):
    parts, stages, warps = candidate["PARTS"], candidate["STAGES"], candidate["num_warps"]
    if parts == stages == 1:
        return n <= ROW_LIMIT and suits_row(64)(candidate, n, itemsize)
    length = triton.next_power_of_2(triton.cdiv(n, parts))
    ahead = tensors * (stages - 1) * length * itemsize * max(1, 32 // warps)
    fills = 8 <= length // (32 * warps) <= 64 and ahead <= SHARED_BYTES
    return fills and (4096 <= length <= 2 * ROW_LIMIT if parts > 1 else n >= 4096)


ROW_PARTS = (
    *(_row(config["BLOCK_M"], 1, 1, config["num_warps"]) for config in ROW_CONFIGS),
    *(_row(1, 1, stages, warps) for stages in (2, 3, 4) for warps in (4, 8, 16, 32)),
    *(_row(1, parts, 1, warps) for parts in (2, 4, 8, 16, MOST_PARTS) for warps in (8, 16, 32)),
)
LOOP_CONFIGS = tuple(
    {"BLOCK_N": block, "num_warps": warps} for block in (8192, 16384) for warps in (8, 16, 32)
)


def _choose_forward_loop(n, itemsize):
    return {"BLOCK_N": 8192, "num_warps": 32}


def _choose_backward_loop(n, itemsize):
    return {"BLOCK_N": 16384, "num_warps": 32}


@triton.jit
def _forward_row_kernel(
    x_ptr, y_ptr, mask_ptr, known_ptr, count_ptr,
    stride_xm, stride_ym, stride_kb, stride_kh, stride_kq, M, N, H, Q, LENGTH, scale,
    FOLD: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    slope = scale * LOG2E if FOLD else LOG2E
    for block in tl.range(
        tl.program_id(0), tl.cdiv(M, BLOCK_M) * PARTS, tl.num_programs(0), num_stages=STAGES
    ):
        rows, columns, inside = part_of_rows(block, M, N, LENGTH, EVEN, BLOCK_N, BLOCK_M, PARTS)
        end = keys(rows, N, Q, CAUSAL)
        mask_row = None
        if mask_ptr is not None:
            mask_row = mask_of(mask_ptr, rows, stride_kb, stride_kh, stride_kq, H, Q)
        x_row = x_ptr + rows * stride_xm
        x = scores(x_row, mask_row, columns, inside, end, scale, FOLD, CAUSAL, "")
        top = tl.max(x, 1)[:, None]
        # Minus infinity must not be subtracted from itself: a row past the end has no other value,
        # and a part may have none. A whole row of it ends in zero times infinity, NaN.
        base = tl.where(top == -float("inf"), 0.0, top)
        weights = tl.exp2((x - base) * slope)
        total = tl.sum(weights, 1)[:, None]
        share = 1.0
        if PARTS > 1:
            row, part, parts = block // PARTS, block % PARTS, tl.arange(0, PARTS)
            tops_ptr = known_ptr + row.to(tl.int64) * (2 * PARTS)
            tl.store(tops_ptr + part, tl.max(top))
            tl.store(tops_ptr + PARTS + part, tl.max(total))
            meet(count_ptr + row, PARTS)
            tops = tl.load(tops_ptr + parts, volatile=True)
            totals = tl.load(tops_ptr + PARTS + parts, volatile=True)
            row_top = tl.max(tops, 0)
            total = tl.sum(totals * tl.exp2((tops - row_top) * slope), 0)
            share = tl.exp2((top - row_top) * slope)
        factor = share / total
        if CAUSAL:
            # Weights that are not seen are zero, and so is the sum of a row that sees none.
            factor = tl.where(end > 0, factor, 0.0)
        y = weights * factor
        store_as(y_ptr + rows * stride_ym + columns, y, inside)


@triton.jit
def _forward_loop_kernel(
    x_ptr, y_ptr, mask_ptr,
    stride_xm, stride_ym, stride_kb, stride_kh, stride_kq, N, H, Q, scale,
    FOLD: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * stride_ym
    offs_n = tl.arange(0, BLOCK_N)
    end = keys(row, N, Q, CAUSAL)
    slope = scale * LOG2E if FOLD else LOG2E
    if mask_ptr is not None:
        mask_ptr = mask_of(mask_ptr, row, stride_kb, stride_kh, stride_kq, H, Q)
    # A maximum and a sum for each lane; the lanes meet once, after the walk.
    top = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, end, BLOCK_N):
        offs = start + offs_n
        x = scores(x_ptr, mask_ptr, offs, offs < N, end, scale, FOLD, CAUSAL, "evict_last")
        new_top = tl.maximum(top, x)
        # A lane that has seen only minus infinity must not subtract it from itself.
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp2((top - base) * slope) + tl.exp2((x - base) * slope)
        top = new_top
    row_top = tl.max(top, 0)
    share = 1.0 / tl.sum(total * tl.exp2((top - row_top) * slope), 0)
    for start in range(0, N, BLOCK_N):
        offs = start + offs_n
        x = scores(x_ptr, mask_ptr, offs, offs < N, end, scale, FOLD, CAUSAL, "evict_first")
        y = tl.exp2((x - row_top) * slope) * share
        if CAUSAL:
            y = tl.where(offs < end, y, 0.0)
        store_as(y_ptr + offs, y, offs < N)


@triton.jit
def _backward_row_kernel(
    y_ptr, dy_ptr, dx_ptr, known_ptr, count_ptr,
    stride_ym, stride_dym, stride_dxm, M, N, Q, LENGTH, scale,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for block in tl.range(
        tl.program_id(0), tl.cdiv(M, BLOCK_M) * PARTS, tl.num_programs(0), num_stages=STAGES
    ):
        rows, columns, inside = part_of_rows(block, M, N, LENGTH, EVEN, BLOCK_N, BLOCK_M, PARTS)
        end = keys(rows, N, Q, CAUSAL)
        y_row, dy_row = y_ptr + rows * stride_ym, dy_ptr + rows * stride_dym
        y, dy = gradients(y_row, dy_row, columns, inside, end, CAUSAL, "")
        weighted = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)[:, None]
        if PARTS > 1:
            row, part, parts = block // PARTS, block % PARTS, tl.arange(0, PARTS)
            sums_ptr = known_ptr + row.to(tl.int64) * PARTS
            tl.store(sums_ptr + part, tl.sum(weighted))
            meet(count_ptr + row, PARTS)
            weighted = tl.sum(tl.load(sums_ptr + parts, volatile=True), 0)
        # Half the registers: both stay packed until here.
        zero = zero_after(weighted, N)
        dx = widened(y, zero) * (widened(dy, zero) - weighted) * scale
        store_as(dx_ptr + rows * stride_dxm + columns, dx, inside)


@triton.jit
def _backward_loop_kernel(
    y_ptr, dy_ptr, dx_ptr, stride_ym, stride_dym, stride_dxm, N, Q, scale,
    CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    y_ptr += row * stride_ym
    dy_ptr += row * stride_dym
    dx_ptr += row * stride_dxm
    offs_n = tl.arange(0, BLOCK_N)
    end = keys(row, N, Q, CAUSAL)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, end, BLOCK_N):
        offs = start + offs_n
        y, dy = gradients(y_ptr, dy_ptr, offs, offs < N, end, CAUSAL, "evict_last")
        total += y.to(tl.float32) * dy.to(tl.float32)
    weighted = tl.sum(total, 0)
    for start in range(0, N, BLOCK_N):
        offs = start + offs_n
        y, dy = gradients(y_ptr, dy_ptr, offs, offs < N, end, CAUSAL, "")
        dx = y.to(tl.float32) * (dy.to(tl.float32) - weighted) * scale
        store_as(dx_ptr + offs, dx, offs < N)


FORWARD_ROW = Configs(_forward_row_kernel, ROW_PARTS, _choose_row, _suits_row)
FORWARD_LOOP = Configs(_forward_loop_kernel, LOOP_CONFIGS, _choose_forward_loop)
BACKWARD_ROW = Configs(
    _backward_row_kernel, ROW_PARTS, _choose_backward_row, functools.partial(_suits_row, tensors=2)
)
BACKWARD_LOOP = Configs(_backward_loop_kernel, LOOP_CONFIGS, _choose_backward_loop)

# What a part of a row tells the others: its maximum and its sum; its weighted sum.
FORWARD_VALUES, BACKWARD_VALUES = 2, 1


def _walked(x, n):
    """Whether one program walks a row, since nothing holds it whole."""
    return n > ROW_LIMIT and (n > PARTS_LIMIT or not holds_parts(x.device))


def softmax_fwd(x, scale=1.0, causal=False, heads=None, queries=None, mask=None):
    """x: [M, N], contiguous in N. Returns y, contiguous.

    heads, queries: H and Q of M = B H Q, where causal or with a mask. mask: [B, H, Q, N] of any
    strides but the last.
    """
    m, n = x.shape
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if m == 0 or n == 0:
        return y
    kb, kh, kq = (None, None, None) if mask is None else mask.stride()[:3]
    fold = mask is None and scale > 0
    if _walked(x, n):
        config = FORWARD_LOOP.pick(x.device, n=n, itemsize=x.element_size())
        launch(
            _forward_loop_kernel, (m,), x_ptr=x, y_ptr=y, mask_ptr=mask,
            stride_xm=x.stride(0), stride_ym=n, stride_kb=kb, stride_kh=kh, stride_kq=kq,
            N=n, H=heads, Q=queries, scale=scale, FOLD=fold, CAUSAL=causal, **config,
        )  # fmt: skip
        return y
    config = FORWARD_ROW.pick(
        x.device, n=n, itemsize=x.element_size(), causal=causal, masked=mask is not None
    )
    rows, parts = config["BLOCK_M"], config["PARTS"]
    length, block, known, count = divide(m, n, parts, FORWARD_VALUES, x.device)
    blocks = -(-m // rows) * parts
    launch(
        _forward_row_kernel, (programs(blocks, config, x.device),),
        x_ptr=x, y_ptr=y, mask_ptr=mask, known_ptr=known, count_ptr=count,
        stride_xm=x.stride(0), stride_ym=n, stride_kb=kb, stride_kh=kh, stride_kq=kq,
        M=m, N=n, H=heads, Q=queries, LENGTH=length, scale=scale, FOLD=fold, CAUSAL=causal,
        EVEN=n == block * parts and m % rows == 0, BLOCK_N=block, **config,
    )  # fmt: skip
    return y


def softmax_bwd(y, dy, scale=1.0, causal=False, queries=None):
    """y, dy: [M, N], contiguous in N. Returns dx, contiguous. queries: as in `softmax_fwd`."""
    m, n = y.shape
    dx = torch.empty((m, n), dtype=y.dtype, device=y.device)
    if m == 0 or n == 0:
        return dx
    if _walked(y, n):
        config = BACKWARD_LOOP.pick(y.device, n=n, itemsize=y.element_size())
        launch(
            _backward_loop_kernel, (m,), y_ptr=y, dy_ptr=dy, dx_ptr=dx,
            stride_ym=y.stride(0), stride_dym=dy.stride(0), stride_dxm=n,
            N=n, Q=queries, scale=scale, CAUSAL=causal, **config,
        )  # fmt: skip
        return dx
    config = BACKWARD_ROW.pick(y.device, n=n, itemsize=y.element_size(), causal=causal)
    rows, parts = config["BLOCK_M"], config["PARTS"]
    length, block, known, count = divide(m, n, parts, BACKWARD_VALUES, y.device)
    blocks = -(-m // rows) * parts
    launch(
        _backward_row_kernel, (programs(blocks, config, y.device),),
        y_ptr=y, dy_ptr=dy, dx_ptr=dx, known_ptr=known, count_ptr=count,
        stride_ym=y.stride(0), stride_dym=dy.stride(0), stride_dxm=n,
        M=m, N=n, Q=queries, LENGTH=length, scale=scale, CAUSAL=causal,
        EVEN=n == block * parts and m % rows == 0, BLOCK_N=block, **config,
    )  # fmt: skip
    return dx


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, causal, heads, queries, mask):
        y = softmax_fwd(x, scale, causal, heads, queries, mask)
        ctx.save_for_backward(y)
        ctx.arguments = scale, causal, queries
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return softmax_bwd(y, rows_of(dy), *ctx.arguments), None, None, None, None, None


def softmax(
    x: torch.Tensor,
    scale: float = 1.0,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax of scale x + mask over the last dimension, computed in float32.

    x: [..., N]; float32, float16 or bfloat16. causal: x is [..., Q, N], and query i sees the keys
    up to i + N - Q; all others are zero and do not count. mask: added to scale x; of the dtype of x
    or float32, of any shape that broadcasts to that of x; it has no gradient. A row that is minus
    infinity throughout is NaN, as in PyTorch; one that sees no key is zero. Returns the shape and
    dtype of x; differentiable in x. ValueError for another shape, dtype or device.
    """
    # The conditions come first: a message takes longer to write than they to hold.
    if x.dim() <= causal:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected {1 + causal} dimensions or more")
    if x.dtype not in DTYPES_OF_X:
        raise ValueError(f"x: {x.dtype}, expected float32, float16 or bfloat16")
    rows = x if x.dim() == 2 and x.stride(1) == 1 else rows_of(x)
    heads = queries = None
    if causal or mask is not None:
        heads, queries = (1, 1, *x.shape[:-1])[-2:]
        if mask is not None and x.numel():
            mask = broadcast_mask(mask, x, heads, queries)
    if needs_grad(x):
        y = _Softmax.apply(rows, float(scale), causal, heads, queries, mask)
    else:
        y = softmax_fwd(rows, float(scale), causal, heads, queries, mask)
    return y if x.dim() == 2 else y.view(x.shape)

"""Softmax over the last dimension, forward and backward.

forward: y = exp(x - max x) / sum exp(x - max x). backward: dx = y (dy - sum y dy).

Bytes: forward reads x and writes y; backward reads y and dy and writes dx, 2 and 3 items an
element. FLOPs: about 5 an element either way, so memory decides. A row that fits in the registers
of a program is read once. A longer row is walked in blocks, the running maximum and sum of
Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), and read a second
time, mostly from the L2 cache. Short rows share a program. The exponential is exp2 with log2(e)
folded into the scale, so an element costs one multiply-add and one exp2.
"""

import torch
import triton
import triton.language as tl

from kernels._cases import ROW_EDGE, ROW_SWEEP
from kernels._checks import require
from kernels._contract import Cost, Op, Tensor, case
from kernels._layout import rows_of
from kernels._rows import ROW_CONFIGS, suits_row
from kernels._tile import load_f32, load_f32_hinted, store_as
from kernels._tuned import Configs

LOG2E = tl.constexpr(1.4426950408889634)


def softmax_reference(x):
    weights = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return weights / weights.sum(dim=-1, keepdim=True)


def _cost(a_case, direction, itemsize):
    elements = a_case["M"] * a_case["N"]
    reads = 1 if direction == "forward" else 2
    return Cost(reads * elements * itemsize, elements * itemsize, 5 * elements)


SOFTMAX = Op(
    "softmax",
    softmax_reference,
    {"x": Tensor("M N")},
    _cost,
    edge=(*ROW_EDGE, case(M=2, N=40000), case(M=5, N=300, values="inf")),
    sweep=ROW_SWEEP,
    passes=("forward", "backward"),
)

# Longest row, in elements, that one program keeps in its registers.
ROW_LIMIT = 32768
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


def _choose_row(n, itemsize):
    rows, warps = next((rows, warps) for limit, rows, warps in ROW_TILES if n <= limit)
    return {"BLOCK_M": rows, "num_warps": warps}


def _choose_forward_loop(n, itemsize):
    return {"BLOCK_N": 8192, "num_warps": 32}


def _choose_backward_loop(n, itemsize):
    return {"BLOCK_N": 16384, "num_warps": 32}


LOOP_CONFIGS = tuple(
    {"BLOCK_N": block, "num_warps": warps} for block in (8192, 16384) for warps in (8, 16, 32)
)


@triton.jit
def _forward_row_kernel(
    x_ptr, y_ptr, stride_xm, stride_ym, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    rows = offs_m[:, None].to(tl.int64)
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    x = tl.load(
        x_ptr + rows * stride_xm + offs_n[None, :],
        mask=mask,
        other=-float("inf"),
    ).to(tl.float32)
    # Rows past the end hold only minus infinity; zero keeps their difference finite.
    top = tl.where(offs_m < M, tl.max(x, 1), 0.0)[:, None]
    weights = tl.exp2((x - top) * LOG2E)
    y = weights / tl.sum(weights, 1)[:, None]
    store_as(y_ptr + rows * stride_ym + offs_n[None, :], y, mask)


@triton.jit
def _forward_loop_kernel(x_ptr, y_ptr, stride_xm, stride_ym, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * stride_ym
    offs_n = tl.arange(0, BLOCK_N)
    # A maximum and a sum for each lane; the lanes meet once, after the walk.
    top = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        offs = start + offs_n
        x = tl.load(
            x_ptr + offs, mask=offs < N, other=-float("inf"), eviction_policy="evict_last"
        ).to(tl.float32)
        new_top = tl.maximum(top, x)
        # A lane that has seen only minus infinity must not subtract it from itself.
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp2((top - base) * LOG2E) + tl.exp2((x - base) * LOG2E)
        top = new_top
    row_top = tl.max(top, 0)
    row_total = tl.sum(total * tl.exp2((top - row_top) * LOG2E), 0)
    for start in range(0, N, BLOCK_N):
        offs = start + offs_n
        x = load_f32_hinted(x_ptr + offs, offs < N, "evict_first")
        y = tl.exp2((x - row_top) * LOG2E) / row_total
        store_as(y_ptr + offs, y, offs < N)


@triton.jit
def _backward_row_kernel(
    y_ptr, dy_ptr, dx_ptr,
    stride_ym, stride_dym, stride_dxm, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    rows = offs_m[:, None].to(tl.int64)
    mask = (offs_m[:, None] < M) & (offs_n < N)
    y = load_f32(y_ptr + rows * stride_ym + offs_n, mask)
    dy = load_f32(dy_ptr + rows * stride_dym + offs_n, mask)
    dx = y * (dy - tl.sum(y * dy, 1)[:, None])
    store_as(dx_ptr + rows * stride_dxm + offs_n, dx, mask)


@triton.jit
def _backward_loop_kernel(
    y_ptr, dy_ptr, dx_ptr, stride_ym, stride_dym, stride_dxm, N, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    y_ptr += row * stride_ym
    dy_ptr += row * stride_dym
    dx_ptr += row * stride_dxm
    offs_n = tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        offs = start + offs_n
        y = load_f32_hinted(y_ptr + offs, offs < N, "evict_last")
        dy = load_f32_hinted(dy_ptr + offs, offs < N, "evict_last")
        total += y * dy
    weighted = tl.sum(total, 0)
    for start in range(0, N, BLOCK_N):
        offs = start + offs_n
        y = load_f32(y_ptr + offs, offs < N)
        dy = load_f32(dy_ptr + offs, offs < N)
        dx = y * (dy - weighted)
        store_as(dx_ptr + offs, dx, offs < N)


FORWARD_ROW = Configs(_forward_row_kernel, ROW_CONFIGS, _choose_row, suits_row(64))
FORWARD_LOOP = Configs(_forward_loop_kernel, LOOP_CONFIGS, _choose_forward_loop)
BACKWARD_ROW = Configs(_backward_row_kernel, ROW_CONFIGS, _choose_row, suits_row(64))
BACKWARD_LOOP = Configs(_backward_loop_kernel, LOOP_CONFIGS, _choose_backward_loop)


def softmax_fwd(x: torch.Tensor) -> torch.Tensor:
    """x: [M, N], contiguous in N. Returns y, contiguous."""
    m, n = x.shape
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    strides = {"stride_xm": x.stride(0), "stride_ym": y.stride(0)}
    if n > ROW_LIMIT:
        config = FORWARD_LOOP.pick(x.device, n=n, itemsize=x.element_size())
        _forward_loop_kernel[(m,)](x_ptr=x, y_ptr=y, **strides, N=n, **config)
    else:
        config = FORWARD_ROW.pick(x.device, n=n, itemsize=x.element_size())
        _forward_row_kernel[(triton.cdiv(m, config["BLOCK_M"]),)](
            x_ptr=x, y_ptr=y, **strides, M=m, N=n, BLOCK_N=triton.next_power_of_2(n), **config
        )
    return y


def softmax_bwd(y: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """y, dy: [M, N], contiguous in N. Returns dx, contiguous."""
    m, n = y.shape
    dx = torch.empty((m, n), dtype=y.dtype, device=y.device)
    if dx.numel() == 0:
        return dx
    tensors = {"y_ptr": y, "dy_ptr": dy, "dx_ptr": dx}
    strides = {"stride_ym": y.stride(0), "stride_dym": dy.stride(0), "stride_dxm": dx.stride(0)}
    if n > ROW_LIMIT:
        config = BACKWARD_LOOP.pick(y.device, n=n, itemsize=y.element_size())
        _backward_loop_kernel[(m,)](**tensors, **strides, N=n, **config)
    else:
        config = BACKWARD_ROW.pick(y.device, n=n, itemsize=y.element_size())
        _backward_row_kernel[(triton.cdiv(m, config["BLOCK_M"]),)](
            **tensors, **strides, M=m, N=n, BLOCK_N=triton.next_power_of_2(n), **config
        )
    return dx


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = softmax_fwd(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return softmax_bwd(y, rows_of(dy))


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, computed in float32.

    x: [..., N]; float32, float16 or bfloat16; ValueError without dimensions. Returns the shape and
    dtype of x. Differentiable.
    """
    require(x.dim() > 0, "x: has no dimension to take the softmax over")
    return _Softmax.apply(rows_of(x)).view(x.shape)

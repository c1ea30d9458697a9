"""Gated activations of transformer blocks: swiglu and geglu, forward and backward.

forward: y = a(gate) up. backward: dgate = dy up a'(gate), dup = dy a(gate). For swiglu
a(x) = x s(x) with the logistic function s; for geglu a is GELU, x s(2 sqrt(2/pi) (x + 0.044715 x³))
in the tanh form, x P(x) with the normal distribution's P in the erf form. Shazeer, "GLU variants
improve transformer" (2020); Hendrycks and Gimpel, "Gaussian error linear units" (2016).

Memory decides: `ops/gated.py` counts bytes and FLOPs. Nothing but the inputs is kept for the
backward pass. A program owns a tile of one row, whose rows may lie apart: the halves of one
projection [.., 2N] are walked where they are. Contiguous tensors are walked as a single row. tanh
and the logistic function are one exp2 and one reciprocal; 1 + tanh z = 2 s(2z), so no digits cancel
where the gate is far below zero.
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import check_one_of
from ._runtime.configs import Configs
from ._runtime.layout import ACCESS_BYTES, as_rows_2d
from ._triton.math import DENSITY, LOG2E, gelu_gate, gelu_gate_slope, normal

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Rows of this length or more are all alike to a tile.
LONG = 4096
BLOCKS = tuple(
    {"BLOCK_N": block, "num_warps": warps}
    for block in (128, 256, 512, 1024, 2048, 4096)
    for warps in (1, 2, 4, 8)
    if 4 <= block // (32 * warps) <= 32
)


def _choose(n, itemsize, act):
    # One 16-byte access of each tensor for each of 128 threads; fewer where the row is shorter.
    block = 2048 // itemsize
    if n < block:
        block = 1 << (n - 1).bit_length()
    return {"BLOCK_N": block, "num_warps": max(1, block * itemsize // (32 * ACCESS_BYTES))}


def _suits(candidate, n, itemsize, act):
    # One to four accesses a thread, and no tile longer than the row.
    bytes_of_thread = candidate["BLOCK_N"] * itemsize // (32 * candidate["num_warps"])
    in_row = candidate["BLOCK_N"] < 2 * max(n, 128)
    return in_row and ACCESS_BYTES <= bytes_of_thread <= 4 * ACCESS_BYTES


@triton.jit
def _share(x, ACT: tl.constexpr):
    """a(x) / x: the share of x that passes."""
    if ACT == "silu":
        return 1.0 / (1.0 + tl.exp2(-LOG2E * x))
    elif ACT == "gelu_tanh":
        return gelu_gate(x, True)
    else:
        # Of erf the digits far below zero would be lost.
        return normal(x, False)[0]


@triton.jit
def _slope(x, share, ACT: tl.constexpr):
    """a'(x) of an x of which this share passes."""
    if ACT == "silu":
        return share + x * share * (1.0 - share)
    elif ACT == "gelu_tanh":
        return gelu_gate_slope(x, share)
    else:
        return share + DENSITY * x * normal(x, False)[1]


@triton.jit
def _forward_tile(gate_ptrs, up_ptrs, y_ptrs, mask, ACT: tl.constexpr):
    gate = tl.load(gate_ptrs, mask=mask).to(tl.float32)
    up = tl.load(up_ptrs, mask=mask).to(tl.float32)
    y = gate * _share(gate, ACT) * up
    # Nothing here is read again: a streaming store leaves the cache to the loads.
    tl.store(y_ptrs, y.to(y_ptrs.dtype.element_ty), mask=mask, cache_modifier=".cs")


@triton.jit
def _backward_tile(gate_ptrs, up_ptrs, dy_ptrs, dgate_ptrs, dup_ptrs, mask, ACT: tl.constexpr):
    gate = tl.load(gate_ptrs, mask=mask).to(tl.float32)
    up = tl.load(up_ptrs, mask=mask).to(tl.float32)
    dy = tl.load(dy_ptrs, mask=mask).to(tl.float32)
    share = _share(gate, ACT)
    dgate = dy * up * _slope(gate, share, ACT)
    dup = dy * (gate * share)
    tl.store(dgate_ptrs, dgate.to(dgate_ptrs.dtype.element_ty), mask=mask, cache_modifier=".cs")
    tl.store(dup_ptrs, dup.to(dup_ptrs.dtype.element_ty), mask=mask, cache_modifier=".cs")


@triton.jit
def _place(tiles, FLAT: tl.constexpr, BLOCK_N: tl.constexpr):
    """The row of a program, and the first column of its tile."""
    pid = tl.program_id(0)
    row = 0 if FLAT else pid // tiles
    tile = pid if FLAT else pid % tiles
    return tl.cast(row, tl.int64), tile.to(tl.int64) * BLOCK_N


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, y_ptr, stride_gate, stride_up, N, tiles,
    ACT: tl.constexpr, FLAT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, start = _place(tiles, FLAT, BLOCK_N)
    offs = tl.arange(0, BLOCK_N)
    gate_ptrs = gate_ptr + (row * stride_gate + start) + offs
    up_ptrs = up_ptr + (row * stride_up + start) + offs
    y_ptrs = y_ptr + (row * N + start) + offs
    # A mask whose bound is no multiple of the vector width makes every access scalar.
    if start + BLOCK_N <= N:
        _forward_tile(gate_ptrs, up_ptrs, y_ptrs, None, ACT)
    else:
        _forward_tile(gate_ptrs, up_ptrs, y_ptrs, start + offs < N, ACT)


@triton.jit
def _backward_kernel(
    gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr,
    stride_gate, stride_up, stride_dy, stride_out, N, tiles,
    ACT: tl.constexpr, FLAT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, start = _place(tiles, FLAT, BLOCK_N)
    offs = tl.arange(0, BLOCK_N)
    gate_ptrs = gate_ptr + (row * stride_gate + start) + offs
    up_ptrs = up_ptr + (row * stride_up + start) + offs
    dy_ptrs = dy_ptr + (row * stride_dy + start) + offs
    dgate_ptrs = dgate_ptr + (row * stride_out + start) + offs
    dup_ptrs = dup_ptr + (row * stride_out + start) + offs
    if start + BLOCK_N <= N:
        _backward_tile(gate_ptrs, up_ptrs, dy_ptrs, dgate_ptrs, dup_ptrs, None, ACT)
    else:
        mask = start + offs < N
        _backward_tile(gate_ptrs, up_ptrs, dy_ptrs, dgate_ptrs, dup_ptrs, mask, ACT)


FORWARD = Configs(_forward_kernel, BLOCKS, _choose, _suits)
BACKWARD = Configs(_backward_kernel, BLOCKS, _choose, _suits)


def gated_fwd(gate: torch.Tensor, up: torch.Tensor | None, act: str) -> torch.Tensor:
    """gate, up as `swiglu` takes them, with its errors. act: "silu", "gelu_tanh" or "gelu_erf".
    Returns y, contiguous."""
    _check(gate, up)
    gate, up = _halves(gate, up)
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    size = n = y.numel()
    if size == 0:
        return y
    # A single row has no distance to the next.
    stride_gate = stride_up = 0
    if not (gate.is_contiguous() and up.is_contiguous()):
        gate, up, n = as_rows_2d(gate), as_rows_2d(up), y.shape[-1]
        stride_gate, stride_up = gate.stride(0), up.stride(0)
    config = FORWARD.pick(y.device, n=min(n, LONG), itemsize=y.element_size(), act=act)
    tiles = (n - 1) // config["BLOCK_N"] + 1
    _forward_kernel[(size // n * tiles,)](
        gate_ptr=gate, up_ptr=up, y_ptr=y,
        stride_gate=stride_gate, stride_up=stride_up, N=n, tiles=tiles,
        ACT=act, FLAT=n == size, **config,
    )  # fmt: skip
    return y


def gated_bwd(
    gate: torch.Tensor, up: torch.Tensor | None, dy: torch.Tensor, act: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of gate and up, each contiguous, from that of y; None where up is."""
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    dup = None if up is None else torch.empty_like(up, memory_format=torch.contiguous_format)
    grads = dgate, dup
    size = n = dy.numel()
    if size == 0:
        return grads
    gate, up = _halves(gate, up)
    dgate, dup = _halves(*grads)
    stride_gate = stride_up = stride_dy = stride_out = 0
    read = gate.is_contiguous() and up.is_contiguous() and dy.is_contiguous()
    if not (read and dgate.is_contiguous() and dup.is_contiguous()):
        n = dy.shape[-1]
        gate, up, dy, dgate, dup = map(as_rows_2d, (gate, up, dy, dgate, dup))
        stride_gate, stride_up = gate.stride(0), up.stride(0)
        stride_dy, stride_out = dy.stride(0), dgate.stride(0)
    config = BACKWARD.pick(dy.device, n=min(n, LONG), itemsize=dy.element_size(), act=act)
    tiles = (n - 1) // config["BLOCK_N"] + 1
    _backward_kernel[(size // n * tiles,)](
        gate_ptr=gate, up_ptr=up, dy_ptr=dy,
        dgate_ptr=dgate, dup_ptr=dup, stride_gate=stride_gate, stride_up=stride_up,
        stride_dy=stride_dy, stride_out=stride_out, N=n, tiles=tiles,
        ACT=act, FLAT=n == size, **config,
    )  # fmt: skip
    return grads


def _check(gate, up):
    """TypeError or ValueError where the arguments do not belong together."""
    if gate.dtype not in DTYPES:
        raise TypeError(f"gate: {gate.dtype}, expected float32, float16 or bfloat16")
    if gate.dim() == 0:
        raise ValueError("gate: no dimension, expected [..., N]")
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(
                f"gate: shape {tuple(gate.shape)}, expected [..., 2N] where up is None"
            )
    elif up.shape != gate.shape or up.dtype != gate.dtype or up.device != gate.device:
        raise ValueError(
            f"up: {tuple(up.shape)} {up.dtype} on {up.device}, "
            f"expected {tuple(gate.shape)} {gate.dtype} on {gate.device} as gate has"
        )


def _halves(gate, up):
    return (gate, up) if up is not None else gate.chunk(2, -1)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, act):
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return gated_fwd(gate, up, act)

    @staticmethod
    @once
    def backward(ctx, dy):
        return *gated_bwd(*ctx.saved_tensors, dy, ctx.act), None


def _gated(gate, up, act):
    if needs_grad(gate, up):
        return _Gated.apply(gate, up, act)
    return gated_fwd(gate, up, act)


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) times up, computed in float32.

    gate, up: [..., N], float32, float16 or bfloat16, else TypeError; ValueError where shape, dtype
    or device of up are not those of gate. Rows may lie apart, as those of a half of a larger
    tensor do. Without up, gate is [..., 2N] and holds both side by side; its gradient is written
    in one piece. Returns [..., N], contiguous. Differentiable once, in both.
    """
    return _gated(gate, up, "silu")


def geglu(
    gate: torch.Tensor, up: torch.Tensor | None = None, approximate: str = "tanh"
) -> torch.Tensor:
    """gelu(gate) times up, computed in float32; otherwise as `swiglu`.

    approximate: "tanh", or "none" for the erf form, as in PyTorch; else ValueError.
    """
    check_one_of("approximate", approximate, ("tanh", "none"))
    return _gated(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu_erf")


gated_fwd = cached_launch(gated_fwd)
gated_bwd = cached_launch(gated_bwd)

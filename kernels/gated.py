"""Gated activations of transformer blocks: swiglu and geglu, forward and backward.

forward: y = a(gate) up. backward: dgate = dy up a'(gate), dup = dy a(gate). For swiglu, a(x) = x
s(x) with the logistic function s. For geglu, a is GELU: x s(2 sqrt(2/pi) (x + 0.044715 x³)) in the
tanh form, x P(x) with the normal distribution's P in the erf form. Sources: Shazeer, "GLU variants
improve transformer" (2020); Hendrycks and Gimpel, "Gaussian error linear units" (2016).

Memory decides: `ops/gated.py` counts bytes and FLOPs. The backward pass keeps only the inputs. A
program owns a tile of one row, and rows may lie apart: the halves of one projection [.., 2N] are
read where they are. Contiguous tensors are one row. tanh and the logistic function are one exp2 and
one reciprocal. 1 + tanh z = 2 s(2z), so no digits cancel if the gate is far below zero.
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import check_floating, check_one_of, check_same_meta
from ._runtime.configs import Configs
from ._runtime.layout import ACCESS_BYTES, as_rows_2d
from ._triton.math import DENSITY, LOG2E, gelu_gate, gelu_gate_slope, normal


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """Return silu(gate) times up, computed in float32.

    Args:
        gate: `[..., N]`, float32, float16 or bfloat16; rows at any distance. Without up it is
            `[..., 2N]`, the gate and then up.
        up: as gate, with its shape, dtype and device, or None.

    Returns:
        A new contiguous tensor `[..., N]` with the dtype of gate. It is differentiable once in gate
        and up.

    Raises:
        TypeError: gate or up is no tensor or has another dtype.
        ValueError: up has another shape or device than gate. gate has no dimension, or an odd last
            one without up. A tensor is not on a GPU.

    Source:
        Shazeer, "GLU variants improve transformer" (2020).

    Example:
        >>> gate, up = torch.ones(2, 3, device="cuda"), torch.ones(2, 3, device="cuda")
        >>> swiglu(gate, up).shape
        torch.Size([2, 3])
    """
    return _gated(gate, up, "silu")


def geglu(
    gate: torch.Tensor, up: torch.Tensor | None = None, approximate: str = "tanh"
) -> torch.Tensor:
    """Return gelu(gate) times up, computed in float32.

    Args:
        gate: `[..., N]`, float32, float16 or bfloat16; rows at any distance. Without up it is
            `[..., 2N]`, the gate and then up.
        up: as gate, with its shape, dtype and device, or None.
        approximate: "tanh", or "none" for the erf form.

    Returns:
        A new contiguous tensor `[..., N]` with the dtype of gate. It is differentiable once in gate
        and up.

    Raises:
        TypeError: gate or up is no tensor or has another dtype, or approximate is no
            string.
        ValueError: up has another shape or device than gate. gate has no dimension, or an odd last
            one without up. A tensor is not on a GPU. Or approximate is neither "tanh" nor
            "none".

    Source:
        Shazeer, "GLU variants improve transformer" (2020).

    Example:
        >>> gate, up = torch.ones(2, 3, device="cuda"), torch.ones(2, 3, device="cuda")
        >>> geglu(gate, up).shape
        torch.Size([2, 3])
    """
    check_one_of("approximate", approximate, ("tanh", "none"))
    return _gated(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu_erf")


def _gated(gate, up, act):
    if needs_grad(gate, up):
        return _Gated.apply(gate, up, act)
    return gated_fwd(gate, up, act)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, act):
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return gated_fwd(gate, up, act)

    @staticmethod
    @once
    def backward(ctx, dy):
        dgate, dup, _ = gated_bwd(*ctx.saved_tensors, dy, ctx.act, False)
        return dgate, dup, None


def gated_fwd(gate: torch.Tensor, up: torch.Tensor | None, act: str) -> torch.Tensor:
    """Return y, contiguous; gate and up as in `swiglu`, with its errors.

    act: "silu", "gelu_tanh" or "gelu_erf".
    """
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
    gate: torch.Tensor, up: torch.Tensor | None, dy: torch.Tensor, act: str, wants_y: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of gate and up, and y, each contiguous.

    The second is None if up is. y, the result of the forward pass, is None if it is not wanted. It
    has the same bits as there.
    """
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    dup = None if up is None else torch.empty_like(up, memory_format=torch.contiguous_format)
    y = torch.empty_like(dy, memory_format=torch.contiguous_format) if wants_y else None
    results = dgate, dup, y
    size = n = dy.numel()
    if size == 0:
        return results
    gate, up = _halves(gate, up)
    dgate, dup = _halves(dgate, dup)
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
        dgate_ptr=dgate, dup_ptr=dup, y_ptr=y, stride_gate=stride_gate, stride_up=stride_up,
        stride_dy=stride_dy, stride_out=stride_out, N=n, tiles=tiles,
        ACT=act, FLAT=n == size, **config,
    )  # fmt: skip
    return results


def _check(gate, up):
    """Raise TypeError or ValueError unless gate and up are tensors that `swiglu` takes."""
    check_floating(gate=gate)
    if gate.dim() == 0:
        raise ValueError("gate: no dimension, expected [..., N]")
    if up is not None:
        check_same_meta(gate=gate, up=up)
    elif gate.shape[-1] % 2:
        raise ValueError(f"gate: shape {tuple(gate.shape)}, expected [..., 2N], as up is None")


def _halves(gate, up):
    """Return gate and up; without up, the halves of gate."""
    return (gate, up) if up is not None else gate.chunk(2, -1)


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, y_ptr, stride_gate, stride_up, N, tiles,
    ACT: tl.constexpr, FLAT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = a(gate) up, computed in float32.

    Grid: rows * tiles, tiles = cdiv(N, BLOCK_N). A program owns BLOCK_N columns of one row; it
    reads gate and up, and writes y, whose rows have N elements. ACT: "silu", "gelu_tanh" or
    "gelu_erf". FLAT: there is one row, and the strides are not used. BLOCK_N: a power of two.
    """
    row, start = _tile_coords(tiles, FLAT, BLOCK_N)
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
def _forward_tile(gate_ptrs, up_ptrs, y_ptrs, mask, ACT: tl.constexpr):
    """Compute and store a tile of y."""
    gate = tl.load(gate_ptrs, mask=mask).to(tl.float32)
    up = tl.load(up_ptrs, mask=mask).to(tl.float32)
    y = gate * _act_ratio(gate, ACT) * up
    # The result is not read again here: a streaming store leaves the cache to the loads.
    tl.store(y_ptrs, y.to(y_ptrs.dtype.element_ty), mask=mask, cache_modifier=".cs")


@triton.jit
def _backward_kernel(
    gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, y_ptr,
    stride_gate, stride_up, stride_dy, stride_out, N, tiles,
    ACT: tl.constexpr, FLAT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dgate = dy up a'(gate) and dup = dy a(gate), computed in float32, and y = a(gate) up.

    Grid: rows * tiles, tiles = cdiv(N, BLOCK_N). A program owns BLOCK_N columns of one row; it
    reads gate, up and dy, and writes dgate and dup, which have one stride. It writes y, whose rows
    have N elements, unless y_ptr is None. ACT: "silu", "gelu_tanh" or "gelu_erf". FLAT: there is
    one row, and the strides are not used. BLOCK_N: a power of two.
    """
    row, start = _tile_coords(tiles, FLAT, BLOCK_N)
    offs = tl.arange(0, BLOCK_N)
    gate_ptrs = gate_ptr + (row * stride_gate + start) + offs
    up_ptrs = up_ptr + (row * stride_up + start) + offs
    dy_ptrs = dy_ptr + (row * stride_dy + start) + offs
    dgate_ptrs = dgate_ptr + (row * stride_out + start) + offs
    dup_ptrs = dup_ptr + (row * stride_out + start) + offs
    y_ptrs = y_ptr if y_ptr is None else y_ptr + (row * N + start) + offs
    if start + BLOCK_N <= N:
        _backward_tile(gate_ptrs, up_ptrs, dy_ptrs, dgate_ptrs, dup_ptrs, y_ptrs, None, ACT)
    else:
        mask = start + offs < N
        _backward_tile(gate_ptrs, up_ptrs, dy_ptrs, dgate_ptrs, dup_ptrs, y_ptrs, mask, ACT)


@triton.jit
def _backward_tile(
    gate_ptrs, up_ptrs, dy_ptrs, dgate_ptrs, dup_ptrs, y_ptrs, mask, ACT: tl.constexpr
):  # fmt: skip
    """Compute and store a tile of dgate and dup, and of y unless y_ptrs is None."""
    gate = tl.load(gate_ptrs, mask=mask).to(tl.float32)
    up = tl.load(up_ptrs, mask=mask).to(tl.float32)
    dy = tl.load(dy_ptrs, mask=mask).to(tl.float32)
    ratio = _act_ratio(gate, ACT)
    dgate = dy * up * _act_derivative(gate, ratio, ACT)
    dup = dy * (gate * ratio)
    if y_ptrs is not None:
        y = gate * ratio * up
        tl.store(y_ptrs, y.to(y_ptrs.dtype.element_ty), mask=mask, cache_modifier=".cs")
    tl.store(dgate_ptrs, dgate.to(dgate_ptrs.dtype.element_ty), mask=mask, cache_modifier=".cs")
    tl.store(dup_ptrs, dup.to(dup_ptrs.dtype.element_ty), mask=mask, cache_modifier=".cs")


@triton.jit
def _tile_coords(tiles, FLAT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the row of a program, and the first column of its tile."""
    pid = tl.program_id(0)
    row = 0 if FLAT else pid // tiles
    tile = pid if FLAT else pid % tiles
    return tl.cast(row, tl.int64), tile.to(tl.int64) * BLOCK_N


@triton.jit
def _act_ratio(x, ACT: tl.constexpr):
    """Return a(x) / x."""
    if ACT == "silu":
        return 1.0 / (1.0 + tl.exp2(-LOG2E * x))
    elif ACT == "gelu_tanh":
        return gelu_gate(x, True)
    else:
        # PRECISE is False: erf would lose the digits far below zero.
        return normal(x, False)[0]


@triton.jit
def _act_derivative(x, ratio, ACT: tl.constexpr):
    """Return a'(x); ratio: a(x) / x."""
    if ACT == "silu":
        return ratio + x * ratio * (1.0 - ratio)
    elif ACT == "gelu_tanh":
        return gelu_gate_slope(x, ratio)
    else:
        return ratio + DENSITY * x * normal(x, False)[1]


# The choice of a tile is the same for all rows of this length or more.
LONG = 4096
BLOCKS = tuple(
    {"BLOCK_N": block, "num_warps": warps}
    for block in (128, 256, 512, 1024, 2048, 4096)
    for warps in (1, 2, 4, 8)
    if 4 <= block // (32 * warps) <= 32
)


def _choose(n, itemsize, act):
    # One 16-byte access of each tensor for each of 128 threads, or fewer threads for a short row.
    block = 2048 // itemsize
    if n < block:
        block = 1 << (n - 1).bit_length()
    return {"BLOCK_N": block, "num_warps": max(1, block * itemsize // (32 * ACCESS_BYTES))}


def _suits(candidate, n, itemsize, act):
    # One to four accesses a thread, and no tile longer than the row.
    bytes_of_thread = candidate["BLOCK_N"] * itemsize // (32 * candidate["num_warps"])
    in_row = candidate["BLOCK_N"] < 2 * max(n, 128)
    return in_row and ACCESS_BYTES <= bytes_of_thread <= 4 * ACCESS_BYTES


FORWARD = Configs(_forward_kernel, BLOCKS, _choose, _suits)
BACKWARD = Configs(_backward_kernel, BLOCKS, _choose, _suits)
gated_fwd = cached_launch(gated_fwd)
gated_bwd = cached_launch(gated_bwd)

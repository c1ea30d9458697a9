"""Softmax over the last dimension, forward and backward: plain, scaled, causal, with a mask.

forward: z = scale x + mask, y = exp(z - max z) / sum exp(z - max z), over the keys that a causal
row sees. backward: dx = scale y (dy - sum y dy). `ops/softmax.py` counts bytes and FLOPs.

Traffic to memory decides the time, so a row is read once. The forward pass keeps its numerators in
registers. The backward pass keeps y and dy there, in the dtype of the tensors. The exponential is
exp2 with log2(e) folded into the scale. `_forward_row_kernel` below is the whole idea; the variants
are in `kernels/softmax_details/`:

    general_rows.py    a mask, a diagonal, a scale that is not positive, rows at any address
    short_rows.py      several short rows at any address to a warp
    loop_rows.py       rows that are read in a loop
    split_rows.py      rows that several programs hold together
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import check_flag, check_floating, check_number, check_tensors
from ._runtime.configs import Configs
from ._runtime.layout import rows_and_stride
from ._triton.math import LOG2E
from ._triton.memory import opaque_zero, store_as, to_f32_rematerialized
from ._triton.row_access import max_body, needs_peeling
from .softmax_details.configs import (
    PAIR_BYTES,
    ROW_CANDIDATES,
    SPLIT_LOOP_BYTES,
    TILED_BYTES,
    choose_backward_row,
    choose_row,
    fits_in_registers,
    reads_rows_twice,
    suits_forward_row,
    suits_row,
)
from .softmax_details.general_rows import FORWARD_GENERAL, forward_general
from .softmax_details.loop_rows import BACKWARD_LOOP, FORWARD_LOOP, backward_loop, forward_loop
from .softmax_details.rows import (
    broadcast_mask,
    exp_numerators,
    inv_sum,
    load_visible,
    num_visible,
    row_max,
    row_sum,
)
from .softmax_details.short_rows import backward_short, forward_short, short
from .softmax_details.split_rows import backward_split, can_split_rows, forward_split

# The smallest normal scale in float32; a denormal one may be zero there.
SMALLEST = 2.0**-126

ACCUMULATES = {"softmax": "float32"}


def softmax(
    x: torch.Tensor,
    *,
    scale: float = 1.0,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the softmax of `scale * x + mask` over the last dimension, computed in float32.

    All arguments but x are named, because the second one of other libraries is a dimension. A row
    that is minus infinity throughout is NaN, as in PyTorch; a row that sees no key is zero.

    Args:
        x: `[..., N]`, float32, float16 or bfloat16; `[..., Q, N]` if causal.
        scale: factor of x before the mask and the softmax.
        causal: whether query i sees only the keys up to i + N - Q. The others do not count, and
            their results are zero.
        mask: added to `scale * x`. It has the dtype of x or float32, and a shape that broadcasts
            to that of x.

    Returns:
        A new tensor with the shape and dtype of x. It is differentiable in x.

    Raises:
        TypeError: x or mask is no tensor or has another dtype; scale is no number; causal is no
            bool.
        ValueError: x has too few dimensions, or lies neither on a GPU nor in the interpreter; mask
            does not broadcast to x, lies on another device, or requires a gradient.

    Source:
        Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 2.

    Example:
        >>> x = torch.randn(4, 100, device="cuda")
        >>> softmax(x).shape
        torch.Size([4, 100])
    """
    scale, causal = check_number("scale", scale), check_flag("causal", causal)
    heads = queries = None
    if causal or mask is not None:
        check_tensors(x=x, **({} if mask is None else {"mask": mask}))
        _check(x, causal)
        heads, queries = (1, 1, *x.shape[:-1])[-2:]
        if mask is not None and x.numel():
            mask = broadcast_mask(mask, x, heads, queries)
    if needs_grad(x):
        return _Softmax.apply(x, scale, causal, heads, queries, mask)
    return softmax_fwd(x, scale, causal, heads, queries, mask)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, causal, heads, queries, mask):
        y = softmax_fwd(x, scale, causal, heads, queries, mask)
        ctx.save_for_backward(y)
        ctx.arguments = scale, causal, queries
        return y

    @staticmethod
    @once
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return softmax_bwd(y, dy, *ctx.arguments), None, None, None, None, None


def softmax_fwd(
    x: torch.Tensor,
    scale: float = 1.0,
    causal: bool = False,
    heads: int | None = None,
    queries: int | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return y, contiguous, for x `[..., N]`; raise TypeError or ValueError for another x.

    heads, queries: H and Q of M = B H Q rows, if causal or with a mask. mask: [B, H, Q, N] with
    contiguous columns and any other strides.
    """
    _check(x, causal)
    n, elements, itemsize = x.shape[-1], x.numel(), x.element_size()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if elements == 0:
        return y
    m = elements // n
    x, stride = rows_and_stride(x)
    # The maximum of such scores is that of x, so x stays in registers in its own dtype.
    scale_in_exp2 = mask is None and scale >= SMALLEST
    plain = scale_in_exp2 and not causal
    peeled = needs_peeling(n, (x, stride), (y, n))
    held = max_body(n, itemsize) if peeled else n
    if peeled and plain and short(n, itemsize) and held * itemsize > TILED_BYTES:
        forward_short(x, y, stride, scale)
        return y
    long = held * itemsize > PAIR_BYTES
    if long and plain and can_split_rows(n, x, strides=(stride,), peeled=peeled):
        forward_split(x, y, stride, scale, peeled)
        return y
    fits = fits_in_registers(held, itemsize, causal)
    if not (fits and plain) or peeled:
        forward = forward_general if fits else forward_loop
        forward(
            x, y, stride, scale, causal, heads, queries, mask,
            scale_in_exp2=scale_in_exp2, peeled=peeled, held=held,
        )  # fmt: skip
        return y
    config = FORWARD_ROW.pick(x.device, n=n, itemsize=itemsize)
    block = config["BLOCK_N"]
    _forward_row_kernel[(-(-m // config["BLOCK_M"]),)](
        x_ptr=x, y_ptr=y, stride_xm=stride, M=m, N=n, scale=scale,
        EVEN_N=n % block == 0, NUM_CHUNKS=-(-n // block), **config,
    )  # fmt: skip
    return y


def softmax_bwd(
    y: torch.Tensor,
    dy: torch.Tensor,
    scale: float = 1.0,
    causal: bool = False,
    queries: int | None = None,
) -> torch.Tensor:
    """Return dx, contiguous, for y and dy `[..., N]`. queries: as in `softmax_fwd`."""
    n, elements, itemsize = y.shape[-1], y.numel(), y.element_size()
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    if elements == 0:
        return dx
    m = elements // n
    (y, stride_ym), (dy, stride_dym) = rows_and_stride(y), rows_and_stride(dy)
    strides = stride_ym, stride_dym
    peeled = needs_peeling(n, (y, stride_ym), (dy, stride_dym), (dx, n))
    held = max_body(n, itemsize) if peeled else n
    if peeled and not causal and short(n, itemsize):
        backward_short(y, dy, dx, strides, scale)
        return dx
    least = min(PAIR_BYTES, SPLIT_LOOP_BYTES) if peeled else PAIR_BYTES
    long = held * itemsize > least
    if long and not causal and can_split_rows(n, y, dy, strides=strides, peeled=peeled):
        backward_split(y, dy, dx, strides, scale, peeled)
        return dx
    if peeled or reads_rows_twice(n, itemsize, causal):
        backward_loop(y, dy, dx, strides, scale, causal, queries, peeled=peeled, held=held)
        return dx
    config = BACKWARD_ROW.pick(y.device, n=n, itemsize=itemsize, causal=causal)
    block = config["BLOCK_N"]
    _backward_row_kernel[(-(-m // config["BLOCK_M"]),)](
        y_ptr=y, dy_ptr=dy, dx_ptr=dx,
        stride_ym=stride_ym, stride_dym=stride_dym, M=m, N=n, Q=queries, scale=scale,
        CAUSAL=causal, EVEN_N=n % block == 0, NUM_CHUNKS=-(-n // block),
        KEEP_BOTH_IN_REGS=n * itemsize <= PAIR_BYTES, **config,
    )  # fmt: skip
    return dx


def _check(x, causal):
    if x.dim() <= causal:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected {1 + causal} dimensions or more")
    check_floating(x=x)


@triton.jit
def _forward_row_kernel(
    x_ptr, y_ptr, stride_xm, M, N, scale,
    EVEN_N: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = exp(z - max z) / sum exp(z - max z), z = scale x, of rows that registers hold.

    Grid: cdiv(M, BLOCK_M). A program owns BLOCK_M rows in NUM_CHUNKS chunks of BLOCK_N columns.
    It reads x once, whose rows lie stride_xm apart, and writes y once, whose rows lie N apart.
    Sums are in float32.

    scale is positive and normal. NUM_CHUNKS BLOCK_N >= N. EVEN_N: BLOCK_N divides N, so columns
    need no mask.
    """
    scale_log2e = tl.cast(scale, tl.float32) * LOG2E
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    rows = (first + tl.arange(0, BLOCK_M))[:, None]  # [BLOCK_M, 1]
    offs_n = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    x_row = x_ptr + rows * stride_xm
    # 1. Load the rows; they stay in registers.
    chunks = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        columns = chunk * BLOCK_N + offs_n
        inside = (rows < M) & ((columns < N) | EVEN_N)
        chunks += (tl.load(x_row + columns, mask=inside, other=-float("inf")),)
    # 2. Take the maximum of each row.
    m_lanes = chunks[0].to(tl.float32)
    for chunk in tl.static_range(1, NUM_CHUNKS):
        m_lanes = tl.maximum(m_lanes, chunks[chunk].to(tl.float32))
    m = row_max(m_lanes)  # [BLOCK_M, 1]
    m = tl.where(m == -float("inf"), 0.0, m)  # inf - inf would be NaN
    # 3. Exponentiate once, keep the numerators, sum them.
    l_lanes = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    numerators = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        numerator = exp_numerators(chunks[chunk], m, scale_log2e)
        l_lanes += numerator
        numerators += (numerator,)
    inv_l = inv_sum(row_sum(l_lanes), y_ptr.dtype.element_ty)  # [BLOCK_M, 1]
    # 4. Normalize and store.
    y_row = y_ptr + rows * N
    for chunk in tl.static_range(NUM_CHUNKS):
        columns = chunk * BLOCK_N + offs_n
        inside = (rows < M) & ((columns < N) | EVEN_N)
        y = numerators[chunk] * inv_l
        tl.store(y_row + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_row_kernel(
    y_ptr, dy_ptr, dx_ptr, stride_ym, stride_dym, M, N, Q, scale,
    CAUSAL: tl.constexpr, EVEN_N: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    KEEP_BOTH_IN_REGS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx = scale y (dy - sum y dy), of rows that registers hold.

    Grid: cdiv(M, BLOCK_M). A program owns BLOCK_M rows in NUM_CHUNKS chunks of BLOCK_N columns.
    It reads y and dy, whose rows lie stride_ym and stride_dym apart. It writes dx, whose rows lie N
    apart. The sum is in float32.

    NUM_CHUNKS BLOCK_N >= N. EVEN_N: BLOCK_N divides N. CAUSAL: row r sees only its first
    N - Q + 1 + r % Q keys. KEEP_BOTH_IN_REGS: y stays in registers like dy, else y is read twice.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    rows = (first + tl.arange(0, BLOCK_M))[:, None]  # [BLOCK_M, 1]
    end = num_visible(rows, N, Q, CAUSAL)
    offs_n = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    y_row, dy_row = y_ptr + rows * stride_ym, dy_ptr + rows * stride_dym
    products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    ys, dys = (), ()
    for chunk in tl.static_range(NUM_CHUNKS):
        columns = chunk * BLOCK_N + offs_n
        inside = (rows < M) & ((columns < N) | EVEN_N)
        y = load_visible(
            y_row, columns, inside, end, CAUSAL, "" if KEEP_BOTH_IN_REGS else "evict_last"
        )
        dy = load_visible(dy_row, columns, inside, end, CAUSAL, "")
        products += y.to(tl.float32) * dy.to(tl.float32)
        if KEEP_BOTH_IN_REGS:
            ys = ys + (y,)  # noqa: RUF005
        dys = dys + (dy,)  # noqa: RUF005
    delta = tl.sum(products, 1)[:, None]  # [BLOCK_M, 1]
    # The chunks stay packed until here, which halves their registers.
    zero = opaque_zero(delta)
    for chunk in tl.static_range(NUM_CHUNKS):
        columns = chunk * BLOCK_N + offs_n
        inside = (rows < M) & ((columns < N) | EVEN_N)
        if KEEP_BOTH_IN_REGS:
            y = ys[chunk]
        else:
            y = load_visible(y_row + zero, columns, inside, end, CAUSAL, "evict_first")
        y, dy = to_f32_rematerialized(y, zero), to_f32_rematerialized(dys[chunk], zero)
        dx = y * (dy - delta) * scale
        store_as(dx_ptr + rows * N + columns, dx, inside)


FORWARD_ROW = Configs(_forward_row_kernel, ROW_CANDIDATES, choose_row, suits_forward_row)
BACKWARD_ROW = Configs(_backward_row_kernel, ROW_CANDIDATES, choose_backward_row, suits_row)
# The harness builds and tunes the configurations that it finds in this file.
VARIANTS = FORWARD_GENERAL, FORWARD_LOOP, BACKWARD_LOOP

softmax_fwd = cached_launch(softmax_fwd)
softmax_bwd = cached_launch(softmax_bwd)

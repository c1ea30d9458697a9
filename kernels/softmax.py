"""Softmax over the last dimension, forward and backward: plain, scaled, causal, with a mask.

forward: z = scale x + mask, y = exp(z - max z) / sum exp(z - max z), over the keys that a causal
row sees. backward: dx = scale y (dy - sum y dy).

Memory decides: `ops/softmax.py` counts bytes and FLOPs. A row is read once: forward its weights
stay in registers, backward what was read, packed as it came; short rows share a program. Longer
rows are walked, out of the first cache once it has them, and the longest are held by several
programs (`kernels/softmax_details/split_rows.py`). The exponential is exp2 with log2(e) folded into
the scale.
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import check_flag, check_floating, check_number, check_tensors
from ._runtime.configs import Configs
from ._runtime.layout import as_rows_2d
from ._triton.math import LOG2E
from ._triton.memory import opaque_zero, store_as, to_f32_rematerialized
from ._triton.row_access import edges, inner, most_whole, split, whole
from .softmax_details.configs import (
    LOOP_CANDIDATES,
    PAIR_BYTES,
    ROW_CANDIDATES,
    SPLIT_WALK_BYTES,
    TILED_BYTES,
    choose_backward_loop,
    choose_backward_row,
    choose_loop,
    choose_row,
    constant_steps,
    keeps,
    suits_forward_row,
    suits_row,
    walks_backward,
)
from .softmax_details.rows import (
    broadcast_mask,
    finite_or_zero,
    keys,
    mask_of,
    row_max,
    row_sum,
    scores,
    seen_of,
    share_of,
    steps_of,
    weights_of,
)
from .softmax_details.short_rows import backward_short, forward_short, short
from .softmax_details.split_rows import backward_shared, forward_shared, shares

# The smallest scale that is not zero in float32, where denormal numbers are.
SMALLEST = 2.0**-126


ACCUMULATES = {"softmax": "float32"}


@triton.jit
def _forward_row_kernel(
    x_ptr, y_ptr, mask_ptr, stride_xm, stride_kb, stride_kh, stride_kq, M, N, H, Q, scale,
    FOLD: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = exp(z - max z) / sum exp(z - max z), z = scale x + mask, of rows that registers hold.

    Grid: a program for BLOCK_M rows, in CHUNKS blocks of BLOCK_N columns, CHUNKS BLOCK_N >= N.
    Reads x, whose rows lie stride_xm apart, and, unless it is None, the mask by its strides over
    batch, head and query; writes y, whose rows lie N apart. FOLD: no mask, and scale positive and
    normal, so the maximum of x is that of z. CAUSAL: of row r only the first N - Q + 1 + r % Q keys
    count. EVEN: N is a multiple of BLOCK_N. SPLIT: rows are split as in `_triton/row_access.py`,
    and the chunks hold their whole accesses.
    """
    slope = tl.cast(scale, tl.float32) * LOG2E if FOLD else LOG2E
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    end = keys(rows, N, Q, CAUSAL)
    mask_row = None
    if mask_ptr is not None:
        mask_row = mask_of(mask_ptr, rows, stride_kb, stride_kh, stride_kq, H, Q)
    x_row = x_ptr + rows * stride_xm
    width, seen = N, end
    if SPLIT:
        if BLOCK_M == 1:
            x_row = x_ptr + tl.program_id(0).to(tl.int64) * stride_xm
        lead, width = whole(x_row, N)
        places, there = edges(lead, width, N, x_row.dtype)
        if BLOCK_M == 1:
            places, there = places[None, :], there[None, :]
        there &= rows < M
        edge = scores(x_row, mask_row, places, there, end, scale, FOLD, CAUSAL, "")
        x_row, seen = inner(x_row, lead), end - lead
        if mask_ptr is not None:
            mask_row += lead
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * BLOCK_N + offs_n
        inside = (rows < M) & ((columns < width) | EVEN)
        loaded = scores(x_row, mask_row, columns, inside, seen, scale, FOLD, CAUSAL, "")
        chunks = chunks + (loaded,)  # noqa: RUF005
    top = chunks[0].to(tl.float32)
    for chunk in tl.static_range(1, CHUNKS):
        top = tl.maximum(top, chunks[chunk].to(tl.float32))
    highest = row_max(top)
    if SPLIT:
        highest = tl.maximum(highest, row_max(edge.to(tl.float32)))
    highest = finite_or_zero(highest)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    weights = ()
    for chunk in tl.static_range(CHUNKS):
        weight = weights_of(chunks[chunk], highest, slope)
        total += weight
        weights = weights + (weight,)  # noqa: RUF005
    total = row_sum(total)
    if SPLIT:
        at_edge = weights_of(edge, highest, slope)
        total += row_sum(at_edge)
    share = share_of(total, y_ptr.dtype.element_ty)
    if CAUSAL:
        # Weights that are not seen are zero, and so is the sum of a row that sees none.
        share = tl.where(end > 0, share, 0.0)
    y_row = y_ptr + rows * N
    if SPLIT:
        if BLOCK_M == 1:
            y_row = y_ptr + tl.program_id(0).to(tl.int64) * N
        store_as(y_row + places, at_edge * share, there)
        y_row = inner(y_row, lead)
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * BLOCK_N + offs_n
        inside = (rows < M) & ((columns < width) | EVEN)
        store_as(y_row + columns, weights[chunk] * share, inside)


@triton.jit
def _forward_loop_kernel(
    x_ptr, y_ptr, mask_ptr, stride_xm, stride_kb, stride_kh, stride_kq, N, H, Q, scale,
    FOLD: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    STEPS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What `_forward_row_kernel` computes, of a row that a program reads three times.

    Grid: a program for each row. STEPS: how many blocks of BLOCK_N columns a row has, or 0 where
    that is not to be a constant. The first two walks go along the row and the last one back. All
    else as there.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    slope = tl.cast(scale, tl.float32) * LOG2E if FOLD else LOG2E
    end = keys(row, N, Q, CAUSAL)
    mask_row = None
    if mask_ptr is not None:
        mask_row = mask_of(mask_ptr, row, stride_kb, stride_kh, stride_kq, H, Q)
    width, seen = N, end
    if SPLIT:
        lead, width = whole(x_ptr, N)
        places, there = edges(lead, width, N, x_ptr.dtype)
        edge = scores(x_ptr, mask_row, places, there, end, scale, FOLD, CAUSAL, "")
        x_ptr, seen = inner(x_ptr, lead), end - lead
        if mask_ptr is not None:
            mask_row += lead
    steps, stop = steps_of(width, seen, CAUSAL, STEPS, BLOCK_N)
    top = tl.full((1, BLOCK_N), -float("inf"), tl.float32)
    for start in range(0, stop, BLOCK_N):
        columns = start + offs_n
        inside = (columns < width) | EVEN
        x = scores(x_ptr, mask_row, columns, inside, seen, scale, FOLD, CAUSAL, "evict_last")
        top = tl.maximum(top, x.to(tl.float32))
    highest = tl.max(top)
    if SPLIT:
        highest = tl.maximum(highest, tl.max(edge.to(tl.float32)))
    highest = finite_or_zero(highest)
    total = tl.zeros((1, BLOCK_N), tl.float32)
    for start in range(0, stop, BLOCK_N):
        columns = start + offs_n
        inside = (columns < width) | EVEN
        x = scores(x_ptr, mask_row, columns, inside, seen, scale, FOLD, CAUSAL, "evict_last")
        total += weights_of(x, highest, slope)
    total = tl.sum(total)
    if SPLIT:
        at_edge = weights_of(edge, highest, slope)
        total += tl.sum(at_edge)
    share = share_of(total, y_ptr.dtype.element_ty)
    if CAUSAL:
        share = tl.where(end > 0, share, 0.0)
    if SPLIT:
        store_as(y_ptr + places, at_edge * share, there)
        y_ptr = inner(y_ptr, lead)
    # Backwards: what was read last is what the cache still has.
    for step in range(steps):
        columns = (steps - 1 - step) * BLOCK_N + offs_n
        inside = (columns < width) | EVEN
        x = scores(x_ptr, mask_row, columns, inside, seen, scale, FOLD, CAUSAL, "evict_first")
        y = weights_of(x, highest, slope) * share
        store_as(y_ptr + columns, y, inside)


@triton.jit
def _backward_row_kernel(
    y_ptr, dy_ptr, dx_ptr, stride_ym, stride_dym, M, N, Q, scale,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, CHUNKS: tl.constexpr, PAIR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx = scale y (dy - sum y dy), of rows that registers hold.

    Grid: a program for BLOCK_M rows, in CHUNKS blocks of BLOCK_N columns, CHUNKS BLOCK_N >= N.
    Reads y and dy, whose rows lie stride_ym and stride_dym apart; y twice unless PAIR. Writes dx,
    whose rows lie N apart. CAUSAL and EVEN as forward.
    """
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    end = keys(rows, N, Q, CAUSAL)
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    y_row, dy_row = y_ptr + rows * stride_ym, dy_ptr + rows * stride_dym
    products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    ys, dys = (), ()
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * BLOCK_N + offs_n
        inside = (rows < M) & ((columns < N) | EVEN)
        y = seen_of(y_row, columns, inside, end, CAUSAL, "" if PAIR else "evict_last")
        dy = seen_of(dy_row, columns, inside, end, CAUSAL, "")
        products += y.to(tl.float32) * dy.to(tl.float32)
        if PAIR:
            ys = ys + (y,)  # noqa: RUF005
        dys = dys + (dy,)  # noqa: RUF005
    weighted = tl.sum(products, 1)[:, None]
    # Half the registers: what is kept stays packed until here.
    zero = opaque_zero(weighted)
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * BLOCK_N + offs_n
        inside = (rows < M) & ((columns < N) | EVEN)
        if PAIR:
            y = ys[chunk]
        else:
            y = seen_of(y_row + zero, columns, inside, end, CAUSAL, "evict_first")
        y, dy = to_f32_rematerialized(y, zero), to_f32_rematerialized(dys[chunk], zero)
        dx = y * (dy - weighted) * scale
        store_as(dx_ptr + rows * N + columns, dx, inside)


@triton.jit
def _backward_loop_kernel(
    y_ptr, dy_ptr, dx_ptr, stride_ym, stride_dym, N, Q, scale,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What `_backward_row_kernel` computes, of a row that a program reads twice.

    Grid: a program for each row. SPLIT and STEPS as forward, all else as in the other kernel.
    """
    row = tl.program_id(0).to(tl.int64)
    y_ptr += row * stride_ym
    dy_ptr += row * stride_dym
    dx_ptr += row * N
    offs_n = tl.arange(0, BLOCK_N)
    end = keys(row, N, Q, CAUSAL)
    width, seen = N, end
    if SPLIT:
        lead, width = whole(y_ptr, N)
        places, there = edges(lead, width, N, y_ptr.dtype)
        y_edge = seen_of(y_ptr, places, there, end, CAUSAL, "").to(tl.float32)
        dy_edge = seen_of(dy_ptr, places, there, end, CAUSAL, "").to(tl.float32)
        y_ptr, dy_ptr, seen = inner(y_ptr, lead), inner(dy_ptr, lead), end - lead
    steps, stop = steps_of(width, seen, CAUSAL, STEPS, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, stop, BLOCK_N):
        offs = start + offs_n
        inside = (offs < width) | EVEN
        y = seen_of(y_ptr, offs, inside, seen, CAUSAL, "evict_last")
        dy = seen_of(dy_ptr, offs, inside, seen, CAUSAL, "evict_last")
        total += y.to(tl.float32) * dy.to(tl.float32)
    weighted = tl.sum(total, 0)
    if SPLIT:
        weighted += tl.sum(y_edge * dy_edge, 0)
        store_as(dx_ptr + places, y_edge * (dy_edge - weighted) * scale, there)
        dx_ptr = inner(dx_ptr, lead)
    for step in range(steps):
        offs = step * BLOCK_N + offs_n
        inside = (offs < width) | EVEN
        y = seen_of(y_ptr, offs, inside, seen, CAUSAL, "evict_first")
        dy = seen_of(dy_ptr, offs, inside, seen, CAUSAL, "evict_first")
        dx = y.to(tl.float32) * (dy.to(tl.float32) - weighted) * scale
        store_as(dx_ptr + offs, dx, inside)


FORWARD_ROW = Configs(_forward_row_kernel, ROW_CANDIDATES, choose_row, suits_forward_row)
FORWARD_LOOP = Configs(_forward_loop_kernel, LOOP_CANDIDATES, choose_loop)
BACKWARD_ROW = Configs(_backward_row_kernel, ROW_CANDIDATES, choose_backward_row, suits_row)
BACKWARD_LOOP = Configs(_backward_loop_kernel, LOOP_CANDIDATES, choose_backward_loop)


def _rows(x):
    """x, or a view or copy whose rows are contiguous and equally far apart, and that distance."""
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = as_rows_2d(x)
    return rows, rows.stride(0)


def _check(x, causal):
    if x.dim() <= causal:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected {1 + causal} dimensions or more")
    check_floating(x=x)


def softmax_fwd(
    x: torch.Tensor,
    scale: float = 1.0,
    causal: bool = False,
    heads: int | None = None,
    queries: int | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: [..., N], else ValueError or TypeError. Returns y, contiguous, of its shape.

    heads, queries: H and Q of M = B H Q, where causal or with a mask. mask: [B, H, Q, N] of any
    strides but the last.
    """
    _check(x, causal)
    n, elements, itemsize = x.shape[-1], x.numel(), x.element_size()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if elements == 0:
        return y
    m = elements // n
    x, stride = _rows(x)
    kb, kh, kq = (None, None, None) if mask is None else mask.stride()[:3]
    # Only then the scores are what was read, and are kept as they came.
    fold = mask is None and scale >= SMALLEST
    parted = split(n, (x, stride), (y, n))
    held = most_whole(n, itemsize) if parted else n
    plain = fold and not causal
    if parted and plain and short(n, itemsize) and held * itemsize > TILED_BYTES:
        forward_short(x, y, stride, scale)
        return y
    if held * itemsize > PAIR_BYTES and plain and shares(n, x, strides=(stride,), parted=parted):
        forward_shared(x, y, stride, scale, parted)
        return y
    if not keeps(held, itemsize, causal):
        config = FORWARD_LOOP.pick(x.device, n=held, itemsize=itemsize)
        block = config["BLOCK_N"]
        _forward_loop_kernel[(m,)](
            x_ptr=x, y_ptr=y, mask_ptr=mask,
            stride_xm=stride, stride_kb=kb, stride_kh=kh, stride_kq=kq,
            N=n, H=heads, Q=queries, scale=scale, FOLD=fold, CAUSAL=causal,
            EVEN=not parted and n % block == 0, SPLIT=parted, STEPS=constant_steps(held, block),
            **config,
        )  # fmt: skip
        return y
    config = FORWARD_ROW.pick(x.device, n=held, itemsize=itemsize, causal=causal, wide=not fold)
    block = config["BLOCK_N"]
    _forward_row_kernel[(-(-m // config["BLOCK_M"]),)](
        x_ptr=x, y_ptr=y, mask_ptr=mask,
        stride_xm=stride, stride_kb=kb, stride_kh=kh, stride_kq=kq,
        M=m, N=n, H=heads, Q=queries, scale=scale, FOLD=fold, CAUSAL=causal,
        EVEN=not parted and n % block == 0, SPLIT=parted, CHUNKS=-(-held // block),
        **config,
    )  # fmt: skip
    return y


def softmax_bwd(
    y: torch.Tensor,
    dy: torch.Tensor,
    scale: float = 1.0,
    causal: bool = False,
    queries: int | None = None,
) -> torch.Tensor:
    """y, dy: [..., N]. Returns dx, contiguous, of their shape. queries: as in `softmax_fwd`."""
    n, elements, itemsize = y.shape[-1], y.numel(), y.element_size()
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    if elements == 0:
        return dx
    m = elements // n
    (y, stride_ym), (dy, stride_dym) = _rows(y), _rows(dy)
    strides = stride_ym, stride_dym
    parted = split(n, (y, stride_ym), (dy, stride_dym), (dx, n))
    held = most_whole(n, itemsize) if parted else n
    if parted and not causal and short(n, itemsize):
        backward_short(y, dy, dx, strides, scale)
        return dx
    least = min(PAIR_BYTES, SPLIT_WALK_BYTES) if parted else PAIR_BYTES
    if held * itemsize > least and not causal and shares(n, y, dy, strides=strides, parted=parted):
        backward_shared(y, dy, dx, strides, scale, parted)
        return dx
    # A diagonal takes registers too.
    if parted or walks_backward(n, itemsize, causal):
        config = BACKWARD_LOOP.pick(y.device, n=held, itemsize=itemsize)
        block = config["BLOCK_N"]
        _backward_loop_kernel[(m,)](
            y_ptr=y, dy_ptr=dy, dx_ptr=dx,
            stride_ym=stride_ym, stride_dym=stride_dym, N=n, Q=queries, scale=scale,
            CAUSAL=causal, EVEN=not parted and n % block == 0, SPLIT=parted,
            STEPS=constant_steps(held, block), **config,
        )  # fmt: skip
        return dx
    config = BACKWARD_ROW.pick(y.device, n=n, itemsize=itemsize, causal=causal)
    block = config["BLOCK_N"]
    _backward_row_kernel[(-(-m // config["BLOCK_M"]),)](
        y_ptr=y, dy_ptr=dy, dx_ptr=dx,
        stride_ym=stride_ym, stride_dym=stride_dym, M=m, N=n, Q=queries, scale=scale,
        CAUSAL=causal, EVEN=n % block == 0, CHUNKS=-(-n // block),
        PAIR=n * itemsize <= PAIR_BYTES, **config,
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
    @once
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return softmax_bwd(y, dy, *ctx.arguments), None, None, None, None, None


def softmax(
    x: torch.Tensor,
    *,
    scale: float = 1.0,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax of scale x + mask over the last dimension, computed in float32.

    All but x are named: `softmax(x, -1)` is a dimension elsewhere, and would be a scale here.

    x: [..., N]; float32, float16 or bfloat16. causal: x is [..., Q, N], and query i sees the keys
    up to i + N - Q; all others are zero and do not count. mask: added to scale x; of the dtype of x
    or float32, of any shape that broadcasts to that of x; it has no gradient. A row that is minus
    infinity throughout is NaN, as in PyTorch; one that sees no key is zero. Returns the shape and
    dtype of x; differentiable in x. TypeError for another dtype, ValueError for another shape or
    device.
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


softmax_fwd = cached_launch(softmax_fwd)
softmax_bwd = cached_launch(softmax_bwd)

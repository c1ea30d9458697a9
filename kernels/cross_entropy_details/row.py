"""What the two cross entropies share: the loss of a row, its gradient, and the steps around them.

The loss of a row x with target t, smoothing e and z-loss coefficient z is
    lse - (1 - e) x[t] - e mean x + z lse^2,  lse = log sum exp x,
and its gradient p (1 + 2 z lse) - e / V - (1 - e) [j = t], p the softmax of x. A row whose target
is the ignored index has neither; one whose target lies outside the row has NaN for both, since to
raise an error the host would have to wait for the device.
"""

import torch
import triton
import triton.language as tl

from .._runtime import internals
from .._runtime.call_cache import cached_launch
from .._runtime.checks import check_integer, check_number, check_one_of
from .._runtime.device import sm_count
from .._runtime.layout import ACCESS_BYTES
from .._triton.math import LN2, LOG2E
from .._triton.memory import opaque_zero, to_f32_rematerialized
from .._triton.row_access import edges_of, inner, whole

REDUCTIONS = ("mean", "sum", "none")
# Programs a multiprocessor that pass over a gradient of which all is scaled alike.
SCALERS = 4
# Entries that a program scales at a time.
SCALED = 4096


def options_of(
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    reductions: tuple[str, ...] = REDUCTIONS,
) -> tuple[int, float, float, str]:
    """The options, numbers as int and float; TypeError or ValueError names a wrong one."""
    check_integer("ignore_index", ignore_index, -(2**63), 2**63 - 1)
    label_smoothing = check_number("label_smoothing", label_smoothing, 0, 1)
    z_loss = check_number("z_loss", z_loss)
    check_one_of("reduction", reduction, reductions)
    return ignore_index, label_smoothing, z_loss, reduction


def check(targets: torch.Tensor, rows: int, classes: int, ignore_index: int) -> None:
    """ValueError or TypeError for targets that do not fit `rows` rows of `classes` logits. On a CPU
    the values of the targets are looked at too."""
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets: {targets.dtype}, expected int64 or int32")
    # Words are made only where they are wanted: a traced graph has none for a symbolic size.
    if targets.shape != (rows,):
        raise ValueError(f"targets: shape {tuple(targets.shape)}, expected ({rows},)")
    if classes == 0:
        raise ValueError("logits: 0 classes, expected at least one")
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        kept = targets[targets != ignore_index]
        outside = kept[(kept < 0) | (kept >= classes)]
        if outside.numel():
            raise ValueError(f"targets: {outside[0].item()}, expected 0 to {classes - 1}")


@triton.jit
def walk(row_ptr, V, SMOOTH: tl.constexpr, UNROLL: tl.constexpr, BLOCK_V: tl.constexpr):
    """The maximum of a row, the sum of exp of what its entries lie below that, the plain sum (zero
    unless SMOOTH), in one pass that takes UNROLL blocks at a time."""
    lanes = tl.arange(0, UNROLL)[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    top = tl.full((BLOCK_V,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_V,), tl.float32)
    plain = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, V, UNROLL * BLOCK_V):
        cols = start + lanes
        x = tl.load(
            row_ptr + cols, mask=cols < V, other=-float("inf"), eviction_policy="evict_last"
        ).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        # A lane that has seen only minus infinity must not subtract it from itself.
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2((x - base[None, :]) * LOG2E)
        total = total * tl.exp2((top - base) * LOG2E) + tl.sum(weights, 0)
        if SMOOTH:
            plain += tl.sum(tl.where(cols < V, x, 0.0), 0)
        top = new_top
    row_top = tl.max(top, 0)
    row_total = tl.sum(total * tl.exp2((top - row_top) * LOG2E), 0)
    return row_top, row_total, tl.sum(plain, 0)


@triton.jit
def edges_met(row_ptr, lead, width, V, LANES: tl.constexpr):
    """The columns of the edges of a row (`_triton/row_access.py`) in the first of LANES lanes.

    Also which of them there are, their logits, and of each lane the maximum, sum of exponentials
    and plain sum.
    """
    places, there = edges_of(tl.arange(0, LANES), lead, width, V)
    x = tl.load(row_ptr + places, mask=there, other=-float("inf")).to(tl.float32)
    total = tl.exp2(x - tl.where(x == -float("inf"), 0.0, x))
    return places, there, x, total, tl.where(there, x, 0.0)


@triton.jit
def walk_split(row_ptr, V, SMOOTH: tl.constexpr, UNROLL: tl.constexpr, BLOCK_V: tl.constexpr):
    """As `walk`, of a row that begins at any element: its edges come first."""
    lead, width = whole(row_ptr, V)
    _, _, top, total, plain = edges_met(row_ptr, lead, width, V, BLOCK_V)
    row_ptr = inner(row_ptr, lead)
    lanes = tl.arange(0, UNROLL)[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    for start in range(0, width, UNROLL * BLOCK_V):
        cols = start + lanes
        x = tl.load(
            row_ptr + cols, mask=cols < width, other=-float("inf"), eviction_policy="evict_last"
        ).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2((x - base[None, :]) * LOG2E)
        total = total * tl.exp2((top - base) * LOG2E) + tl.sum(weights, 0)
        if SMOOTH:
            plain += tl.sum(tl.where(cols < width, x, 0.0), 0)
        top = new_top
    row_top = tl.max(top, 0)
    row_total = tl.sum(total * tl.exp2((top - row_top) * LOG2E), 0)
    return row_top, row_total, tl.sum(plain, 0)


@triton.jit
def own_logit(row_ptr, target, V):
    """The logit of the target, NaN for one out of range, and the target as int32, then -1."""
    inside = (target >= 0) & (target < V)
    own = tl.load(row_ptr + target, mask=inside, other=float("nan")).to(tl.float32)
    return own, tl.where(inside, target, -1).to(tl.int32)


@triton.jit
def row_loss(own, top, total, plain, V, smoothing, z_loss, SMOOTH: tl.constexpr):
    """The loss of a row, and by what factor the z-loss makes its softmax count more in the
    gradient; NaN both where the target is out of range."""
    rest = tl.log2(total) * LN2
    # Differences to the maximum first: the loss may be small where both its terms are large.
    loss = rest + (1.0 - smoothing) * (top - own)
    if SMOOTH:
        loss += smoothing * (top - plain / V)
    lse = top + rest
    factor = tl.where(own == own, 1.0 + 2.0 * z_loss * lse, own)
    return loss + z_loss * lse * lse, factor


@triton.jit
def columns_of(step, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """The columns of a chunk of a row, WIDTH to a thread."""
    lanes = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return step * (LANES * WIDTH) + lanes


@triton.jit
def taken(row_ptr, step, V, POLICY: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """A chunk of a row as it lies in memory, minus infinity past the end."""
    columns = columns_of(step, LANES, WIDTH)
    return tl.load(row_ptr + columns, mask=columns < V, other=-float("inf"), eviction_policy=POLICY)


@triton.jit
def _met(x, step, top, total, plain, V, SMOOTH: tl.constexpr):
    """The running maximum, sum of exponentials and plain sum of each lane, with those of x."""
    new_top = tl.maximum(top, tl.max(x, 1))
    # A lane that has seen only minus infinity must not subtract it from itself.
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.exp2((x - base[:, None]) * LOG2E)
    total = total * tl.exp2((top - base) * LOG2E) + tl.sum(weights, 1)
    if SMOOTH:
        inside = columns_of(step, x.shape[0], x.shape[1]) < V
        plain += tl.sum(tl.where(inside, x, 0.0), 1)
    return new_top, total, plain


@triton.jit
def gradient_at(columns, x, top, share, place, V, smoothing, scale, SMOOTH: tl.constexpr):
    """The gradient in columns where the logits are x; `share` makes of a weight its softmax part,
    `place` is the column of the target."""
    gradient = tl.exp2((x - top) * LOG2E) * share
    if SMOOTH:
        gradient -= scale * smoothing / V
    return tl.where(columns == place, gradient - scale * (1.0 - smoothing), gradient)


@triton.jit
def put(out_ptr, x, step, top, share, place, end, V, smoothing, scale, SMOOTH: tl.constexpr):
    """Writes the gradient of a chunk, up to the column `end`; else as `gradient_at`."""
    columns = columns_of(step, x.shape[0], x.shape[1])
    gradient = gradient_at(columns, x, top, share, place, V, smoothing, scale, SMOOTH)
    gradient = gradient.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + columns, gradient, mask=columns < end, eviction_policy="evict_first")


@triton.jit
def put_edges(
    out_ptr, places, there, x, top, share, place, V, smoothing, scale, SMOOTH: tl.constexpr
):  # fmt: skip
    """Writes the gradient of the edges of a row; else as `gradient_at`."""
    gradient = gradient_at(places, x, top, share, place, V, smoothing, scale, SMOOTH)
    tl.store(out_ptr + places, gradient.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def gradient_of_row(
    row_ptr, out_ptr, loss_ptr, target, V, walked, ignore_index, smoothing, z_loss, scale,
    SMOOTH: tl.constexpr, WALKS: tl.constexpr, KEPT: tl.constexpr, AHEAD: tl.constexpr,
    LANES: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr = False,
):  # fmt: skip
    """Writes the loss of a row and its gradient, which may take the place of the row.

    The first `walked` times AHEAD chunks of LANES times WIDTH logits are read twice, the KEPT
    chunks behind them once: those stay in registers, as they came, and are widened for each use.
    SPLIT: the row is split as in `_triton/row_access.py`, and the chunks are those of its whole
    accesses.
    """
    loss = 0.0
    head = walked * AHEAD
    width = V
    begin_ptr, begin_out_ptr = row_ptr, out_ptr
    if SPLIT:
        lead, width = whole(row_ptr, V)
        row_ptr, out_ptr = inner(row_ptr, lead), inner(out_ptr, lead)
    if target == ignore_index:
        zeros = tl.zeros((LANES, WIDTH), out_ptr.dtype.element_ty)
        for step in range(0, head + KEPT):
            columns = columns_of(step, LANES, WIDTH)
            tl.store(out_ptr + columns, zeros, mask=columns < width)
        if SPLIT:
            places, there = edges_of(tl.arange(0, LANES), lead, width, V)
            tl.store(begin_out_ptr + places, 0.0, mask=there)
    else:
        own, place = own_logit(begin_ptr, target, V)
        top = tl.full((LANES,), -float("inf"), tl.float32)
        total = tl.zeros((LANES,), tl.float32)
        plain = tl.zeros((LANES,), tl.float32)
        nearest = place
        if SPLIT:
            places, there, edge, total, plain = edges_met(begin_ptr, lead, width, V, LANES)
            top = edge
            nearest = place - lead
        kept = ()
        for chunk in tl.static_range(KEPT):
            packed = taken(row_ptr, head + chunk, width, "evict_first", LANES, WIDTH)
            kept = kept + (packed,)  # noqa: RUF005
        if WALKS:
            for group in range(0, walked):
                ahead = ()
                for one in tl.static_range(AHEAD):
                    packed = taken(row_ptr, group * AHEAD + one, width, "evict_last", LANES, WIDTH)
                    ahead = ahead + (packed,)  # noqa: RUF005
                for one in tl.static_range(AHEAD):
                    x = ahead[one].to(tl.float32)
                    top, total, plain = _met(
                        x, group * AHEAD + one, top, total, plain, width, SMOOTH
                    )
        for chunk in tl.static_range(KEPT):
            x = kept[chunk].to(tl.float32)
            top, total, plain = _met(x, head + chunk, top, total, plain, width, SMOOTH)
        row_top = tl.max(top, 0)
        total = tl.sum(total * tl.exp2((top - row_top) * LOG2E), 0)
        loss, factor = row_loss(own, row_top, total, tl.sum(plain, 0), V, smoothing, z_loss, SMOOTH)
        share = factor * scale / total
        if SPLIT:
            put_edges(
                begin_out_ptr,
                places,
                there,
                edge,
                row_top,
                share,
                place,
                V,
                smoothing,
                scale,
                SMOOTH,
            )
        zero = opaque_zero(share)
        for chunk in tl.static_range(KEPT):
            x = to_f32_rematerialized(kept[chunk], zero)
            put(
                out_ptr,
                x,
                head + chunk,
                row_top,
                share,
                nearest,
                width,
                V,
                smoothing,
                scale,
                SMOOTH,
            )
        if WALKS:
            # From the end: what was read last is nearest.
            for back in range(0, walked):
                last = head - 1 - back * AHEAD
                ahead = ()
                for one in tl.static_range(AHEAD):
                    packed = taken(row_ptr, last - one, width, "evict_first", LANES, WIDTH)
                    ahead = ahead + (packed,)  # noqa: RUF005
                for one in tl.static_range(AHEAD):
                    x = ahead[one].to(tl.float32)
                    put(
                        out_ptr,
                        x,
                        last - one,
                        row_top,
                        share,
                        nearest,
                        width,
                        V,
                        smoothing,
                        scale,
                        SMOOTH,
                    )
    tl.store(loss_ptr, loss.to(loss_ptr.dtype.element_ty))


@triton.jit
def count_of(targets_ptr, M, ignore_index, BLOCK_M: tl.constexpr):
    """How many targets are not ignored, float32."""
    kept = tl.zeros((BLOCK_M,), tl.int32)
    for start in range(0, M, BLOCK_M):
        offs = start + tl.arange(0, BLOCK_M)
        targets = tl.load(targets_ptr + offs, mask=offs < M, other=ignore_index)
        kept += (targets != ignore_index).to(tl.int32)
    return tl.sum(kept, 0).to(tl.float32)


@triton.jit
def sum_of(losses_ptr, M, BLOCK_M: tl.constexpr):
    """The sum of float32 losses, in a fixed order."""
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, M, BLOCK_M):
        offs = start + tl.arange(0, BLOCK_M)
        total += tl.load(losses_ptr + offs, mask=offs < M, other=0.0, volatile=True)
    return tl.sum(total, 0)


@triton.jit
def _count_kernel(targets_ptr, count_ptr, M, ignore_index, BLOCK_M: tl.constexpr):
    tl.store(count_ptr, count_of(targets_ptr, M, ignore_index, BLOCK_M))


@triton.jit
def _reduce_kernel(losses_ptr, out_ptr, count_ptr, M, BLOCK_M: tl.constexpr):
    loss = sum_of(losses_ptr, M, BLOCK_M)
    if count_ptr is not None:
        loss = loss / tl.load(count_ptr)
    tl.store(out_ptr, loss.to(out_ptr.dtype.element_ty))


@triton.jit
def _scale_kernel(
    x_ptr, out_ptr, factor_ptr, stride_factor, count_ptr, N, length,
    IN_PLACE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr + program * stride_factor).to(tl.float32)
    if count_ptr is not None:
        # Of no rows at all the gradient is zero.
        factor = factor / tl.maximum(tl.load(count_ptr), 1.0)
    if not IN_PLACE or factor != 1.0:
        first = program * length
        for start in range(0, tl.minimum(length, N - first), BLOCK_N):
            offs = start + tl.arange(0, BLOCK_N)
            mask = (offs < length) & (first + offs < N)
            x = tl.load(x_ptr + first + offs, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_ptr + first + offs, (x * factor).to(out_ptr.dtype.element_ty), mask=mask)


def choose_walk(v: int, itemsize: int) -> dict[str, int]:
    """The rule of a kernel that calls `walk` alone."""
    wide = v >= 65536
    unroll = 1 if v <= 1024 else 4
    return {"UNROLL": unroll, "BLOCK_V": 2048 if wide else 1024, "num_warps": 8 if wide else 4}


def choose_row(v: int, itemsize: int, split: bool = False) -> dict[str, int]:
    """The rule of a kernel that calls `gradient_of_row`.

    split: the rows begin between two accesses (`kernels/_triton/row_access.py`).
    """
    warps = 4
    while warps < 32 and chunks_of(v, itemsize, warps) > 16:
        warps *= 2
    if split and (itemsize, warps) == (2, 16):
        # A thread has 98 registers then: one program of 16 warps fits, or two of 8, which take 0.78
        # of the time (docs/lab/cross_entropy.md).
        warps = 8
    # What the tuner found; in between, four ahead take a third longer.
    return {"KEPT": 4, "AHEAD": 2 if (itemsize, warps) == (2, 16) else 4, "num_warps": warps}


def suits_row(candidate: dict[str, int], v: int, itemsize: int, split: bool = False) -> bool:
    """Whether a candidate is no other's double, as without a walk nothing is ahead, and does not
    spill, as eight chunks with 32 warps do."""
    kept, warps = candidate["KEPT"], candidate["num_warps"]
    chunks = chunks_of(v, itemsize, warps)
    if chunks <= 4:
        return (kept, candidate["AHEAD"]) == (4, 4) and (chunks > 1 or warps <= 4)
    return warps >= 8 and (kept < 8 or (chunks <= 8 and warps <= 16))


def chunks_of(v: int, itemsize: int, warps: int) -> int:
    """Into how many chunks, of one access a thread, a row of v logits is divided."""
    return -(-v * itemsize // (32 * warps * ACCESS_BYTES))


def row_plan(v: int, itemsize: int, config: dict[str, int]) -> tuple[int, dict[str, int]]:
    """`walked` of `gradient_of_row`, and its constants by name; the configuration's KEPT is the
    most."""
    warps, ahead = config["num_warps"], config["AHEAD"]
    chunks = chunks_of(v, itemsize, warps)
    kept = min(chunks, config["KEPT"])
    walked = -((kept - chunks) // ahead)
    sizes = {"KEPT": kept, "LANES": 32 * warps, "WIDTH": ACCESS_BYTES // itemsize}
    return walked, {"WALKS": walked > 0, **config, **sizes}


WALK_CONFIGS = tuple(
    {"UNROLL": unroll, "BLOCK_V": 256 * warps, "num_warps": warps}
    for unroll in (1, 2, 4)
    for warps in (4, 8, 16)
)
ROW_CONFIGS = tuple(
    {"KEPT": kept, "AHEAD": ahead, "num_warps": warps}
    for warps in (2, 4, 8, 16, 32)
    for kept, ahead in ((0, 4), (4, 2), (4, 4), (8, 2))
)


def together(first: torch.Tensor, **others: torch.Tensor | None) -> None:
    """All lie on the device of the first; else ValueError names the odd one."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise ValueError(f"{name}: on {tensor.device}, expected {first.device}")


def count_kept(targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """How many targets are not ignored: a float32 scalar on their device."""
    count = targets.new_empty((), dtype=torch.float32)
    _count_kernel[(1,)](
        targets_ptr=targets, count_ptr=count, M=targets.numel(),
        ignore_index=ignore_index, BLOCK_M=8192, num_warps=16,
    )  # fmt: skip
    return count


def reduced(losses: torch.Tensor, count: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The sum of float32 losses in a fixed order, over the count where there is one."""
    out = torch.empty((), dtype=dtype, device=losses.device)
    _reduce_kernel[(1,)](
        losses_ptr=losses, out_ptr=out, count_ptr=count, M=losses.numel(),
        BLOCK_M=8192, num_warps=16,
    )  # fmt: skip
    return out


def kept_for_later(dtype: torch.dtype, reduction: str) -> bool:
    """Whether the division by the count waits for the backward pass.

    In float16 the gradient of a mean would vanish before the factor that loss scaling puts against
    it arrives.
    """
    return reduction == "mean" and dtype == torch.float16


def alone() -> bool:
    """Whether what a graph saves from now on is seen by nobody but the graph. Asked where it is
    made: hooks for saved tensors may hand them to anybody."""
    return not (torch.compiler.is_compiling() or internals.saved_tensors_are_seen())


def scaled(
    x: torch.Tensor,
    factor: torch.Tensor,
    count: torch.Tensor | None = None,
    *,
    unseen: bool,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x times the gradient of the loss, over the count where there is one.

    x: contiguous; factor: a scalar, or one number for each row; unseen: what `alone` said when x
    was saved; dtype: of the result, by default that of x. x itself, unread where the factor is
    one, if nobody sees it and the graph that holds it is used for the last time; else a new tensor.
    """
    dtype = x.dtype if dtype is None else dtype
    # What a graph keeps must stay as it is; a traced graph knows nothing of its use.
    once = unseen and dtype == x.dtype and not torch.compiler.is_compiling()
    return _scaled(x, factor, count, dtype, not once or internals.graph_is_kept())


def _scaled(
    x: torch.Tensor,
    factor: torch.Tensor,
    count: torch.Tensor | None,
    dtype: torch.dtype,
    again: bool,
) -> torch.Tensor:
    out, n = x.new_empty(x.shape, dtype=dtype) if again else x, x.numel()
    if n:
        if factor.dim():
            rows, length = x.shape
        else:
            length = -(-n // (SCALERS * sm_count(x.device) * SCALED)) * SCALED
            rows = -(-n // length)
        _scale_kernel[(rows,)](
            x_ptr=x, out_ptr=out, factor_ptr=factor,
            stride_factor=factor.stride(0) if factor.dim() else 0, count_ptr=count, N=n,
            length=length, IN_PLACE=not again, BLOCK_N=SCALED, num_warps=8,
        )  # fmt: skip
    return out


_scaled = cached_launch(_scaled)
count_kept = cached_launch(count_kept)
reduced = cached_launch(reduced)

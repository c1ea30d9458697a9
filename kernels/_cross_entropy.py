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

from kernels._device import sm_count
from kernels._launch import launch
from kernels._parts import MOST_PARTS, divide, holds_parts, meet

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Longest row, in elements, that programs keep in their registers, and the bytes that each takes.
PARTS_LIMIT = 262144
PART_BYTES = 16384
REDUCTIONS = ("mean", "sum", "none")
# Programs a multiprocessor that pass over a gradient of which all is scaled alike.
SCALERS = 4
# Entries that a program scales at a time.
SCALED = 4096


def reference(logits, targets, ignore_index, label_smoothing, z_loss, reduction):
    top = logits.detach().amax(dim=-1, keepdim=True)
    lse = top[:, 0] + torch.log(torch.exp(logits - top).sum(dim=-1))
    kept = targets != ignore_index
    own = logits.gather(-1, torch.where(kept, targets, 0).long()[:, None])[:, 0]
    loss = lse - (1 - label_smoothing) * own
    if label_smoothing:
        loss = loss - label_smoothing * logits.mean(dim=-1)
    if z_loss:
        loss = loss + z_loss * lse * lse
    loss = torch.where(kept, loss, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / kept.sum() if reduction == "mean" else loss.sum()


def check(
    targets: torch.Tensor,
    rows: int,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> None:
    """ValueError or TypeError for targets that do not fit `rows` rows of `classes` logits, and for
    options out of range. On a CPU the values of the targets are looked at too."""
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets: {targets.dtype}, expected int64 or int32")
    # Words are made only where they are wanted: a traced graph has none for a symbolic size.
    if targets.shape != (rows,):
        raise ValueError(f"targets: shape {tuple(targets.shape)}, expected ({rows},)")
    if classes == 0:
        raise ValueError("logits: 0 classes, expected at least one")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing: {label_smoothing}, expected 0 to 1")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: {reduction!r}, expected one of {REDUCTIONS}")
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
def row_gradient(weights, share, columns, place, V, smoothing, scale):
    """The gradient at some columns of a row; `weights` times `share` is its softmax part."""
    gradient = weights * share - scale * smoothing / V
    return tl.where(columns == place, gradient - scale * (1.0 - smoothing), gradient)


@triton.jit
def gradient_of_part(
    row_ptr, out_ptr, loss_ptr, known_ptr, count_ptr, target, part, V, LENGTH, ignore_index,
    smoothing, z_loss, scale, SMOOTH: tl.constexpr, BLOCK_V: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of LENGTH entries of a row, which may take their place, and with the
    first part the loss of the row. The parts of a row meet at `count_ptr`; see kernels/_parts.py.
    """
    columns = part * LENGTH + tl.arange(0, BLOCK_V)
    inside = columns < tl.minimum(part * LENGTH + LENGTH, V)
    loss = 0.0
    if target == ignore_index:
        zeros = tl.zeros((BLOCK_V,), out_ptr.dtype.element_ty)
        tl.store(out_ptr + columns, zeros, mask=inside)
    else:
        own, place = own_logit(row_ptr, target, V)
        x = tl.load(row_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.max(x, 0)
        # Minus infinity must not be subtracted from itself: a part may have no other value. A
        # whole row of it ends in zero times infinity, NaN.
        base = tl.where(top == -float("inf"), 0.0, top)
        weights = tl.exp2((x - base) * LOG2E)
        total = tl.sum(weights, 0)
        plain = 0.0
        if SMOOTH:
            plain = tl.sum(tl.where(inside, x, 0.0), 0)
        share = 1.0
        row_top = top
        if PARTS > 1:
            parts = tl.arange(0, PARTS)
            tl.store(known_ptr + part, top)
            tl.store(known_ptr + PARTS + part, total)
            if SMOOTH:
                tl.store(known_ptr + 2 * PARTS + part, plain)
            meet(count_ptr, PARTS)
            tops = tl.load(known_ptr + parts, volatile=True)
            totals = tl.load(known_ptr + PARTS + parts, volatile=True)
            row_top = tl.max(tops, 0)
            total = tl.sum(totals * tl.exp2((tops - row_top) * LOG2E), 0)
            share = tl.exp2((top - row_top) * LOG2E)
            if SMOOTH:
                plain = tl.sum(tl.load(known_ptr + 2 * PARTS + parts, volatile=True), 0)
        loss, factor = row_loss(own, row_top, total, plain, V, smoothing, z_loss, SMOOTH)
        share = share / total * factor * scale
        gradient = row_gradient(weights, share, columns, place, V, smoothing, scale)
        tl.store(out_ptr + columns, gradient.to(out_ptr.dtype.element_ty), mask=inside)
    if part == 0:
        tl.store(loss_ptr, loss.to(loss_ptr.dtype.element_ty))


@triton.jit
def gradient_by_walks(
    row_ptr, out_ptr, loss_ptr, target, V, ignore_index, smoothing, z_loss, scale,
    SMOOTH: tl.constexpr, UNROLL: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Writes the loss of a row and its gradient, which may take the place of the row."""
    loss = 0.0
    steps = tl.cdiv(V, UNROLL * BLOCK_V)
    lanes = tl.arange(0, UNROLL)[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    if target == ignore_index:
        zeros = tl.zeros((UNROLL, BLOCK_V), out_ptr.dtype.element_ty)
        for step in range(0, steps):
            columns = step * (UNROLL * BLOCK_V) + lanes
            tl.store(out_ptr + columns, zeros, mask=columns < V)
    else:
        own, place = own_logit(row_ptr, target, V)
        top, total, plain = walk(row_ptr, V, SMOOTH, UNROLL, BLOCK_V)
        loss, factor = row_loss(own, top, total, plain, V, smoothing, z_loss, SMOOTH)
        share = factor * scale / total
        # From the end: what was read last is nearest.
        for step in range(0, steps):
            columns = (steps - 1 - step) * (UNROLL * BLOCK_V) + lanes
            x = tl.load(
                row_ptr + columns, mask=columns < V, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
            weights = tl.exp2((x - top) * LOG2E)
            gradient = row_gradient(weights, share, columns, place, V, smoothing, scale)
            tl.store(out_ptr + columns, gradient.to(out_ptr.dtype.element_ty), mask=columns < V)
    tl.store(loss_ptr, loss.to(loss_ptr.dtype.element_ty))


@triton.jit
def _count_kernel(targets_ptr, count_ptr, M, ignore_index, BLOCK_M: tl.constexpr):
    kept = tl.zeros((BLOCK_M,), tl.int32)
    for start in range(0, M, BLOCK_M):
        offs = start + tl.arange(0, BLOCK_M)
        targets = tl.load(targets_ptr + offs, mask=offs < M, other=ignore_index)
        kept += (targets != ignore_index).to(tl.int32)
    tl.store(count_ptr, tl.sum(kept, 0).to(tl.float32))


@triton.jit
def _reduce_kernel(losses_ptr, out_ptr, count_ptr, M, BLOCK_M: tl.constexpr):
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, M, BLOCK_M):
        offs = start + tl.arange(0, BLOCK_M)
        total += tl.load(losses_ptr + offs, mask=offs < M, other=0.0)
    loss = tl.sum(total, 0)
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


def choose_part(v: int, itemsize: int) -> dict[str, int]:
    """The rule of a kernel that calls `gradient_of_part`."""
    bytes_of_row = triton.next_power_of_2(v) * itemsize
    parts = min(MOST_PARTS, max(1, bytes_of_row // PART_BYTES))
    return {"PARTS": parts, "num_warps": max(2, min(16, bytes_of_row // parts // 2048))}


def suits_part(candidate: dict[str, int], v: int, itemsize: int) -> bool:
    length = triton.next_power_of_2(triton.cdiv(v, candidate["PARTS"]))
    return 8 <= length // (32 * candidate["num_warps"]) <= 64


def choose_walk(v: int, itemsize: int) -> dict[str, int]:
    """The rule of a kernel that calls `walk` alone."""
    if v <= 4096:
        return {"UNROLL": 1, "BLOCK_V": 1024, "num_warps": 4}
    return {"UNROLL": 2, "BLOCK_V": 2048, "num_warps": 8}


def choose_walks(v: int, itemsize: int) -> dict[str, int]:
    """The rule of a kernel that calls `gradient_by_walks`, PROGRAMS on each multiprocessor."""
    return {"PROGRAMS": 2, "UNROLL": 2, "BLOCK_V": 4096, "num_warps": 16}


PART_CONFIGS = tuple(
    {"PARTS": parts, "num_warps": warps}
    for parts in (1, 2, 4, 8, 16, MOST_PARTS)
    for warps in (2, 4, 8, 16, 32)
)
WALK_CONFIGS = tuple(
    {"UNROLL": unroll, "BLOCK_V": 256 * warps, "num_warps": warps}
    for unroll in (1, 2, 4)
    for warps in (4, 8, 16)
)
WALKS_CONFIGS = tuple(
    {"PROGRAMS": programs, "UNROLL": unroll, "BLOCK_V": 256 * warps, "num_warps": warps}
    for programs, warps in ((1, 16), (1, 32), (2, 8), (2, 16), (4, 8))
    for unroll in (2, 4)
)


def in_parts(x: torch.Tensor, v: int) -> bool:
    """Whether the registers of one program, or of several that meet, hold a row of v logits."""
    if choose_part(v, x.element_size())["PARTS"] == 1:
        return True
    return v <= PARTS_LIMIT and holds_parts(x.device)


def parts_of(rows: int, v: int, config: dict[str, int], smoothing: float, device: torch.device):
    """What `kernels._parts.divide` says of rows whose parts meet in `gradient_of_part`."""
    return divide(rows, v, config["PARTS"], 3 if smoothing else 2, device)


def together(first: torch.Tensor, **others: torch.Tensor | None) -> None:
    """All lie on the device of the first; else ValueError names the odd one."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise ValueError(f"{name}: on {tensor.device}, expected {first.device}")


def count_kept(targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """How many targets are not ignored: a float32 scalar on their device."""
    count = torch.empty((), dtype=torch.float32, device=targets.device)
    launch(
        _count_kernel, (1,), targets_ptr=targets, count_ptr=count, M=targets.numel(),
        ignore_index=ignore_index, BLOCK_M=8192, num_warps=16,
    )  # fmt: skip
    return count


def reduced(losses: torch.Tensor, count: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The sum of float32 losses in a fixed order, over the count where there is one."""
    out = torch.empty((), dtype=dtype, device=losses.device)
    launch(
        _reduce_kernel, (1,), losses_ptr=losses, out_ptr=out, count_ptr=count, M=losses.numel(),
        BLOCK_M=8192, num_warps=16,
    )  # fmt: skip
    return out


def kept_for_later(dtype: torch.dtype, reduction: str) -> bool:
    """Whether the division by the count waits for the backward pass.

    In float16 the gradient of a mean would vanish before the factor that loss scaling puts against
    it arrives.
    """
    return reduction == "mean" and dtype == torch.float16


def scaled(
    x: torch.Tensor, factor: torch.Tensor, count: torch.Tensor | None = None
) -> torch.Tensor:
    """x times the gradient of the loss, over the count where there is one.

    x: contiguous; factor: a scalar, or one number for each row. x itself, unread where the
    factor is one, if the graph that holds it is used for the last time; else a new tensor.
    """
    # What a graph keeps must stay as it is; a traced graph knows nothing of its use.
    again = torch.compiler.is_compiling() or _graph_is_kept()
    out = torch.empty_like(x) if again else x
    n = x.numel()
    if n:
        if factor.dim():
            rows, length = x.shape
        else:
            length = triton.cdiv(n, SCALERS * sm_count(x.device) * SCALED) * SCALED
            rows = triton.cdiv(n, length)
        launch(
            _scale_kernel, (rows,), x_ptr=x, out_ptr=out, factor_ptr=factor,
            stride_factor=factor.stride(0) if factor.dim() else 0, count_ptr=count, N=n,
            length=length, IN_PLACE=not again, BLOCK_N=SCALED, num_warps=8,
        )  # fmt: skip
    return out


def _graph_is_kept() -> bool:
    return torch._C._autograd._get_current_graph_task_keep_graph()

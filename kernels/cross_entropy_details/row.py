"""Row operations that both cross entropies share: loss, gradient, count and scaling.

The loss of a row x with target t, smoothing e and z-loss coefficient z is
    lse - (1 - e) x[t] - e mean x + z lse^2,  lse = log sum exp x,
and its gradient p (1 + 2 z lse) - e / V - (1 - e) [j = t], p the softmax of x. A row whose target
is the ignored index has zero loss and gradient. A target outside the row gives NaN for both:
the host would have to wait for the device to raise an error.

With a softcap c, the logits y become x = c tanh(y / c) first, as in Gemma 2, and the gradient has
the factor 1 - (x / c)^2. Kernels have None in the place of no softcap, launchers 0.

Inside the kernels m is the maximum of a row, l the sum of exp(x - m), and sum_x the sum of x.
"""

import math

import torch
import triton
import triton.language as tl

from .._runtime import internals
from .._runtime.call_cache import cached_launch
from .._runtime.checks import (
    check_flag,
    check_integer,
    check_number,
    check_one_of,
    check_tensors,
    shown,
)
from .._runtime.device import sm_count
from .._runtime.layout import ACCESS_BYTES
from .._triton.math import LN2, LOG2E, tanh_of
from .._triton.memory import opaque_zero, to_f32_rematerialized
from .._triton.row_access import body_ptr, peeled_columns_of, vector_body

REDUCTIONS = ("mean", "sum", "none")
# Programs per multiprocessor of the kernel that scales a gradient by one factor.
SCALERS = 4
# Entries that a program scales at a time.
SCALED = 4096


def options_of(
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> tuple[int, float, float, float, str]:
    """The options, numbers as int and float; TypeError or ValueError names a wrong one.

    The softcap of the result is 0 if there is none.
    """
    check_integer("ignore_index", ignore_index, -(2**63), 2**63 - 1)
    label_smoothing = check_number("label_smoothing", label_smoothing, 0, 1)
    z_loss = check_number("z_loss", z_loss)
    cap = 0.0 if softcap is None else check_number("softcap", softcap)
    if softcap is not None and not 0 < cap < math.inf:
        raise ValueError(f"softcap: {cap}, expected a positive number or None")
    check_one_of("reduction", reduction, REDUCTIONS)
    return ignore_index, label_smoothing, z_loss, cap, reduction


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of autocast on the device of x, None where it is not enabled."""
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def dtype_of_loss(
    x: torch.Tensor, loss_dtype: torch.dtype | None, return_z_loss: bool
) -> torch.dtype:
    """Return the dtype of the loss of logits or factors x; check the two options of the result."""
    check_flag("return_z_loss", return_z_loss)
    if loss_dtype is None:
        return x.dtype if autocast_dtype(x) is None else torch.float32
    if not isinstance(loss_dtype, torch.dtype) or loss_dtype not in (x.dtype, torch.float32):
        raise TypeError(
            f"loss_dtype: {shown(loss_dtype)}, expected {x.dtype} as the logits have, or float32"
        )
    return loss_dtype


def as_rows(name: str, x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x of shape `[..., N]` as `[M, N]` and targets `[...]` as `[M]`.

    Raises ValueError if the shape of the targets is another one.
    """
    check_tensors(**{name: x, "targets": targets})
    rows = x.shape[:-1]
    if targets.shape != rows:
        raise ValueError(f"targets: shape {tuple(targets.shape)}, expected {tuple(rows)}")
    if x.dim() == 2:
        return x, targets
    return x.reshape(targets.numel(), x.shape[-1]), targets.reshape(-1)


def check(targets: torch.Tensor, rows: int, classes: int, ignore_index: int) -> None:
    """Raise TypeError or ValueError for targets that do not fit `rows` rows of `classes` logits.

    The values of the targets are checked only on a CPU.
    """
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets: {targets.dtype}, expected int64 or int32")
    # The message is formatted on failure only: a traced graph cannot format a symbolic size.
    if targets.shape != (rows,):
        raise ValueError(f"targets: shape {tuple(targets.shape)}, expected ({rows},)")
    if classes == 0:
        raise ValueError("logits: 0 classes, expected at least one")
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        valid = targets[targets != ignore_index]
        outside = valid[(valid < 0) | (valid >= classes)]
        if outside.numel():
            raise ValueError(f"targets: {outside[0].item()}, expected 0 to {classes - 1}")


@triton.jit
def capped(x, softcap):
    """softcap tanh(x / softcap), or x if softcap is None."""
    if softcap is not None:
        # A traced graph hands floats over as float64.
        softcap = tl.cast(softcap, tl.float32)
        x = softcap * tanh_of(x / softcap, True)
    return x


@triton.jit
def capped_inside(x, inside, softcap):
    """`capped` inside of a row, and minus infinity outside, which x is there."""
    return x if softcap is None else tl.where(inside, capped(x, softcap), -float("inf"))


@triton.jit
def _loop_columns(
    row_ptr, V, m, l, sum_x, softcap,
    SMOOTH: tl.constexpr, UNROLL: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """m, l and sum_x of V columns, joined with the m, l and sum_x [BLOCK_V] of the lanes so far."""
    lanes = tl.arange(0, UNROLL)[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    for start in range(0, V, UNROLL * BLOCK_V):
        cols = start + lanes  # [UNROLL, BLOCK_V]
        x = tl.load(
            row_ptr + cols, mask=cols < V, other=-float("inf"), eviction_policy="evict_last"
        ).to(tl.float32)
        x = capped_inside(x, cols < V, softcap)
        new_m = tl.maximum(m, tl.max(x, 0))
        # A lane that has seen only minus infinity must not subtract it from itself.
        m_safe = tl.where(new_m == -float("inf"), 0.0, new_m)
        numerators = tl.exp2((x - m_safe[None, :]) * LOG2E)
        l = l * tl.exp2((m - m_safe) * LOG2E) + tl.sum(numerators, 0)
        if SMOOTH:
            sum_x += tl.sum(tl.where(cols < V, x, 0.0), 0)
        m = new_m
    row_m = tl.max(m, 0)
    row_l = tl.sum(l * tl.exp2((m - row_m) * LOG2E), 0)
    return row_m, row_l, tl.sum(sum_x, 0)


@triton.jit
def loop_row(
    row_ptr, V, softcap, SMOOTH: tl.constexpr, UNROLL: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """m, l and sum_x (zero unless SMOOTH) of a row, in one pass that takes UNROLL blocks a step."""
    m = tl.full((BLOCK_V,), -float("inf"), tl.float32)
    l = tl.zeros((BLOCK_V,), tl.float32)
    sum_x = tl.zeros((BLOCK_V,), tl.float32)
    return _loop_columns(row_ptr, V, m, l, sum_x, softcap, SMOOTH, UNROLL, BLOCK_V)


@triton.jit
def load_peeled(row_ptr, lead, width, V, softcap, LANES: tl.constexpr):
    """The peeled elements of a row (`_triton/row_access.py`) in the first of LANES lanes.

    Returns columns, mask, capped logits, and of each lane l and sum_x. The logits are the m of
    their lanes.
    """
    peel_cols, peel_mask = peeled_columns_of(tl.arange(0, LANES), lead, width, V)
    x = tl.load(row_ptr + peel_cols, mask=peel_mask, other=-float("inf")).to(tl.float32)
    x = capped_inside(x, peel_mask, softcap)
    l = tl.exp2(x - tl.where(x == -float("inf"), 0.0, x))
    return peel_cols, peel_mask, x, l, tl.where(peel_mask, x, 0.0)


@triton.jit
def loop_split_row(
    row_ptr, V, softcap, SMOOTH: tl.constexpr, UNROLL: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """`loop_row` for a row that begins at any element: its peeled elements come first."""
    lead, width = vector_body(row_ptr, V)
    _, _, m, l, sum_x = load_peeled(row_ptr, lead, width, V, softcap, BLOCK_V)
    return _loop_columns(
        body_ptr(row_ptr, lead), width, m, l, sum_x, softcap, SMOOTH, UNROLL, BLOCK_V
    )


@triton.jit
def target_logit(row_ptr, target, V, softcap):
    """The capped logit of the target and the target as int32: NaN and -1 if it is out of range."""
    inside = (target >= 0) & (target < V)
    x_target = tl.load(row_ptr + target, mask=inside, other=float("nan")).to(tl.float32)
    return capped(x_target, softcap), tl.where(inside, target, -1).to(tl.int32)


@triton.jit
def row_loss(x_target, m, l, sum_x, V, smoothing, z_loss, SMOOTH: tl.constexpr):
    """The loss of a row, its part z lse^2, and the factor 1 + 2 z lse of the gradient's softmax.

    The first and the last are NaN if the target is out of range.
    """
    rest = tl.log2(l) * LN2
    # Differences to the maximum first: the loss may be small where both its terms are large.
    loss = rest + (1.0 - smoothing) * (m - x_target)
    if SMOOTH:
        loss += smoothing * (m - sum_x / V)
    lse = m + rest
    factor = tl.where(x_target == x_target, 1.0 + 2.0 * z_loss * lse, x_target)
    penalty = z_loss * lse * lse
    return loss + penalty, penalty, factor


@triton.jit
def columns_of(step, LANES: tl.constexpr, VEC: tl.constexpr):
    """The columns of a chunk of a row, VEC to a thread: [LANES, VEC]."""
    lanes = tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    return step * (LANES * VEC) + lanes


@triton.jit
def load_chunk(row_ptr, step, V, POLICY: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """A chunk [LANES, VEC] of a row in its dtype, minus infinity past the end."""
    columns = columns_of(step, LANES, VEC)
    return tl.load(row_ptr + columns, mask=columns < V, other=-float("inf"), eviction_policy=POLICY)


@triton.jit
def online_update(x, step, m, l, sum_x, V, softcap, SMOOTH: tl.constexpr):
    """m, l and sum_x of each lane, updated with the chunk x [LANES, VEC] of uncapped logits."""
    if softcap is not None:
        x = capped_inside(x, columns_of(step, x.shape[0], x.shape[1]) < V, softcap)
    new_m = tl.maximum(m, tl.max(x, 1))
    # A lane that has seen only minus infinity must not subtract it from itself.
    m_safe = tl.where(new_m == -float("inf"), 0.0, new_m)
    numerators = tl.exp2((x - m_safe[:, None]) * LOG2E)
    l = l * tl.exp2((m - m_safe) * LOG2E) + tl.sum(numerators, 1)
    if SMOOTH:
        inside = columns_of(step, x.shape[0], x.shape[1]) < V
        sum_x += tl.sum(tl.where(inside, x, 0.0), 1)
    return new_m, l, sum_x


@triton.jit
def gradient_at(
    columns, x, m, reciprocal, target_col, V, smoothing, scale, softcap, SMOOTH: tl.constexpr
):  # fmt: skip
    """The gradient of the logits in these columns; x: the capped ones.

    reciprocal: factor of exp(x - m) that makes it the softmax part. target_col: column of the
    target, or -1.
    """
    gradient = tl.exp2((x - m) * LOG2E) * reciprocal
    if SMOOTH:
        gradient -= scale * smoothing / V
    gradient = tl.where(columns == target_col, gradient - scale * (1.0 - smoothing), gradient)
    if softcap is not None:
        tanh = x / tl.cast(softcap, tl.float32)
        gradient *= 1.0 - tanh * tanh
    return gradient


@triton.jit
def store_grad_chunk(
    out_ptr, x, step, m, reciprocal, target_col, end, V, smoothing, scale, softcap,
    SMOOTH: tl.constexpr,
):  # fmt: skip
    """Store `gradient_at` for chunk number `step` of logits x, up to the column `end`."""
    columns = columns_of(step, x.shape[0], x.shape[1])
    gradient = gradient_at(
        columns, capped(x, softcap), m, reciprocal, target_col, V, smoothing, scale, softcap, SMOOTH
    )
    gradient = gradient.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + columns, gradient, mask=columns < end, eviction_policy="evict_first")


@triton.jit
def store_grad_peeled(
    out_ptr, peel_cols, peel_mask, x, m, reciprocal, target_col, V, smoothing, scale, softcap,
    SMOOTH: tl.constexpr,
):  # fmt: skip
    """Store `gradient_at` for the peeled elements of a row; x: the capped logits."""
    gradient = gradient_at(
        peel_cols, x, m, reciprocal, target_col, V, smoothing, scale, softcap, SMOOTH
    )
    tl.store(out_ptr + peel_cols, gradient.to(out_ptr.dtype.element_ty), mask=peel_mask)


@triton.jit
def gradient_of_row(
    row_ptr, out_ptr, loss_ptr, z_loss_ptr, target, V, num_looped, ignore_index, smoothing, z_loss,
    scale, softcap,
    SMOOTH: tl.constexpr, LOOPS: tl.constexpr, REG_CHUNKS: tl.constexpr, PREFETCH: tl.constexpr,
    LANES: tl.constexpr, VEC: tl.constexpr, PEELED: tl.constexpr = False,
):  # fmt: skip
    """Store the loss of a row and its gradient, which may overwrite the row.

    Unless z_loss_ptr is None, the z-loss alone is stored too.

    The row is head chunks and then REG_CHUNKS chunks, each [LANES, VEC]. The head, num_looped times
    PREFETCH chunks, is read twice. The REG_CHUNKS chunks are read once: they stay in registers in
    the dtype of the logits and are converted to float32 for each use. LOOPS: num_looped > 0.
    PEELED: the row is peeled as in `_triton/row_access.py`, and chunks cover its body.
    """
    loss = 0.0
    penalty = 0.0
    head = num_looped * PREFETCH
    width = V
    begin_ptr, begin_out_ptr = row_ptr, out_ptr
    if PEELED:
        lead, width = vector_body(row_ptr, V)
        row_ptr, out_ptr = body_ptr(row_ptr, lead), body_ptr(out_ptr, lead)
    if target == ignore_index:
        zeros = tl.zeros((LANES, VEC), out_ptr.dtype.element_ty)
        for step in range(0, head + REG_CHUNKS):
            columns = columns_of(step, LANES, VEC)
            tl.store(out_ptr + columns, zeros, mask=columns < width)
        if PEELED:
            peel_cols, peel_mask = peeled_columns_of(tl.arange(0, LANES), lead, width, V)
            tl.store(begin_out_ptr + peel_cols, 0.0, mask=peel_mask)
    else:
        x_target, target_col = target_logit(begin_ptr, target, V, softcap)
        m = tl.full((LANES,), -float("inf"), tl.float32)
        l = tl.zeros((LANES,), tl.float32)
        sum_x = tl.zeros((LANES,), tl.float32)
        body_target_col = target_col
        if PEELED:
            peel_cols, peel_mask, peel, l, sum_x = load_peeled(
                begin_ptr, lead, width, V, softcap, LANES
            )
            m = peel
            body_target_col = target_col - lead
        in_registers = ()
        for chunk in tl.static_range(REG_CHUNKS):
            packed = load_chunk(row_ptr, head + chunk, width, "evict_first", LANES, VEC)
            in_registers = in_registers + (packed,)  # noqa: RUF005
        if LOOPS:
            for group in range(0, num_looped):
                prefetched = ()
                for one in tl.static_range(PREFETCH):
                    packed = load_chunk(
                        row_ptr, group * PREFETCH + one, width, "evict_last", LANES, VEC
                    )
                    prefetched = prefetched + (packed,)  # noqa: RUF005
                for one in tl.static_range(PREFETCH):
                    x = prefetched[one].to(tl.float32)
                    m, l, sum_x = online_update(
                        x, group * PREFETCH + one, m, l, sum_x, width, softcap, SMOOTH
                    )
        for chunk in tl.static_range(REG_CHUNKS):
            x = in_registers[chunk].to(tl.float32)
            m, l, sum_x = online_update(x, head + chunk, m, l, sum_x, width, softcap, SMOOTH)
        row_m = tl.max(m, 0)
        l = tl.sum(l * tl.exp2((m - row_m) * LOG2E), 0)
        loss, penalty, factor = row_loss(
            x_target, row_m, l, tl.sum(sum_x, 0), V, smoothing, z_loss, SMOOTH
        )
        reciprocal = factor * scale / l
        if PEELED:
            store_grad_peeled(
                begin_out_ptr,
                peel_cols,
                peel_mask,
                peel,
                row_m,
                reciprocal,
                target_col,
                V,
                smoothing,
                scale,
                softcap,
                SMOOTH,
            )
        zero = opaque_zero(reciprocal)
        for chunk in tl.static_range(REG_CHUNKS):
            x = to_f32_rematerialized(in_registers[chunk], zero)
            store_grad_chunk(
                out_ptr,
                x,
                head + chunk,
                row_m,
                reciprocal,
                body_target_col,
                width,
                V,
                smoothing,
                scale,
                softcap,
                SMOOTH,
            )
        if LOOPS:
            # From the end: the chunks that were read last are still in the cache.
            for back in range(0, num_looped):
                last = head - 1 - back * PREFETCH
                prefetched = ()
                for one in tl.static_range(PREFETCH):
                    packed = load_chunk(row_ptr, last - one, width, "evict_first", LANES, VEC)
                    prefetched = prefetched + (packed,)  # noqa: RUF005
                for one in tl.static_range(PREFETCH):
                    x = prefetched[one].to(tl.float32)
                    store_grad_chunk(
                        out_ptr,
                        x,
                        last - one,
                        row_m,
                        reciprocal,
                        body_target_col,
                        width,
                        V,
                        smoothing,
                        scale,
                        softcap,
                        SMOOTH,
                    )
    tl.store(loss_ptr, loss.to(loss_ptr.dtype.element_ty))
    if z_loss_ptr is not None:
        tl.store(z_loss_ptr, penalty.to(z_loss_ptr.dtype.element_ty))


@triton.jit
def count_valid_targets(targets_ptr, M, ignore_index, BLOCK_M: tl.constexpr):
    """The number of targets that are not ignored, float32."""
    n_valid = tl.zeros((BLOCK_M,), tl.int32)
    for start in range(0, M, BLOCK_M):
        offs = start + tl.arange(0, BLOCK_M)
        targets = tl.load(targets_ptr + offs, mask=offs < M, other=ignore_index)
        n_valid += (targets != ignore_index).to(tl.int32)
    return tl.sum(n_valid, 0).to(tl.float32)


@triton.jit
def sum_losses(losses_ptr, M, BLOCK_M: tl.constexpr):
    """The sum of M float32 losses, in a fixed order."""
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, M, BLOCK_M):
        offs = start + tl.arange(0, BLOCK_M)
        total += tl.load(losses_ptr + offs, mask=offs < M, other=0.0, volatile=True)
    return tl.sum(total, 0)


@triton.jit
def _count_kernel(targets_ptr, n_valid_ptr, M, ignore_index, BLOCK_M: tl.constexpr):
    """n_valid = number of targets other than ignore_index.

    Grid: one program. Reads targets [M], contiguous; writes n_valid, a float32 scalar. BLOCK_M:
    targets a step, a power of two.
    """
    tl.store(n_valid_ptr, count_valid_targets(targets_ptr, M, ignore_index, BLOCK_M))


@triton.jit
def _reduce_kernel(losses_ptr, out_ptr, n_valid_ptr, M, BLOCK_M: tl.constexpr):
    """out = sum(losses), divided by n_valid if there is one.

    Grid: one program, so the order of the sum is fixed. Reads losses float32 [M]; writes the scalar
    out. BLOCK_M: losses a step, a power of two.
    """
    loss = sum_losses(losses_ptr, M, BLOCK_M)
    if n_valid_ptr is not None:
        loss = loss / tl.load(n_valid_ptr)
    tl.store(out_ptr, loss.to(out_ptr.dtype.element_ty))


@triton.jit
def _scale_kernel(
    x_ptr, out_ptr, factor_ptr, stride_factor, n_valid_ptr, N, length,
    IN_PLACE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = x * factor, over n_valid if there is one.

    Grid: one program for `length` elements of x, N in all. A factor per row has a program per row
    and `length` = V; a scalar has stride_factor 0. IN_PLACE: x lies in out, x_ptr is None, and a
    factor of one reads and writes nothing. BLOCK_N: elements a step, a power of two.
    """
    if IN_PLACE:
        x_ptr = out_ptr
    program = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr + program * stride_factor).to(tl.float32)
    if n_valid_ptr is not None:
        # The gradient of a mean over no rows is zero, not NaN.
        factor = factor / tl.maximum(tl.load(n_valid_ptr), 1.0)
    if not IN_PLACE or factor != 1.0:
        first = program * length
        for start in range(0, tl.minimum(length, N - first), BLOCK_N):
            offs = start + tl.arange(0, BLOCK_N)
            mask = (offs < length) & (first + offs < N)
            x = tl.load(x_ptr + first + offs, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_ptr + first + offs, (x * factor).to(out_ptr.dtype.element_ty), mask=mask)


def choose_loop(v: int, itemsize: int) -> dict[str, int]:
    """The default configuration of a kernel that calls `loop_row` alone."""
    wide = v >= 65536
    unroll = 1 if v <= 1024 else 4
    return {"UNROLL": unroll, "BLOCK_V": 2048 if wide else 1024, "num_warps": 8 if wide else 4}


def choose_row(v: int, itemsize: int, peeled: bool = False) -> dict[str, int]:
    """The default configuration of a kernel that calls `gradient_of_row`.

    peeled: the rows begin between two accesses (`kernels/_triton/row_access.py`).
    """
    warps = 4
    while warps < 32 and chunks_of(v, itemsize, warps) > 16:
        warps *= 2
    if peeled and (itemsize, warps) == (2, 16):
        # A thread has 98 registers then: one program of 16 warps fits, or two of 8, which take 0.78
        # of the time (docs/lab/cross_entropy.md).
        warps = 8
    # The tuner found these: in between, four chunks ahead take a third longer.
    return {
        "REG_CHUNKS": 4,
        "PREFETCH": 2 if (itemsize, warps) == (2, 16) else 4,
        "num_warps": warps,
    }


def suits_row(candidate: dict[str, int], v: int, itemsize: int, peeled: bool = False) -> bool:
    """Return whether a candidate is distinct and does not spill.

    Without a loop PREFETCH has no effect. Eight chunks with 32 warps spill.
    """
    in_registers, warps = candidate["REG_CHUNKS"], candidate["num_warps"]
    chunks = chunks_of(v, itemsize, warps)
    if chunks <= 4:
        return (in_registers, candidate["PREFETCH"]) == (4, 4) and (chunks > 1 or warps <= 4)
    return warps >= 8 and (in_registers < 8 or (chunks <= 8 and warps <= 16))


def chunks_of(v: int, itemsize: int, warps: int) -> int:
    """Return the number of chunks, of one access a thread, of a row of v logits."""
    return -(-v * itemsize // (32 * warps * ACCESS_BYTES))


def chunk_split(v: int, itemsize: int, config: dict[str, int]) -> tuple[int, dict[str, int]]:
    """Return num_looped and the constants of `gradient_of_row`.

    The REG_CHUNKS of the configuration is an upper bound.
    """
    warps, prefetched = config["num_warps"], config["PREFETCH"]
    chunks = chunks_of(v, itemsize, warps)
    in_registers = min(chunks, config["REG_CHUNKS"])
    num_looped = -((in_registers - chunks) // prefetched)
    sizes = {"REG_CHUNKS": in_registers, "LANES": 32 * warps, "VEC": ACCESS_BYTES // itemsize}
    return num_looped, {"LOOPS": num_looped > 0, **config, **sizes}


LOOP_CONFIGS = tuple(
    {"UNROLL": unroll, "BLOCK_V": 256 * warps, "num_warps": warps}
    for unroll in (1, 2, 4)
    for warps in (4, 8, 16)
)
ROW_CONFIGS = tuple(
    {"REG_CHUNKS": in_registers, "PREFETCH": prefetched, "num_warps": warps}
    for warps in (2, 4, 8, 16, 32)
    for in_registers, prefetched in ((0, 4), (4, 2), (4, 4), (8, 2))
)


def count_valid(targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return the number of targets that are not ignored: a float32 scalar on their device."""
    count = targets.new_empty((), dtype=torch.float32)
    _count_kernel[(1,)](
        targets_ptr=targets, n_valid_ptr=count, M=targets.numel(),
        ignore_index=ignore_index, BLOCK_M=8192, num_warps=16,
    )  # fmt: skip
    return count


def reduced(losses: torch.Tensor, count: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of float32 losses in a fixed order, over the count if there is one."""
    out = torch.empty((), dtype=dtype, device=losses.device)
    _reduce_kernel[(1,)](
        losses_ptr=losses, out_ptr=out, n_valid_ptr=count, M=losses.numel(),
        BLOCK_M=8192, num_warps=16,
    )  # fmt: skip
    return out


def reduced_penalty(
    penalties: torch.Tensor | None,
    targets: torch.Tensor,
    ignore_index: int,
    reduction: str,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Return the z-losses [M] of rows, reduced as the losses are; None stays."""
    if penalties is None or reduction == "none":
        return penalties
    count = count_valid(targets, ignore_index) if reduction == "mean" else None
    return reduced(penalties, count, dtype)


def with_penalty(
    loss: torch.Tensor, penalty: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and the z-loss alone unless it is None.

    An autograd function may not return None beside it, because a traced graph cannot.
    """
    return loss if penalty is None else (loss, penalty)


def in_shape(
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor], shape: torch.Size
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the result of `with_penalty`; losses of rows get the shape of their targets."""
    if isinstance(result, tuple):
        return tuple(in_shape(each, shape) for each in result)
    return result.view(shape) if result.dim() and result.shape != shape else result


def defers_mean(dtype: torch.dtype, reduction: str) -> bool:
    """Return whether the division by the count waits for the backward pass.

    In float16 the gradient of a mean could underflow before loss scaling multiplies it.
    """
    return reduction == "mean" and dtype == torch.float16


def alone() -> bool:
    """Return whether only the graph will see the tensors that it saves from now on.

    Ask while the graph is made: hooks for saved tensors may hand them to other code.
    """
    return not (torch.compiler.is_compiling() or internals.saved_tensors_are_seen())


def scaled(
    x: torch.Tensor,
    factor: torch.Tensor,
    count: torch.Tensor | None = None,
    *,
    unseen: bool,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return x times the gradient of the loss, over the count if there is one.

    x is scaled in place if only the graph sees it and the graph is not used again; a factor of one
    then costs nothing. Otherwise the result is a new tensor.

    x: contiguous. factor: a scalar, or one number for each row. unseen: the result of `alone` when
    x was saved. dtype: that of the result, by default that of x.
    """
    dtype = x.dtype if dtype is None else dtype
    # A kept graph needs x unchanged; a traced graph cannot tell whether it is kept.
    once = unseen and dtype == x.dtype and not torch.compiler.is_compiling()
    return _scaled(x, factor, count, dtype, not once or internals.graph_is_kept())


def scale_rows(x: torch.Tensor, factors: torch.Tensor) -> None:
    """Multiply each row of x [M, V], contiguous, by its factor of [M], in place."""
    _scaled(x, factors, None, x.dtype, False)


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
            x_ptr=x if again else None, out_ptr=out, factor_ptr=factor,
            stride_factor=factor.stride(0) if factor.dim() else 0, n_valid_ptr=count, N=n,
            length=length, IN_PLACE=not again, BLOCK_N=SCALED, num_warps=8,
        )  # fmt: skip
    return out


_scaled = cached_launch(_scaled)
count_valid = cached_launch(count_valid)
reduced = cached_launch(reduced)

"""Row operations that both cross entropies share: the loss of a row and its gradient.

The loss of a row x with target t, smoothing e and z-loss coefficient z is
    lse - (1 - e) x[t] - e mean x + z lse^2,  lse = log sum exp x,
and its gradient p (1 + 2 z lse) - e / V - (1 - e) [j = t], p the softmax of x. A row whose target
is the ignored index has zero loss and gradient. A target outside the row gives NaN for both:
the host would have to wait for the device to raise an error.

With a softcap c, the logits y become x = c tanh(y / c) first, as in Gemma 2, and the gradient has
the factor 1 - (x / c)^2. Kernels have None in the place of no softcap, launchers 0.

Inside the kernels m is the maximum of a row, l the sum of exp(x - m), and sum_x the sum of x.
"""

import triton
import triton.language as tl

from .._runtime.layout import ACCESS_BYTES
from .._triton.math import LN2, LOG2E, tanh_of
from .._triton.memory import opaque_zero, to_f32_rematerialized
from .._triton.row_access import body_ptr, peeled_columns_of, vector_body


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

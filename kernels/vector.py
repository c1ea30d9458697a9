"""Element-wise vector operations and the dot product.

scale: out = alpha x. add, mul, maximum, minimum: out = x ∘ y. dot: out = sum of x y. The gradients
follow from g, the gradient of the result. scale: alpha g. add: g for both. mul and dot: y g and
x g; dot has a single g. The gradients of maximum and minimum: g goes to the input that was taken,
half of it to each of two equals. Two bits an element record the choice
(`elementwise_details/min_max.py`).

All wait for memory at half a FLOP a byte or less (`ops/vector.py` counts both). The kernels only
have to keep enough 16-byte accesses in flight. The dot product follows Harris, "Optimizing parallel
reduction in CUDA" (2007). Programs sum in float32, and their partial sums are added in a fixed
order, so the result is the same in each run. The program that finishes last adds them, as in
NVIDIA's threadFenceReduction sample, which saves the second launch.
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import check_floating, check_floating_pair, check_number
from ._runtime.configs import Configs
from ._triton.arrival_counter import arrival_counter
from .elementwise_details.blocks import (
    block_is_full,
    block_offsets,
    length,
    map_tiles,
    store_by,
    store_once,
    tiles,
)
from .elementwise_details.min_max import min_max_bwd, min_max_configs, min_max_fwd

ACCUMULATES = {"dot": "float32"}


def scale(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return alpha times x, multiplied in float32.

    Args:
        x: any shape; float32, float16 or bfloat16.
        alpha: the factor, a real number.

    Returns:
        A new tensor with the shape and dtype of x. It is differentiable once in x.

    Raises:
        TypeError: x is no tensor or has another dtype, or alpha is no number.
        ValueError: x is not on a GPU.

    Source:
        `scal` of the BLAS: Lawson et al., "Basic linear algebra subprograms" (1979).

    Example:
        >>> x = torch.ones(2, 3, device="cuda")
        >>> scale(x, 2.0).shape
        torch.Size([2, 3])
    """
    alpha = check_number("alpha", alpha)
    return _Scale.apply(x, alpha) if needs_grad(x) else scale_fwd(x, alpha)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x + y, element by element, computed in float32.

    Args:
        x: any shape; float32, float16 or bfloat16.
        y: as x, with its shape, dtype and device.

    Returns:
        A new tensor with the shape and dtype of x. It is differentiable any number of times in x
        and y.

    Raises:
        TypeError: x or y is no tensor, or has another dtype.
        ValueError: y has another shape or device than x, or a tensor is not on a GPU.

    Source:
        The definition; see `torch.add`.

    Example:
        >>> x, y = torch.ones(2, 3, device="cuda"), torch.zeros(2, 3, device="cuda")
        >>> add(x, y).shape
        torch.Size([2, 3])
    """
    return _Add.apply(x, y) if needs_grad(x, y) else vector_fwd("add", x, y)


def mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x times y, element by element, computed in float32.

    Args:
        x: any shape; float32, float16 or bfloat16.
        y: as x, with its shape, dtype and device.

    Returns:
        A new tensor with the shape and dtype of x. It is differentiable once in x and y.

    Raises:
        TypeError: x or y is no tensor, or has another dtype.
        ValueError: y has another shape or device than x, or a tensor is not on a GPU.

    Source:
        The definition; see `torch.mul`.

    Example:
        >>> x, y = torch.ones(2, 3, device="cuda"), torch.zeros(2, 3, device="cuda")
        >>> mul(x, y).shape
        torch.Size([2, 3])
    """
    return _Mul.apply(x, y) if needs_grad(x, y) else vector_fwd("mul", x, y)


def maximum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the greater of x and y, element by element; NaN if either is NaN.

    Args:
        x: any shape; float32, float16 or bfloat16.
        y: as x, with its shape, dtype and device.

    Returns:
        A new tensor with the shape and dtype of x. It is differentiable once in x and y.
        Two equals get half of the gradient each.

    Raises:
        TypeError: x or y is no tensor, or has another dtype.
        ValueError: y has another shape or device than x, or a tensor is not on a GPU.

    Source:
        The definition; see `torch.maximum`.

    Example:
        >>> x, y = torch.ones(2, 3, device="cuda"), torch.zeros(2, 3, device="cuda")
        >>> maximum(x, y).shape
        torch.Size([2, 3])
    """
    return _min_max("maximum", x, y)


def minimum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the smaller of x and y, element by element; NaN if either is NaN.

    Args:
        x: any shape; float32, float16 or bfloat16.
        y: as x, with its shape, dtype and device.

    Returns:
        A new tensor with the shape and dtype of x. It is differentiable once in x and y.
        Two equals get half of the gradient each.

    Raises:
        TypeError: x or y is no tensor, or has another dtype.
        ValueError: y has another shape or device than x, or a tensor is not on a GPU.

    Source:
        The definition; see `torch.minimum`.

    Example:
        >>> x, y = torch.ones(2, 3, device="cuda"), torch.zeros(2, 3, device="cuda")
        >>> minimum(x, y).shape
        torch.Size([2, 3])
    """
    return _min_max("minimum", x, y)


def dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the sum of the products of x and y, added in float32 in a fixed order.

    Args:
        x: any shape; float32, float16 or bfloat16.
        y: as x, with its shape, dtype and device.

    Returns:
        A tensor without dimensions, in the dtype of x. It is differentiable once in x and y.

    Raises:
        TypeError: x or y is no tensor, or has another dtype.
        ValueError: y has another shape or device than x, or a tensor is not on a GPU.

    Source:
        Harris, "Optimizing parallel reduction in CUDA" (2007).

    Example:
        >>> x, y = torch.ones(2, 3, device="cuda"), torch.zeros(2, 3, device="cuda")
        >>> dot(x, y).shape
        torch.Size([])
    """
    return _Dot.apply(x, y) if needs_grad(x, y) else dot_fwd(x, y)


def _min_max(op: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if needs_grad(x, y):
        return _MinMax.apply(x, y, op)
    return min_max_fwd(MIN_MAX, op, x, y, False)[0]


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return scale_fwd(x, alpha)

    @staticmethod
    @once
    def backward(ctx, grad):
        return scale_fwd(grad, ctx.alpha), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return vector_fwd("add", x, y)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


class _Mul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return vector_fwd("mul", x, y)

    @staticmethod
    @once
    def backward(ctx, grad):
        return vector_bwd("mul", *ctx.saved_tensors, grad, ctx.needs_input_grad)


class _MinMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, op):
        out, flags = min_max_fwd(MIN_MAX, op, x, y, save_flags=True)
        ctx.save_for_backward(flags)
        return out

    @staticmethod
    @once
    def backward(ctx, grad):
        (flags,) = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        return *min_max_bwd(MIN_MAX_BACKWARD, flags, grad, wanted), None


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return dot_fwd(x, y)

    @staticmethod
    @once
    def backward(ctx, grad):
        return vector_bwd("dot", *ctx.saved_tensors, grad, ctx.needs_input_grad)


def scale_fwd(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return alpha x; raise TypeError if x is not floating."""
    check_floating(x=x)
    x = x.contiguous()
    return _forward("scale", x, x, alpha)


def vector_fwd(op: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x ∘ y, which the op names: "add" or "mul".

    Raise TypeError or ValueError if x and y differ in dtype, shape or device.
    """
    check_floating_pair(x, y)
    return _forward(op, x.contiguous(), y.contiguous(), 1.0)


def _forward(op: str, x: torch.Tensor, y: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return alpha x or x ∘ y for contiguous tensors of one shape; "scale" does not read y."""
    out, n = torch.empty_like(x), x.numel()
    if n:
        config, policy = map_tiles(FORWARD, x, light=op == "scale")
        _forward_kernel[(-(-n // config["BLOCK_N"]),)](
            x_ptr=x, y_ptr=y, out_ptr=out, N=length(n, config), alpha=alpha, OP=op,
            POLICY=policy, **config,
        )  # fmt: skip
    return out


def vector_bwd(
    op: str, x: torch.Tensor, y: torch.Tensor, grad: torch.Tensor, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return dx and dy of "mul" or "dot", each None if it is not wanted.

    grad: the gradient of the result, without dimensions for "dot".
    """
    x, y, grad = x.contiguous(), y.contiguous(), grad.contiguous()
    dx = torch.empty_like(x) if wanted[0] else None
    dy = torch.empty_like(y) if wanted[1] else None
    n = x.numel()
    if n:
        tensors = 4 if op == "dot" else 5
        config = BACKWARD.pick(x.device, n=n, itemsize=x.element_size(), tensors=tensors)
        _backward_kernel[(-(-n // config["BLOCK_N"]),)](
            x_ptr=x, y_ptr=y, grad_ptr=grad, dx_ptr=dx, dy_ptr=dy, N=length(n, config), OP=op,
            **config,
        )  # fmt: skip
    return dx, dy


def dot_fwd(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the dot product, a tensor without dimensions.

    Raise TypeError or ValueError if x and y differ in dtype, shape or device.
    """
    check_floating_pair(x, y)
    x, y, n = x.contiguous(), y.contiguous(), x.numel()
    config = DOT_TILES.pick(x.device, n=n, itemsize=x.element_size())
    programs = max(1, -(-n // (config["BLOCK_N"] * config["STEPS"])))
    partial, out = x.new_empty(programs, dtype=torch.float32), x.new_empty(())
    _dot_kernel[(programs,)](
        x_ptr=x, y_ptr=y, partial_ptr=partial, counter_ptr=arrival_counter(x.device), out_ptr=out,
        N=n, POLICY="evict_first" if 2 * n * x.element_size() <= EVICT_FIRST_BYTES else "",
        BLOCK_P=min(MOST_PARTIALS, 1 << (programs - 1).bit_length()), **config,
    )  # fmt: skip
    return out


@triton.jit
def _forward_kernel(
    x_ptr, y_ptr, out_ptr, N, alpha,
    OP: tl.constexpr, POLICY: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = alpha x (OP "scale"), x + y ("add") or x y ("mul"), computed in float32.

    Grid: cdiv(n, BLOCK_N) for n elements. A program owns BLOCK_N elements. It reads x, and y unless
    OP is "scale", and writes out. N: n, or None if BLOCK_N divides n. alpha: read for "scale" only.
    POLICY: cache modifier of the stores. BLOCK_N: a power of two.
    """
    offs = block_offsets(BLOCK_N)
    if N is None or block_is_full(N, BLOCK_N):
        _forward_block(x_ptr, y_ptr, out_ptr, offs, None, alpha, OP, POLICY)
    else:
        _forward_block(x_ptr, y_ptr, out_ptr, offs, offs < N, alpha, OP, POLICY)


@triton.jit
def _forward_block(
    x_ptr, y_ptr, out_ptr, offs, mask, alpha, OP: tl.constexpr, POLICY: tl.constexpr
):  # fmt: skip
    """Compute and store a block of the result."""
    x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=mask).to(tl.float32) if OP != "scale" else x
    store_by(out_ptr + offs, _combined(x, y, alpha, OP), mask, POLICY)


@triton.jit
def _combined(x, y, alpha, OP: tl.constexpr):
    """Return alpha x, x + y or x y."""
    if OP == "scale":
        # A traced graph hands floats over as float64.
        return x * tl.cast(alpha, tl.float32)
    elif OP == "add":
        return x + y
    else:
        return x * y


@triton.jit
def _backward_kernel(
    x_ptr, y_ptr, grad_ptr, dx_ptr, dy_ptr, N, OP: tl.constexpr, BLOCK_N: tl.constexpr
):
    """dx = y g and dy = x g, computed in float32; one g for all elements if OP is "dot".

    Grid: cdiv(n, BLOCK_N) for n elements. A program owns BLOCK_N elements. It reads x, y and g, and
    writes dx and dy; a pointer that is None is not written. N: n, or None if BLOCK_N divides n.
    OP: "mul" or "dot". BLOCK_N: a power of two.
    """
    offs = block_offsets(BLOCK_N)
    if N is None or block_is_full(N, BLOCK_N):
        _backward_block(x_ptr, y_ptr, grad_ptr, dx_ptr, dy_ptr, offs, None, OP)
    else:
        _backward_block(x_ptr, y_ptr, grad_ptr, dx_ptr, dy_ptr, offs, offs < N, OP)


@triton.jit
def _backward_block(x_ptr, y_ptr, grad_ptr, dx_ptr, dy_ptr, offs, mask, OP: tl.constexpr):
    """Compute and store a block of the gradients."""
    x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=mask).to(tl.float32)
    if OP == "dot":
        grad = tl.load(grad_ptr).to(tl.float32)
    else:
        grad = tl.load(grad_ptr + offs, mask=mask).to(tl.float32)
    if dx_ptr is not None:
        store_once(dx_ptr + offs, y * grad, mask)
    if dy_ptr is not None:
        store_once(dy_ptr + offs, x * grad, mask)


@triton.jit
def _dot_kernel(
    x_ptr, y_ptr, partial_ptr, counter_ptr, out_ptr, N,
    POLICY: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """out = sum of x y, in float32, in the same order in each run.

    Grid: cdiv(N, BLOCK_N * STEPS), at least one. A program owns STEPS blocks of BLOCK_N elements.
    It reads x and y, writes a partial sum, and draws a number from the arrival counter. The program
    that draws the last number adds the partial sums, writes out, and sets the counter to zero
    again. The counter must be zero at the start. POLICY: eviction policy of the loads. BLOCK_P,
    BLOCK_N: powers of two; BLOCK_P partial sums are added at a time. STEPS: at least one.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    first = pid.to(tl.int64) * (BLOCK_N * STEPS)
    offs = first + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    if first + BLOCK_N * STEPS <= N:
        for step in tl.range(STEPS, loop_unroll_factor=4):
            total += _products(x_ptr, y_ptr, offs + step * BLOCK_N, None, None, POLICY)
    else:
        for step in range(STEPS):
            here = offs + step * BLOCK_N
            total += _products(x_ptr, y_ptr, here, here < N, 0.0, POLICY)
    tl.store(partial_ptr + pid, tl.sum(total, 0))
    # Release: the sum is in memory before the number is drawn. Acquire: the last program sees all.
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == programs - 1:
        offs_p = tl.arange(0, BLOCK_P)
        sums = tl.zeros((BLOCK_P,), tl.float32)
        for start in range(0, programs, BLOCK_P):
            here = start + offs_p
            sums += tl.load(partial_ptr + here, mask=here < programs, other=0.0, volatile=True)
        tl.store(out_ptr, tl.sum(sums, 0).to(out_ptr.dtype.element_ty))
        tl.store(counter_ptr, 0)


@triton.jit
def _products(x_ptr, y_ptr, offs, mask, other: tl.constexpr, POLICY: tl.constexpr):
    """Return x y of a block in float32."""
    x = tl.load(x_ptr + offs, mask=mask, other=other, eviction_policy=POLICY).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=mask, other=other, eviction_policy=POLICY).to(tl.float32)
    return x * y


# Programs of a dot product: enough to fill all multiprocessors several times, so that none idles
# at the end, and few enough that their sums are soon added.
FEWEST_PROGRAMS, MOST_PROGRAMS = 256, 4096
# Bytes of both vectors up to which they are the first to leave the L2 cache. Lines that were
# written before then stay, and need no bandwidth on their way to memory. More bytes are read slower
# so.
EVICT_FIRST_BYTES = 2**27
# Partial sums that the last program adds at a time.
MOST_PARTIALS = 4096
DOT_SHAPES = ((512, 4), (1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 16))
DOT_BLOCKS = tuple(
    {"BLOCK_N": block, "STEPS": steps, "num_warps": warps}
    for block, warps in DOT_SHAPES
    for steps in (1, 2, 4, 8, 16, 32, 64)
)


def _choose_dot(n, itemsize):
    block, warps = (1024, 4) if n < 2**22 else (4096, 8) if n < 2**26 else (2048, 8)
    programs = MOST_PROGRAMS if n >= 2**26 else MOST_PROGRAMS // 2
    steps = triton.next_power_of_2(triton.cdiv(n, block * programs))
    return {"BLOCK_N": block, "STEPS": min(64, max(1, steps)), "num_warps": warps}


def _suits_dot(candidate, n, itemsize):
    programs = triton.cdiv(n, candidate["BLOCK_N"] * candidate["STEPS"])
    return FEWEST_PROGRAMS <= programs <= MOST_PROGRAMS


FORWARD = tiles(_forward_kernel)
BACKWARD = tiles(_backward_kernel)
MIN_MAX, MIN_MAX_BACKWARD = min_max_configs("vector")
DOT_TILES = Configs(_dot_kernel, DOT_BLOCKS, _choose_dot, _suits_dot)
scale_fwd = cached_launch(scale_fwd)
vector_fwd = cached_launch(vector_fwd)
vector_bwd = cached_launch(vector_bwd)
dot_fwd = cached_launch(dot_fwd)

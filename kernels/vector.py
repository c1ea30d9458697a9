"""Element-wise vector operations and the dot product.

scale: out = alpha x. add, mul, maximum, minimum: out = x ∘ y. dot: sum of x y. With g the gradient
of the result: scale gives alpha g, add g itself, mul y g and x g, dot y g and x g with one g for
all. maximum and minimum give g to the input that was taken, half of it to each of two equals; two
bits an element say which (`elementwise_details/min_max.py`).

At half a FLOP a byte or less all wait for memory (`ops/vector.py` counts both): the kernels only
have to keep enough 16-byte accesses in flight. The dot product follows Harris, "Optimizing parallel
reduction in CUDA" (2007): programs sum in float32, and their partial sums are added in a fixed
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
from .elementwise_details.min_max import extremum_bwd, extremum_configs, extremum_fwd

ACCUMULATES = {"dot": "float32"}

# Programs of a dot product: enough to fill all multiprocessors several times, so that none waits
# for the last ones; few enough that their sums are soon added.
FEWEST_PROGRAMS, MOST_PROGRAMS = 256, 4096
# Bytes of both vectors up to which they leave the L2 cache first: what was written before may stay,
# and its way to memory takes no share of the bandwidth. More is read slower with the hint.
PASSING = 2**27
# Partial sums that the last program holds at a time.
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


@triton.jit
def _combined(x, y, alpha, OP: tl.constexpr):
    if OP == "scale":
        # A traced graph hands floats over as float64.
        return x * tl.cast(alpha, tl.float32)
    elif OP == "add":
        return x + y
    else:
        return x * y


@triton.jit
def _forward_block(
    x_ptr, y_ptr, out_ptr, offs, mask, alpha, OP: tl.constexpr, POLICY: tl.constexpr
):  # fmt: skip
    x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=mask).to(tl.float32) if OP != "scale" else x
    store_by(out_ptr + offs, _combined(x, y, alpha, OP), mask, POLICY)


@triton.jit
def _forward_kernel(
    x_ptr, y_ptr, out_ptr, N, alpha,
    OP: tl.constexpr, POLICY: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs = block_offsets(BLOCK_N)
    if N is None or block_is_full(N, BLOCK_N):
        _forward_block(x_ptr, y_ptr, out_ptr, offs, None, alpha, OP, POLICY)
    else:
        _forward_block(x_ptr, y_ptr, out_ptr, offs, offs < N, alpha, OP, POLICY)


@triton.jit
def _backward_block(x_ptr, y_ptr, grad_ptr, dx_ptr, dy_ptr, offs, mask, OP: tl.constexpr):
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
def _backward_kernel(
    x_ptr, y_ptr, grad_ptr, dx_ptr, dy_ptr, N, OP: tl.constexpr, BLOCK_N: tl.constexpr
):
    offs = block_offsets(BLOCK_N)
    if N is None or block_is_full(N, BLOCK_N):
        _backward_block(x_ptr, y_ptr, grad_ptr, dx_ptr, dy_ptr, offs, None, OP)
    else:
        _backward_block(x_ptr, y_ptr, grad_ptr, dx_ptr, dy_ptr, offs, offs < N, OP)


@triton.jit
def _products(x_ptr, y_ptr, offs, mask, other: tl.constexpr, POLICY: tl.constexpr):
    x = tl.load(x_ptr + offs, mask=mask, other=other, eviction_policy=POLICY).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=mask, other=other, eviction_policy=POLICY).to(tl.float32)
    return x * y


@triton.jit
def _dot_kernel(
    x_ptr, y_ptr, partial_ptr, ticket_ptr, out_ptr, N,
    POLICY: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
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
    # Release: the sum is in memory before the number is drawn. Acquire: the last one sees all.
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == programs - 1:
        offs_p = tl.arange(0, BLOCK_P)
        sums = tl.zeros((BLOCK_P,), tl.float32)
        for start in range(0, programs, BLOCK_P):
            here = start + offs_p
            sums += tl.load(partial_ptr + here, mask=here < programs, other=0.0, volatile=True)
        tl.store(out_ptr, tl.sum(sums, 0).to(out_ptr.dtype.element_ty))
        tl.store(ticket_ptr, 0)


FORWARD = tiles(_forward_kernel)
BACKWARD = tiles(_backward_kernel)
EXTREMUM, SHARE = extremum_configs("vector")
DOT_TILES = Configs(_dot_kernel, DOT_BLOCKS, _choose_dot, _suits_dot)


def scale_fwd(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """alpha x; TypeError where x is not floating."""
    check_floating(x=x)
    x = x.contiguous()
    return _forward("scale", x, x, alpha)


def vector_fwd(op: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x ∘ y; ValueError or TypeError where they do not belong together."""
    check_floating_pair(x, y)
    return _forward(op, x.contiguous(), y.contiguous(), 1.0)


def _forward(op: str, x: torch.Tensor, y: torch.Tensor, alpha: float) -> torch.Tensor:
    """Both contiguous, of one shape; y of "scale" is not looked at."""
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
    """dx and dy, each None where it is not wanted; grad of "dot" is a single one."""
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
    """The dot product, without dimensions; ValueError or TypeError where x and y do not belong
    together."""
    check_floating_pair(x, y)
    x, y, n = x.contiguous(), y.contiguous(), x.numel()
    config = DOT_TILES.pick(x.device, n=n, itemsize=x.element_size())
    programs = max(1, -(-n // (config["BLOCK_N"] * config["STEPS"])))
    partial, out = x.new_empty(programs, dtype=torch.float32), x.new_empty(())
    _dot_kernel[(programs,)](
        x_ptr=x, y_ptr=y, partial_ptr=partial, ticket_ptr=arrival_counter(x.device), out_ptr=out,
        N=n, POLICY="evict_first" if 2 * n * x.element_size() <= PASSING else "",
        BLOCK_P=min(MOST_PARTIALS, 1 << (programs - 1).bit_length()), **config,
    )  # fmt: skip
    return out


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


class _Extremum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, op):
        out, flags = extremum_fwd(EXTREMUM, op, x, y, keep=True)
        ctx.save_for_backward(flags)
        return out

    @staticmethod
    @once
    def backward(ctx, grad):
        (flags,) = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        return *extremum_bwd(SHARE, flags, grad, wanted), None


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return dot_fwd(x, y)

    @staticmethod
    @once
    def backward(ctx, grad):
        return vector_bwd("dot", *ctx.saved_tensors, grad, ctx.needs_input_grad)


def _extremum(op: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if needs_grad(x, y):
        return _Extremum.apply(x, y, op)
    return extremum_fwd(EXTREMUM, op, x, y, False)[0]


def scale(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """alpha times x, element by element, multiplied in float32.

    x: any shape; float32, float16 or bfloat16, else TypeError. Returns the shape and dtype of x.
    TypeError where alpha is no number. Differentiable once, in x.
    """
    alpha = check_number("alpha", alpha)
    return _Scale.apply(x, alpha) if needs_grad(x) else scale_fwd(x, alpha)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x plus y, element by element.

    x, y: any shape, the same for both; float32, float16 or bfloat16, else TypeError. ValueError
    where shapes, dtypes or devices differ. Differentiable; mul, maximum, minimum and dot are once.
    """
    return _Add.apply(x, y) if needs_grad(x, y) else vector_fwd("add", x, y)


def mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x times y, element by element; tensors as `add` takes them."""
    return _Mul.apply(x, y) if needs_grad(x, y) else vector_fwd("mul", x, y)


def maximum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The greater of x and y, NaN where either is; tensors as `add` takes them."""
    return _extremum("maximum", x, y)


def minimum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The smaller of x and y, NaN where either is; tensors as `add` takes them."""
    return _extremum("minimum", x, y)


def dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sum of the products of x and y, added in float32 in a fixed order.

    Tensors as `add` takes them. Returns a tensor without dimensions.
    """
    return _Dot.apply(x, y) if needs_grad(x, y) else dot_fwd(x, y)


scale_fwd = cached_launch(scale_fwd)
vector_fwd = cached_launch(vector_fwd)
vector_bwd = cached_launch(vector_bwd)
dot_fwd = cached_launch(dot_fwd)

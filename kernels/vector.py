"""Element-wise vector operations and the dot product.

scale: out = alpha x. add, mul, maximum, minimum: out = x ∘ y. dot: sum of x y.

Bytes: one read of each input, one write of the output, so 2, 3 and 2 items an element; FLOPs: one
an element (two for dot). At half a FLOP a byte or less all wait for memory: the kernels only have
to keep enough 16-byte accesses in flight. Full blocks are loaded without a mask, because a mask
whose bound is no multiple of the vector width makes every access of the kernel scalar; only the
last block pays for its tail. The dot product follows the two-stage scheme of Harris, "Optimizing
parallel reduction in CUDA" (2007): a fixed number of programs sum in float32 and one program
adds their partial sums in a fixed order, so the result is the same in each run.
"""

import torch
import triton
import triton.language as tl

from kernels._checks import same
from kernels._contract import Cost, Op, Tensor, case
from kernels._device import sm_count
from kernels._tuned import Configs


def scale_reference(x, alpha):
    return x * alpha


def add_reference(x, y):
    return x + y


def mul_reference(x, y):
    return x * y


def maximum_reference(x, y):
    return torch.where((x > y) | x.isnan(), x, y)


def minimum_reference(x, y):
    return torch.where((x < y) | x.isnan(), x, y)


def dot_reference(x, y):
    return (x * y).sum()


def _cost(reads, writes):
    def cost(a_case, direction, itemsize):
        n = a_case["N"]
        return Cost(reads * n * itemsize, writes * n * itemsize, n)

    return cost


def _dot_cost(a_case, direction, itemsize):
    return Cost(2 * a_case["N"] * itemsize, itemsize, 2 * a_case["N"])


VECTOR = Tensor("N")
FACTOR = Tensor("N", tame=True)
EDGE = (
    case(N=1),
    case(N=127),
    case(N=4096),
    case(N=10001),
    case(N=0),
    case(N=5000, layout="offset"),
    case(N=5000, values="large"),
    case(N=5000, values="inf"),
    case(N=1000, values="infinities"),
    case(N=1000, values="denormal"),
    case(N=1000, values="equal"),
    case(N=1000, layout="offset4", dtypes=("float16",)),
    case(N=1000, layout="offset8", dtypes=("float16",)),
    case(N=1000, layout="strided"),
)
# From what fits in the L2 cache to what an activation of a large model occupies.
SWEEP = (
    *(case(N=2**k, dtypes=("bfloat16", "float32")) for k in (16, 20, 24, 26, 28)),
    case(N=8192 * 14336, dtypes=("float16", "bfloat16")),  # Llama 3 8B, MLP activation
)

SCALE = Op("scale", scale_reference, {"x": VECTOR}, _cost(1, 1), EDGE, SWEEP, params={"alpha": 1.7})
ADD = Op("add", add_reference, {"x": VECTOR, "y": VECTOR}, _cost(2, 1), EDGE, SWEEP)
MUL = Op("mul", mul_reference, {"x": VECTOR, "y": FACTOR}, _cost(2, 1), EDGE, SWEEP)
MAXIMUM = Op("maximum", maximum_reference, {"x": VECTOR, "y": VECTOR}, _cost(2, 1), EDGE, SWEEP)
MINIMUM = Op("minimum", minimum_reference, {"x": VECTOR, "y": VECTOR}, _cost(2, 1), EDGE, SWEEP)
DOT = Op("dot", dot_reference, {"x": VECTOR, "y": FACTOR}, _dot_cost, EDGE, SWEEP)


def _choose_block(n, itemsize, inputs):
    # One 16-byte access for each of 128 threads, and as many programs as that takes.
    return {"BLOCK_N": 2048 // itemsize, "num_warps": 4}


def _choose_dot(n, itemsize):
    # A short vector must still spread over all multiprocessors.
    return {"BLOCK_N": 1024, "num_warps": 4} if n < 2**22 else {"BLOCK_N": 4096, "num_warps": 16}


def _suits_block(candidate, n, itemsize, inputs):
    # One to four accesses of 16 bytes a thread.
    item_bytes = candidate["BLOCK_N"] * itemsize // (32 * candidate["num_warps"])
    return 16 <= item_bytes <= 64


BLOCKS = tuple(
    {"BLOCK_N": block, "num_warps": warps}
    for block in (256, 512, 1024, 2048, 4096)
    for warps in (1, 2, 4, 8)
    if 4 <= block // (32 * warps) <= 32
)
DOT_BLOCKS = tuple(
    {"BLOCK_N": block, "num_warps": warps}
    for block in (512, 1024, 2048, 4096, 8192)
    for warps in (4, 8, 16, 32)
    if 4 <= block // (32 * warps) <= 16
)


@triton.jit
def _apply(x, y, alpha, OP: tl.constexpr):
    if OP == "scale":
        return x.to(tl.float32) * tl.cast(alpha, tl.float32)
    elif OP == "add":
        return x + y
    elif OP == "mul":
        return x * y
    elif OP == "maximum":
        return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _elementwise_kernel(x_ptr, y_ptr, out_ptr, N, alpha, OP: tl.constexpr, BLOCK_N: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    if (pid + 1).to(tl.int64) * BLOCK_N <= N:
        x = tl.load(x_ptr + offs)
        y = tl.load(y_ptr + offs) if OP != "scale" else x
        out = _apply(x, y, alpha, OP).to(out_ptr.dtype.element_ty)
        # Nothing here is read again: a streaming store leaves the cache to the loads.
        tl.store(out_ptr + offs, out, cache_modifier=".cs")
    else:
        mask = offs < N
        x = tl.load(x_ptr + offs, mask=mask)
        y = tl.load(y_ptr + offs, mask=mask) if OP != "scale" else x
        tl.store(out_ptr + offs, _apply(x, y, alpha, OP).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dot_partial_kernel(x_ptr, y_ptr, partial_ptr, N, BLOCK_N: tl.constexpr):
    pid = tl.program_id(0)
    step = tl.num_programs(0).to(tl.int64) * BLOCK_N
    offs = pid.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    full = N // step
    for _ in range(full):
        x = tl.load(x_ptr + offs).to(tl.float32)
        y = tl.load(y_ptr + offs).to(tl.float32)
        total += x * y
        offs += step
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    total += x * y
    tl.store(partial_ptr + pid, tl.sum(total, 0))


@triton.jit
def _dot_final_kernel(partial_ptr, out_ptr, P, BLOCK_P: tl.constexpr):
    offs = tl.arange(0, BLOCK_P)
    partial = tl.load(partial_ptr + offs, mask=offs < P, other=0.0)
    tl.store(out_ptr, tl.sum(partial, 0).to(out_ptr.dtype.element_ty))


ELEMENTWISE = Configs(_elementwise_kernel, BLOCKS, _choose_block, _suits_block)
DOT_PARTIAL = Configs(_dot_partial_kernel, DOT_BLOCKS, _choose_dot)


def _elementwise(op, x, y, alpha=0.0):
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    n = x.numel()
    if n == 0:
        return out
    inputs = 1 if op == "scale" else 2
    config = ELEMENTWISE.pick(x.device, n=n, itemsize=x.element_size(), inputs=inputs)
    _elementwise_kernel[(triton.cdiv(n, config["BLOCK_N"]),)](
        x_ptr=x, y_ptr=y, out_ptr=out, N=n, alpha=alpha, OP=op, **config
    )
    return out


def scale(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """alpha times x, element by element, multiplied in float32.

    x: any shape; float32, float16 or bfloat16. Returns the shape and dtype of x.
    """
    return _elementwise("scale", x, x, alpha)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x plus y. Any shape, the same for both; ValueError where shapes or dtypes differ."""
    same(x=x, y=y)
    return _elementwise("add", x, y)


def mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x times y. Any shape, the same for both; ValueError where shapes or dtypes differ."""
    same(x=x, y=y)
    return _elementwise("mul", x, y)


def maximum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The greater of x and y; NaN where either is. ValueError where shapes or dtypes differ."""
    same(x=x, y=y)
    return _elementwise("maximum", x, y)


def minimum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The smaller of x and y; NaN where either is. ValueError where shapes or dtypes differ."""
    same(x=x, y=y)
    return _elementwise("minimum", x, y)


def dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sum of the products of x and y, added in float32 in a fixed order.

    x, y: any shape, the same for both; ValueError where shapes or dtypes differ. Returns a tensor
    without dimensions.
    """
    same(x=x, y=y)
    x, y = x.contiguous(), y.contiguous()
    n = x.numel()
    config = DOT_PARTIAL.pick(x.device, n=n, itemsize=x.element_size())
    programs = max(1, min(triton.cdiv(n, config["BLOCK_N"]), 4 * sm_count(x.device)))
    partial = torch.empty(programs, dtype=torch.float32, device=x.device)
    out = torch.empty((), dtype=x.dtype, device=x.device)
    _dot_partial_kernel[(programs,)](x_ptr=x, y_ptr=y, partial_ptr=partial, N=n, **config)
    _dot_final_kernel[(1,)](
        partial_ptr=partial, out_ptr=out, P=programs, BLOCK_P=triton.next_power_of_2(programs)
    )
    return out

"""Matrix product with a fused epilogue: out = activation(a b + bias).

At M = N = K = 4096 in bfloat16 there are 1365 FLOP a byte, so the tensor cores decide. Programs
take the output tiles in groups of rows, so that the tiles in flight share their columns of b in the
L2 cache (Triton's matmul tutorial).

The pointer kernel takes every input, with masks. The descriptor kernel needs items of 16 bits, and
rows of a, b and out that start at multiples of 16 bytes. Its tiles travel by tensor descriptors
(TMA on Hopper, plain loads elsewhere). A fixed number of programs stride over the tiles, so the
loads of one tile overlap the epilogue of the one before.

The epilogue works on the float32 accumulator, so bias and activation cost no memory traffic. A
float32 product is done as three tf32 products (tf32x3), which keeps float32 accuracy on the tensor
cores.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ._runtime.autograd import check_no_grad
from ._runtime.call_cache import cached_launch
from ._runtime.checks import (
    MOST_ITEMS,
    check_floating,
    check_one_of,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_tensors,
    check_that,
)
from ._runtime.configs import Configs
from ._runtime.device import float32_dot, shared_bytes, sm_count
from ._runtime.layout import as_read, tma_compatible
from ._triton.math import gelu_gate, normal, tanh_of
from ._triton.memory import store_as

ACTIVATIONS = ("none", "relu", "leaky_relu", "gelu", "gelu_tanh", "tanh")
LONG = ("gelu", "gelu_tanh", "tanh")
LEAKY_SLOPE = tl.constexpr(0.01)
ACCUMULATES = {"matmul": "float32"}


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    """Return activation(a b + bias), accumulated in float32.

    Args:
        a: `[M, K]`, float32, float16 or bfloat16, any strides.
        b: `[K, N]`, of the dtype of a, any strides.
        bias: `[N]`, of the dtype of a, or None.
        activation: "none", "relu", "leaky_relu" (slope 0.01), "gelu" (erf form), "gelu_tanh" or
            "tanh".

    Returns:
        A new tensor `[M, N]` of the dtype of a. There is no backward pass.

    Raises:
        TypeError: an argument has another kind or dtype, or b or bias another dtype than a.
        ValueError: shapes or devices do not fit, the activation is unknown, a size is too large, or
            an input wants a gradient.

    Source:
        Triton's tutorials 03 (matrix multiplication) and 09 (persistent matmul).

    Example:
        >>> a, b = torch.randn(4, 8, device="cuda"), torch.randn(8, 3, device="cuda")
        >>> matmul(a, b, activation="relu").shape
        torch.Size([4, 3])
    """
    check_tensors(a=a, b=b, **({} if bias is None else {"bias": bias}))
    check_no_grad(a=a, b=b, bias=bias)
    check_that(a.dim() == 2, f"a: {a.dim()} dimensions, expected 2")
    check_that(
        b.dim() == 2 and b.shape[0] == a.shape[1],
        f"b: shape {tuple(b.shape)}, expected ({a.shape[1]}, N)",
    )
    check_floating(a=a)
    check_same_dtype(a=a, b=b)
    check_same_device(a=a, b=b)
    check_one_of("activation", activation, ACTIVATIONS)
    for name, size in (("a", a.shape[0]), ("a", a.shape[1]), ("b", b.shape[1])):
        check_that(size <= MOST_ITEMS, f"{name}: a size of {size}, expected at most {MOST_ITEMS}")
    if bias is not None:
        check_shape("bias", bias, (b.shape[1],))
        check_same_dtype(a=a, bias=bias)
        check_same_device(a=a, bias=bias)
        bias = as_read(bias).contiguous()
    forward = _traced_matmul if torch.compiler.is_compiling() else matmul_fwd
    return forward(as_read(a), as_read(b), bias, activation)


def matmul_fwd(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """Return [M, N] for a: [M, K] and b: [K, N] of any strides; bias: [N], contiguous, or None."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty((m, n), dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    common = {
        "bias_ptr": bias, "M": m, "N": n, "K": k,
        "ACTIVATION": activation, "HAS_BIAS": bias is not None,
    }  # fmt: skip
    transposed = b.stride(0) == 1 and n > 1
    stored_b = b.T if transposed else b
    walkable = a.element_size() == 2 and k > 0 and tma_compatible(a) and tma_compatible(stored_b)
    key = {"m": m, "n": n, "k": k, "transposed": transposed, "shared": shared_bytes(a.device)}
    if walkable and tma_compatible(out):
        sms = sm_count(a.device)
        config = DESCRIPTOR.pick(a.device, **key, sms=sms, activation=activation)
        block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
        _descriptor_kernel[(min(sms, tiles),)](
            a_desc=TensorDescriptor.from_tensor(a, [block_m, block_k]),
            b_desc=TensorDescriptor.from_tensor(
                stored_b, [block_n, block_k] if transposed else [block_k, block_n]
            ),
            out_desc=TensorDescriptor.from_tensor(out, [block_m, block_n]),
            B_TRANSPOSED=transposed, **common, **config,
        )  # fmt: skip
    else:
        config = POINTER.pick(a.device, **key, itemsize=a.element_size())
        tiles = triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, config["BLOCK_N"])
        _pointer_kernel[(tiles,)](
            a_ptr=a, b_ptr=b, out_ptr=out,
            stride_am=a.stride(0), stride_ak=a.stride(1),
            stride_bk=b.stride(0), stride_bn=b.stride(1), stride_om=out.stride(0),
            # Only float32 has anything to split.
            PRECISION=float32_dot() if a.dtype == torch.float32 else "ieee", **common, **config,
        )  # fmt: skip
    return out


# A traced graph has no addresses, and the choice of the kernel needs them.
@torch.library.custom_op("tilewright::matmul", mutates_args=())
def _traced_matmul(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    return matmul_fwd(a, b, bias, activation)


@_traced_matmul.register_fake
def _(a, b, bias, activation):
    return a.new_empty((a.shape[0], b.shape[1]))


@triton.jit
def _pointer_kernel(
    a_ptr, b_ptr, bias_ptr, out_ptr,
    stride_am, stride_ak, stride_bk, stride_bn, stride_om, M, N, K,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out = activation(a b + bias), for any strides of a and b.

    Grid: one program for each tile [BLOCK_M, BLOCK_N] of out. Reads a [M, K], b [K, N] and, if
    HAS_BIAS, bias [N]; writes out [M, N], whose rows lie stride_om apart. Accumulates in float32.
    PRECISION: input precision of the product. GROUP_M: rows of tiles that share columns of b in the
    L2 cache. M, N and K need not be multiples of the blocks.
    """
    pid_m, pid_n = tile_coords(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    steps = offs_k.to(tl.int64)
    # Rows and columns past the end wrap around, so only K needs a mask in the loop.
    rows = (offs_m % M).to(tl.int64)[:, None]
    columns = (offs_n % N).to(tl.int64)[None, :]
    a_ptrs = a_ptr + rows * stride_am + steps[None, :] * stride_ak
    b_ptrs = b_ptr + steps[:, None] * stride_bk + columns * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=start + offs_k[None, :] < K, other=0.0)
        b = tl.load(b_ptrs, mask=start + offs_k[:, None] < K, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += tl.cast(stride_ak, tl.int64) * BLOCK_K
        b_ptrs += tl.cast(stride_bk, tl.int64) * BLOCK_K
    out = _epilogue(acc, bias_ptr, offs_n, N, ACTIVATION, HAS_BIAS)
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    store_as(out_ptr + offs_m.to(tl.int64)[:, None] * stride_om + offs_n[None, :], out, mask)


@triton.jit
def _descriptor_kernel(
    a_desc, b_desc, out_desc, bias_ptr, M, N, K,
    B_TRANSPOSED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out = activation(a b + bias), for tensors that TMA can read.

    Grid: programs, one a multiprocessor at most, which stride over the tiles [BLOCK_M, BLOCK_N].
    Reads a [M, K] and b [K, N] by descriptors, bias [N] if HAS_BIAS; writes out [M, N] by its own.
    Accumulates in float32. B_TRANSPOSED: b_desc describes b transposed, blocks [BLOCK_N, BLOCK_K].
    GROUP_M: rows of tiles that share columns of b in the L2 cache.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for pid in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        pid_m, pid_n = tile_coords(pid, tiles_m, tiles_n, GROUP_M)
        first_m = pid_m * BLOCK_M
        first_n = pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            a = a_desc.load([first_m, start])
            b = b_desc.load([first_n, start]).T if B_TRANSPOSED else b_desc.load([start, first_n])
            acc = tl.dot(a, b, acc)
        offs_n = first_n + tl.arange(0, BLOCK_N)
        out = _epilogue(acc, bias_ptr, offs_n, N, ACTIVATION, HAS_BIAS)
        out_desc.store([first_m, first_n], out.to(out_desc.dtype))


@triton.jit
def tile_coords(pid, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """The row and the column of tile pid, in groups of GROUP_M rows of tiles."""
    group = pid // (GROUP_M * tiles_n)
    first_m = group * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    within = pid % (GROUP_M * tiles_n)
    return first_m + within % rows, within // rows


@triton.jit
def _epilogue(acc, bias_ptr, offs_n, N, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr):
    """activation(acc + bias), acc float32 [BLOCK_M, BLOCK_N]."""
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if ACTIVATION == "relu":
        acc = tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "leaky_relu":
        acc = tl.where(acc > 0, acc, acc * LEAKY_SLOPE)
    elif ACTIVATION == "gelu":
        acc = acc * normal(acc, True)[0]
    elif ACTIVATION == "gelu_tanh":
        acc = acc * gelu_gate(acc, True)
    elif ACTIVATION == "tanh":
        acc = tanh_of(acc, True)
    return acc


def _tile(m, n, k, group, warps, stages):
    return {
        "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group,
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


# The rules choose from these; the tuner tries those named MORE_ as well.
DESCRIPTOR_CONFIGS = (
    _tile(128, 256, 64, 8, 8, 3),
    _tile(128, 128, 64, 8, 8, 4),
    _tile(128, 128, 64, 8, 4, 4),
    _tile(64, 128, 128, 8, 4, 3),
    _tile(64, 64, 128, 8, 4, 4),
    _tile(64, 64, 32, 8, 4, 3),
)
MORE_DESCRIPTOR_CONFIGS = (
    _tile(128, 256, 64, 16, 8, 3),
    _tile(256, 128, 64, 8, 8, 3),
    _tile(64, 256, 64, 8, 4, 4),
    _tile(64, 128, 64, 8, 4, 5),
)
POINTER_CONFIGS = (
    _tile(128, 64, 32, 8, 4, 4),
    _tile(128, 64, 64, 8, 8, 3),
    _tile(64, 64, 64, 8, 4, 2),
    _tile(128, 128, 32, 8, 8, 3),
    _tile(64, 64, 32, 8, 4, 2),
)
MORE_POINTER_CONFIGS = (_tile(64, 64, 32, 8, 4, 4), _tile(128, 64, 32, 8, 4, 3))


def _fitting(configs, itemsize, shared, out_tiles):
    """Those whose stages of a and b, and tiles of the result, fit in `shared` bytes."""
    for config in configs:
        m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        items = config["num_stages"] * (m * k + k * n) + out_tiles * m * n
        if items * itemsize + 1024 <= shared:
            yield config


def _choose_descriptor(m, n, k, sms, shared, activation, transposed):
    def cost(config):
        """Tile area times waves of tiles: the time of the last program to finish."""
        area = config["BLOCK_M"] * config["BLOCK_N"]
        tiles = triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, config["BLOCK_N"])
        # A tile of area A loads 1/sqrt(A) items for each product, hence the larger the better.
        return triton.cdiv(tiles, sms) * area * (1 + 90 / area**0.5)

    # erf and exp need registers that the widest tile does not leave.
    ranked = DESCRIPTOR_CONFIGS[activation in LONG :]
    return min(_fitting(ranked, 2, shared, 1), key=cost)


def _choose_pointer(m, n, k, shared, itemsize, transposed):
    if itemsize == 4:
        first = 0 if m * n >= 2048 * 2048 else 1 if m * n >= 1024 * 1024 else 2
    else:
        first = 3 if m * n >= 4096 * 4096 else 2
    ranked = (POINTER_CONFIGS[first], *POINTER_CONFIGS[2:])
    return next(_fitting(ranked, itemsize, shared, 0))


POINTER = Configs(_pointer_kernel, POINTER_CONFIGS + MORE_POINTER_CONFIGS, _choose_pointer)
DESCRIPTOR = Configs(
    _descriptor_kernel, DESCRIPTOR_CONFIGS + MORE_DESCRIPTOR_CONFIGS, _choose_descriptor
)

matmul_fwd = cached_launch(matmul_fwd)

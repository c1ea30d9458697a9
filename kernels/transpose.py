"""Transpose: out[n, m] = x[m, n].

Bytes: one read and one write of each element, no FLOPs. A tile is read along the rows of x and
written along the rows of out, sixteen bytes a thread either way; in between it turns around in
shared memory. Elements of two bytes may go there in pairs: a thread reads the same columns of two
neighbouring rows and packs them into 32-bit words, which are neighbours in a row of out. Tiles that
run at the same time lie in a block of tiles rather than a row, so that both sides touch whole pages
of DRAM. The tile and the order are those of Ruetsch and Micikevicius, "Optimizing matrix transpose
in CUDA" (2009).
"""

import torch
import triton
import triton.language as tl

from kernels._contract import Cost, Op, Tensor, case
from kernels._launch import launch, needs_grad
from kernels._tuned import Configs


def transpose_reference(x):
    return x.mT.clone(memory_format=torch.contiguous_format)


def _cost(a_case, direction, itemsize):
    moved = a_case["M"] * a_case["N"] * itemsize
    return Cost(moved, moved, 0)


TRANSPOSE = Op(
    "transpose",
    transpose_reference,
    {"x": Tensor("M N")},
    _cost,
    edge=(
        case(M=1, N=1),
        case(M=1, N=127),
        case(M=129, N=1),
        case(M=127, N=129),
        case(M=200, N=136),
        case(M=0, N=64),
        case(M=64, N=0),
        case(M=66, N=70, layout="padded"),
        case(M=66, N=70, layout="offset"),
        case(M=66, N=70, layout="strided"),
        case(M=40, N=72, layout="transposed"),
        case(M=36, N=44, layout="expanded"),
        case(M=64, N=64, values="infinities"),
        case(M=64, N=64, values="denormal"),
    ),
    sweep=(
        case(M=4096, N=1024, dtypes=("bfloat16",)),
        case(M=8191, N=8193, dtypes=("bfloat16",)),
        case(M=4096, N=4096, dtypes=("bfloat16", "float32")),
        case(M=16384, N=16384, dtypes=("bfloat16", "float32")),
        case(M=8192, N=28672, dtypes=("float16",)),  # Llama 3 70B, weight of an MLP
        case(M=32768, N=128, dtypes=("bfloat16",)),  # the keys of a head
    ),
    passes=("forward", "backward"),
)


def _choose(itemsize, pairs, large):
    if itemsize == 2 and not pairs:
        return {"PAIRED": 0, "BLOCK_M": 32, "BLOCK_N": 64, "GROUP": 8, "num_warps": 4}
    return {"PAIRED": 0, "BLOCK_M": 64, "BLOCK_N": 64, "GROUP": 8, "num_warps": 4}


def _suits(candidate, itemsize, pairs, large):
    # Two to eight accesses of 16 bytes a thread, and rows of a tile that are whole sectors.
    tile_bytes = candidate["BLOCK_M"] * candidate["BLOCK_N"] * itemsize
    accesses = tile_bytes // (16 * 32 * candidate["num_warps"])
    shortest = min(candidate["BLOCK_M"], candidate["BLOCK_N"]) * itemsize
    # Rows of 16-bit elements that begin anywhere are written one element at a time.
    most = 8 if itemsize > 2 or pairs else 4
    return 2 <= accesses <= most and shortest >= 64 and pairs >= candidate["PAIRED"]


CONFIGS = tuple(
    {"PAIRED": paired, "BLOCK_M": rows, "BLOCK_N": columns, "GROUP": group, "num_warps": warps}
    for paired in (0, 1)
    for rows, columns in ((32, 64), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128))
    for group in (1, 8)
    for warps in (4, 8)
    if rows * columns >= 64 * 64 * (1 + paired)
)


@triton.jit
def _transpose_kernel(
    x_ptr, out_ptr, stride_xm, M, N,
    PAIRED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    # Programs walk down GROUP tiles, then to the right.
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP * tiles_n) * GROUP
    rows = min(tiles_m - first, GROUP)
    within = pid % (GROUP * tiles_n)
    start_m, start_n = (first + within % rows) * BLOCK_M, within // rows * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    whole = (start_m + BLOCK_M <= M) & (start_n + BLOCK_N <= N)
    if PAIRED:
        offs_p = start_m // 2 + tl.arange(0, BLOCK_M // 2)
        x_ptrs = x_ptr + (2 * offs_p[:, None]).to(tl.int64) * stride_xm + offs_n[None, :]
        # Row 2p of x comes first in memory: the low half of a word.
        words_ptr = out_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
        out_ptrs = words_ptr + offs_n[:, None].to(tl.int64) * (M // 2) + offs_p[None, :]
        if whole:
            even = tl.load(x_ptrs, eviction_policy="evict_first")
            odd = tl.load(x_ptrs + stride_xm, eviction_policy="evict_first")
            tl.store(out_ptrs, tl.trans(_packed(even, odd)))
        else:
            mask = (offs_p[:, None] < M // 2) & (offs_n[None, :] < N)
            even = tl.load(x_ptrs, mask=mask)
            odd = tl.load(x_ptrs + stride_xm, mask=mask)
            tl.store(out_ptrs, tl.trans(_packed(even, odd)), mask=tl.trans(mask))
    else:
        offs_m = start_m + tl.arange(0, BLOCK_M)
        x_ptrs = x_ptr + offs_m[:, None].to(tl.int64) * stride_xm + offs_n[None, :]
        out_ptrs = out_ptr + offs_n[:, None].to(tl.int64) * M + offs_m[None, :]
        if whole:
            tl.store(out_ptrs, tl.trans(tl.load(x_ptrs, eviction_policy="evict_first")))
        else:
            mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
            tl.store(out_ptrs, tl.trans(tl.load(x_ptrs, mask=mask)), mask=tl.trans(mask))


@triton.jit
def _packed(low, high):
    """Two tiles of 16-bit elements as one of 32-bit words."""
    low, high = low.to(tl.uint16, bitcast=True), high.to(tl.uint16, bitcast=True)
    return low.to(tl.uint32) | (high.to(tl.uint32) << 16)


TILES = Configs(_transpose_kernel, CONFIGS, _choose, _suits)
# Bytes from which on a tensor counts as large: it keeps the GPU busy for many waves of programs.
LARGE = 2**26


def transpose_fwd(x: torch.Tensor) -> torch.Tensor:
    """x: [M, N], contiguous in N, its rows anywhere. Returns [N, M], contiguous."""
    m, n = x.shape
    itemsize = x.element_size()
    out = x.new_empty((n, m))
    if m == 0 or n == 0:
        return out
    pairs, large = itemsize == 2 and m % 2 == 0, m * n * itemsize >= LARGE
    config = TILES.pick(x.device, itemsize=itemsize, pairs=pairs, large=large)
    tiles = -(-m // config["BLOCK_M"]) * -(-n // config["BLOCK_N"])
    launch(
        _transpose_kernel, (tiles,),
        x_ptr=x, out_ptr=out, stride_xm=x.stride(0), M=m, N=n, **config,
    )  # fmt: skip
    return out


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _turned(x)

    @staticmethod
    def backward(ctx, dy):
        return _turned(dy)


def _turned(x: torch.Tensor) -> torch.Tensor:
    if x.stride(1) == 1 or x.shape[1] <= 1:
        return transpose_fwd(x)
    # Rows that are no runs of memory: a copy, and already in order where x is itself a transpose.
    return x.mT.clone(memory_format=torch.contiguous_format)


def transpose(x: torch.Tensor) -> torch.Tensor:
    """The transpose of a matrix, in memory of its own.

    x: [M, N], any dtype, rows at any distance; ValueError with other than two dimensions. Returns
    [N, M], contiguous. Differentiable.
    """
    if x.dim() != 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected two dimensions")
    return _Transpose.apply(x) if needs_grad(x) else _turned(x)

"""Transpose: out[n, m] = x[m, n].

A tile is read along the rows of x and written along the rows of out, sixteen bytes a thread both
times. In between it is transposed in shared memory, as Ruetsch and Micikevicius, "Optimizing matrix
transpose in CUDA" (2009), describe. For large tensors, consecutive programs go down the columns of
tiles. Programs that run at the same time then write neighbouring parts of the same rows of out,
which saves more than reading neighbouring parts does.

Two variants exist because rows of an odd number of two-byte elements begin at odd elements every
other time. No access of more than two bytes fits all of them. If these are the rows of x, words of
four bytes fit each row by itself (`_words_kernel`). A row that begins at an odd element is read one
element further, and three words of x hold the elements of two words of out. If these are the rows
of out, single elements in small tiles were the fastest (`_items_kernel`). Adjacent tiles share the
sectors of 32 bytes at their edges, so both should be written soon after each other.

The compiler moves sixteen bytes at a time only if it knows that rows begin at multiples of sixteen.
Other rows of out are written by elements, and then small tiles serve best too.
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import needs_grad
from ._runtime.call_cache import cached_launch
from ._runtime.checks import MOVABLE, check_real, check_tensor
from ._runtime.configs import Configs


def transpose(x: torch.Tensor) -> torch.Tensor:
    """Return the transpose of a matrix, in memory of its own.

    Args:
        x: `[M, N]`, any dtype of real numbers, rows at any distance.

    Returns:
        A new contiguous tensor `[N, M]` with the dtype of x. It is differentiable in x; the
        gradient is a view of the gradient of the result.

    Raises:
        TypeError: x is no tensor or is complex.
        ValueError: x has other than two dimensions, or is not on a GPU.

    Source:
        Ruetsch and Micikevicius, "Optimizing matrix transpose in CUDA" (2009).

    Example:
        >>> x = torch.ones(2, 3, device="cuda")
        >>> transpose(x).shape
        torch.Size([3, 2])
    """
    check_tensor("x", x)
    if x.dim() != 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected two dimensions")
    return _Transpose.apply(x) if needs_grad(x) else _contiguous_transpose(x)


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _contiguous_transpose(x)

    @staticmethod
    def backward(ctx, dy):
        # A view, as in PyTorch: a caller that needs contiguous rows copies it once.
        return dy.mT


def _contiguous_transpose(x: torch.Tensor) -> torch.Tensor:
    """Return the transpose of x in contiguous memory."""
    if x.stride(1) == 1 or x.shape[1] <= 1:
        return transpose_fwd(x)
    check_real(MOVABLE, x=x)
    # The rows are not contiguous, so PyTorch copies. If x is itself a transpose, memory is in
    # order.
    return x.mT.clone(memory_format=torch.contiguous_format)


def transpose_fwd(x: torch.Tensor) -> torch.Tensor:
    """Return the transpose `[N, M]`, contiguous, of x `[M, N]`, contiguous in N.

    Raise TypeError if x has no dtype of real numbers.
    """
    check_real(MOVABLE, x=x)
    m, n = x.shape
    itemsize = x.element_size()
    out = x.new_empty((n, m))
    if m == 0 or n == 0:
        return out
    stride, large = x.stride(0), m * n * itemsize >= LARGE
    # A traced graph knows no addresses, and should hold for other sizes.
    known = not torch.compiler.is_dynamo_compiling()
    words = known and itemsize == 2 and m % 2 == 0 and stride % 2 and x.data_ptr() % 4 == 0
    items = known and itemsize <= 2 and m % 16 and not words
    if items and m * max(stride, n) < 2**31 and n <= MOST_COLUMNS:
        config = ITEMS.pick(x.device, large=large)
        _items_kernel[(-(-m // config["BLOCK_M"]), -(-n // config["BLOCK_N"]))](
            x_ptr=x, out_ptr=out, stride_xm=stride, M=m, N=n, **config,
        )  # fmt: skip
    elif words:
        config = WORDS.pick(x.device, large=large)
        _words_kernel[(_grid_size(m, n, config),)](
            x_ptr=x, out_ptr=out, stride_xm=stride, M=m, N=n, **config,
        )  # fmt: skip
    else:
        config = TILES.pick(x.device, itemsize=itemsize, large=large)
        _transpose_kernel[(_grid_size(m, n, config),)](
            x_ptr=x, out_ptr=out, stride_xm=stride, M=m, N=n, **config,
        )  # fmt: skip
    return out


def _grid_size(m, n, config):
    """Return the number of tiles."""
    return -(-m // config["BLOCK_M"]) * -(-n // config["BLOCK_N"])


@triton.jit
def _transpose_kernel(
    x_ptr, out_ptr, stride_xm, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMN_MAJOR_GRID: tl.constexpr,
):  # fmt: skip
    """out[n, m] = x[m, n] for elements of any size.

    Grid: cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N). A program owns a tile `[BLOCK_M, BLOCK_N]` of x; it
    reads the tile and writes it transposed. BLOCK_M, BLOCK_N: powers of two. COLUMN_MAJOR_GRID: 0
    or 1, as in `_start_of_tile`.
    """
    start_m, start_n = _start_of_tile(M, N, BLOCK_M, BLOCK_N, COLUMN_MAJOR_GRID)
    offs_m, offs_n = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    x_ptrs = x_ptr + offs_m[:, None].to(tl.int64) * stride_xm + offs_n[None, :]
    out_ptrs = out_ptr + offs_n[:, None].to(tl.int64) * M + offs_m[None, :]
    if (start_m + BLOCK_M <= M) & (start_n + BLOCK_N <= N):
        tl.store(out_ptrs, tl.trans(tl.load(x_ptrs)))
    else:
        mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
        tl.store(out_ptrs, tl.trans(tl.load(x_ptrs, mask=mask)), mask=tl.trans(mask))


@triton.jit
def _start_of_tile(
    M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMN_MAJOR_GRID: tl.constexpr
):
    """Return the first row and column of this program's tile.

    The next program's tile lies below if COLUMN_MAJOR_GRID is 1, else to the right.
    """
    pid = tl.program_id(0)
    if COLUMN_MAJOR_GRID:
        tiles = tl.cdiv(M, BLOCK_M)
        return pid % tiles * BLOCK_M, pid // tiles * BLOCK_N
    else:
        tiles = tl.cdiv(N, BLOCK_N)
        return pid // tiles * BLOCK_M, pid % tiles * BLOCK_N


@triton.jit
def _words_kernel(
    x_ptr, out_ptr, stride_xm, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMN_MAJOR_GRID: tl.constexpr,
):  # fmt: skip
    """out[n, m] = x[m, n] for elements of two bytes in rows at an odd distance.

    Grid: cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N). A program owns a tile `[BLOCK_M, BLOCK_N]` of x; it
    reads words of four bytes and writes words of out. M must be even, stride_xm odd, and x begin at
    a multiple of four bytes. BLOCK_M, BLOCK_N: powers of two. COLUMN_MAJOR_GRID: 0 or 1, as in
    `_start_of_tile`.
    """
    start_m, start_n = _start_of_tile(M, N, BLOCK_M, BLOCK_N, COLUMN_MAJOR_GRID)
    i = start_m // 2 + tl.arange(0, BLOCK_M // 2)[:, None]
    k = start_n // 2 + tl.arange(0, BLOCK_N // 2)[None, :]
    if (start_m + BLOCK_M <= M) & (start_n + BLOCK_N < N):
        # Words of even rows begin at columns 2k, those of odd ones at 2k - 1.
        even_rows = x_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
        even_rows += i.to(tl.int64) * stride_xm + k
        odd_rows = even_rows + (stride_xm - 1) // 2
        even, odd, next_odd = tl.load(even_rows), tl.load(odd_rows), tl.load(odd_rows + 1)
        words = out_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
        words += tl.trans(k).to(tl.int64) * M + tl.trans(i)
        tl.store(words, tl.trans((even & 0xFFFF) | (odd & 0xFFFF0000)))
        tl.store(words + M // 2, tl.trans((even >> 16) | (next_odd << 16)))
    else:
        x_ptrs = x_ptr + (2 * i).to(tl.int64) * stride_xm + 2 * k
        out_ptrs = out_ptr + (2 * tl.trans(k)).to(tl.int64) * M + 2 * tl.trans(i)
        for column in tl.static_range(2):
            for row in tl.static_range(2):
                mask = (2 * i + row < M) & (2 * k + column < N)
                x = tl.load(x_ptrs + (row * stride_xm + column), mask=mask)
                tl.store(out_ptrs + (column * M + row), tl.trans(x), mask=tl.trans(mask))


@triton.jit
def _items_kernel(
    x_ptr, out_ptr, stride_xm, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """out[n, m] = x[m, n], element by element, with offsets of 32 bits.

    Grid: (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)). A program owns a tile `[BLOCK_M, BLOCK_N]` of x; it
    reads the tile and writes it transposed. M * N and M * stride_xm must be below 2**31. BLOCK_M,
    BLOCK_N: powers of two.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    mask = (m < M) & (n < N)
    x = tl.load(x_ptr + (n + stride_xm * m), mask=mask, eviction_policy="evict_last")
    tl.store(out_ptr + (m + M * n), x, mask=mask)


# Bytes from which on a tensor counts as large: it keeps the GPU busy for many waves of programs.
LARGE = 2**26
# Programs that a grid may have along its second axis.
MOST_COLUMNS = 65535


def _tile(rows, columns, column_major, warps):
    """Return a configuration."""
    return {
        "BLOCK_M": rows,
        "BLOCK_N": columns,
        "COLUMN_MAJOR_GRID": column_major,
        "num_warps": warps,
    }


def _choose(itemsize, large):
    if itemsize <= 2:
        return _tile(128, 128, 1, 8) if large else _tile(128, 64, 0, 4)
    return _tile(64, 64, 1, 8) if large else _tile(64, 32, 1, 4)


def _suits(candidate, itemsize, large):
    # A thread makes two to eight accesses of 16 bytes, and rows of a tile are whole sectors.
    tile_bytes = candidate["BLOCK_M"] * candidate["BLOCK_N"] * itemsize
    accesses = tile_bytes // (16 * 32 * candidate["num_warps"])
    shortest = min(candidate["BLOCK_M"], candidate["BLOCK_N"]) * itemsize
    return 2 <= accesses <= 8 and shortest >= 64


def _choose_words(large):
    return _tile(128, 64, 1, 8)


def _choose_items(large):
    return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8}


CONFIGS = tuple(
    _tile(rows, columns, column_major, warps)
    for rows, columns in ((32, 64), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128))
    for column_major in (0, 1)
    for warps in (4, 8, 16)
)
WORDS_CONFIGS = tuple(
    _tile(rows, columns, column_major, warps)
    for rows, columns, warps in ((64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8))
    for column_major in (0, 1)
)
ITEMS_CONFIGS = tuple(
    {"BLOCK_M": rows, "BLOCK_N": 32, "num_warps": warps}
    for rows, warps in ((32, 2), (32, 4), (32, 8), (64, 4), (64, 8), (128, 8), (128, 16))
)
TILES = Configs(_transpose_kernel, CONFIGS, _choose, _suits)
WORDS = Configs(_words_kernel, WORDS_CONFIGS, _choose_words)
ITEMS = Configs(_items_kernel, ITEMS_CONFIGS, _choose_items)
transpose_fwd = cached_launch(transpose_fwd)

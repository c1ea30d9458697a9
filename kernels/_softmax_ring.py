"""Softmax of rows that outgrow the registers of a program: a ring in shared memory, in Gluon.

A program walks rows. Chunks of them arrive in a ring, by copies that no thread waits for; a row is
reduced as its chunks arrive, stored out of the ring, and each chunk that is stored makes room for
one of a later row. So everything is read once, and the memory has work throughout. A row that is
longer than a part of the ring is shared by neighbouring programs, which exchange a maximum and a
sum through memory meanwhile; a cooperative launch makes sure that all of them run. The scheme is
that of the clusters of QuACK, with memory in the place of what clusters share.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kernels._device import has_gluon, shared_bytes, sm_count
from kernels._launch import launch
from kernels._layout import ACCESS_BYTES

LOG2E = gl.constexpr(1.4426950408889634)
# Chunks of shared memory of a multiprocessor; at most so many are of the row at hand, and the rest
# of rows that come after it.
SLOTS = 14
MOST_CHUNKS = 8
CHUNK_BYTES = 16384
WARPS = 16
# The chunks, and the little that sums over the warps take.
RING_BYTES = SLOTS * CHUNK_BYTES + 2048
# Copies of 16 bytes, and sizes that Triton knows to be multiples of them.
ALIGNMENT = 16


@gluon.jit
def _fetch(ring, slot, x_ptr, row, columns, stride, M, end, EVEN: gl.constexpr):
    async_copy.async_copy_global_to_shared(
        ring.index(slot),
        x_ptr + row.to(gl.int64) * stride + columns,
        mask=(row < M) & ((columns < end) | EVEN),
        eviction_policy="evict_first",
    )


@gluon.jit
def _finite_or_zero(top):
    return gl.where(top == -float("inf"), 0.0, top)


@gluon.jit
def _exchanged(words_ptr, part, top, total, PARTS: gl.constexpr):
    """The maxima and sums of all parts of a row; what a part writes is never the zero that says
    that it has not."""
    high = top.to(gl.uint32, bitcast=True).to(gl.uint64) << 32
    word = high | total.to(gl.uint32, bitcast=True).to(gl.uint64)
    gl.atomic_xchg(words_ptr + part, word.to(gl.int64, bitcast=True), sem="relaxed")
    # Each warp reads all words, and waits for no other.
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ptrs = words_ptr + gl.arange(0, PARTS, layout)
    words = gl.load(ptrs, volatile=True)
    while gl.min((words != 0).to(gl.int32), 0) == 0:
        words = gl.load(ptrs, volatile=True)
    words = words.to(gl.uint64, bitcast=True)
    tops = (words >> 32).to(gl.uint32).to(gl.float32, bitcast=True)
    return tops, words.to(gl.uint32).to(gl.float32, bitcast=True)


@gluon.jit
def _forward_ring_kernel(
    x_ptr, y_ptr, words_ptr, stride_xm, M, N, scale, SIZE,
    PARTS: gl.constexpr, CHUNKS: gl.constexpr, SLOTS: gl.constexpr, BLOCK_N: gl.constexpr,
    ACCESS: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, ACCESS], [32, 1], [gl.num_warps(), 1], [1, 0])
    lanes: gl.constexpr = gl.SliceLayout(1, layout)
    ACCESSES: gl.constexpr = BLOCK_N // ACCESS
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [SLOTS, ACCESSES, ACCESS], plain)
    part, first = gl.program_id(0) % PARTS, gl.program_id(0) // PARTS
    step = gl.num_programs(0) // PARTS
    start = part * SIZE
    end = gl.minimum(start + SIZE, N)
    firsts = start + gl.arange(0, ACCESSES, lanes) * ACCESS
    offs = firsts[:, None] + gl.arange(0, ACCESS, gl.SliceLayout(0, layout))[None, :]
    slope = scale * LOG2E
    for k in gl.static_range(SLOTS):
        columns = k % CHUNKS * BLOCK_N + offs
        _fetch(ring, k, x_ptr, first + k // CHUNKS * step, columns, stride_xm, M, end, EVEN)
        async_copy.commit_group()
    head = 0
    for row in range(first, M, step):
        top = gl.full([ACCESSES], -float("inf"), gl.float32, lanes)
        total = gl.zeros([ACCESSES], gl.float32, lanes)
        for k in gl.static_range(CHUNKS):
            async_copy.wait_group(SLOTS - 1 - k)
            x = ring.index((head + k) % SLOTS).load(layout).to(gl.float32)
            inside = (k * BLOCK_N + firsts < end) | EVEN
            new_top = gl.maximum(top, gl.where(inside, gl.max(x, 1) * slope, -float("inf")))
            base = _finite_or_zero(new_top)
            more = gl.sum(gl.exp2(x * slope - base[:, None]), 1)
            total = total * gl.exp2(top - base) + gl.where(inside, more, 0.0)
            top = new_top
        row_top = gl.max(top, 0)
        total = gl.sum(total * gl.exp2(top - _finite_or_zero(row_top)), 0)
        if PARTS > 1:
            tops, totals = _exchanged(words_ptr + row * PARTS, part, row_top, total, PARTS)
            row_top = gl.max(tops, 0)
            total = gl.sum(totals * gl.exp2(tops - _finite_or_zero(row_top)), 0)
        base = _finite_or_zero(row_top)
        share = 1.0 / total
        y_row = y_ptr + row.to(gl.int64) * N
        # Two at a time: all threads wait for each other between reading a chunk and filling it.
        for pair in gl.static_range(0, CHUNKS, 2):
            for k in gl.static_range(pair, pair + 2):
                x = ring.index((head + k) % SLOTS).load(layout).to(gl.float32)
                columns = k * BLOCK_N + offs
                y = gl.exp2(x * slope - base) * share
                y = y.to(y_ptr.dtype.element_ty)
                gl.store(y_row + columns, y, mask=(columns < end) | EVEN)
            for k in gl.static_range(pair, pair + 2):
                columns = (k + SLOTS) % CHUNKS * BLOCK_N + offs
                later = row + (k + SLOTS) // CHUNKS * step
                slot = (head + k) % SLOTS
                _fetch(ring, slot, x_ptr, later, columns, stride_xm, M, end, EVEN)
                async_copy.commit_group()
        head = (head + CHUNKS) % SLOTS


@gluon.jit
def _backward_ring_kernel(
    y_ptr, dy_ptr, dx_ptr, words_ptr, stride_ym, stride_dym, M, N, scale, SIZE,
    PARTS: gl.constexpr, CHUNKS: gl.constexpr, SLOTS: gl.constexpr, BLOCK_N: gl.constexpr,
    ACCESS: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, ACCESS], [32, 1], [gl.num_warps(), 1], [1, 0])
    lanes: gl.constexpr = gl.SliceLayout(1, layout)
    ACCESSES: gl.constexpr = BLOCK_N // ACCESS
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ys = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [SLOTS, ACCESSES, ACCESS], plain)
    dys = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [SLOTS, ACCESSES, ACCESS], plain)
    part, first = gl.program_id(0) % PARTS, gl.program_id(0) // PARTS
    step = gl.num_programs(0) // PARTS
    start = part * SIZE
    end = gl.minimum(start + SIZE, N)
    firsts = start + gl.arange(0, ACCESSES, lanes) * ACCESS
    offs = firsts[:, None] + gl.arange(0, ACCESS, gl.SliceLayout(0, layout))[None, :]
    for k in gl.static_range(SLOTS):
        columns = k % CHUNKS * BLOCK_N + offs
        row = first + k // CHUNKS * step
        _fetch(ys, k, y_ptr, row, columns, stride_ym, M, end, EVEN)
        _fetch(dys, k, dy_ptr, row, columns, stride_dym, M, end, EVEN)
        async_copy.commit_group()
    head = 0
    for row in range(first, M, step):
        products = gl.zeros([ACCESSES], gl.float32, lanes)
        for k in gl.static_range(CHUNKS):
            async_copy.wait_group(SLOTS - 1 - k)
            slot = (head + k) % SLOTS
            y = ys.index(slot).load(layout).to(gl.float32)
            dy = dys.index(slot).load(layout).to(gl.float32)
            products += gl.where((k * BLOCK_N + firsts < end) | EVEN, gl.sum(y * dy, 1), 0.0)
        weighted = gl.sum(products, 0)
        if PARTS > 1:
            one = gl.to_tensor(1.0)
            _, parts = _exchanged(words_ptr + row * PARTS, part, one, weighted, PARTS)
            weighted = gl.sum(parts, 0)
        dx_row = dx_ptr + row.to(gl.int64) * N
        for pair in gl.static_range(0, CHUNKS, 2):
            for k in gl.static_range(pair, pair + 2):
                slot = (head + k) % SLOTS
                y = ys.index(slot).load(layout).to(gl.float32)
                dy = dys.index(slot).load(layout).to(gl.float32)
                columns = k * BLOCK_N + offs
                dx = (y * (dy - weighted) * scale).to(dx_ptr.dtype.element_ty)
                gl.store(dx_row + columns, dx, mask=(columns < end) | EVEN)
            for k in gl.static_range(pair, pair + 2):
                columns = (k + SLOTS) % CHUNKS * BLOCK_N + offs
                later = row + (k + SLOTS) // CHUNKS * step
                slot = (head + k) % SLOTS
                _fetch(ys, slot, y_ptr, later, columns, stride_ym, M, end, EVEN)
                _fetch(dys, slot, dy_ptr, later, columns, stride_dym, M, end, EVEN)
                async_copy.commit_group()
        head = (head + CHUNKS) % SLOTS


def rings(n: int, *tensors: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether rings take rows of n elements of these tensors, so many elements apart.

    Copies are of 16 bytes, and Gluon runs neither in the interpreter nor in a traced graph.
    """
    device = tensors[0].device
    if torch.compiler.is_dynamo_compiling() or not has_gluon(device):
        return False
    shared = _shared(n, tensors[0].element_size(), len(tensors))
    most = SLOTS // shared["SLOTS"] * sm_count(device)
    if shared_bytes(device) < RING_BYTES or shared["PARTS"] > most:
        return False
    sizes = (n, *strides, *(tensor.data_ptr() for tensor in tensors))
    return not any(size % ALIGNMENT for size in sizes)


def _shared(n: int, itemsize: int, tensors: int) -> dict[str, int]:
    """How programs share a row of n elements of so many tensors."""
    block = CHUNK_BYTES // (tensors * itemsize)
    # While a program waits for the other parts of its row, a second one computes.
    resident = 1 if tensors == 1 and n <= MOST_CHUNKS * block else 2
    parts = triton.next_power_of_2(-(-n * resident // (MOST_CHUNKS * block)))
    size = -(-n // (parts * ALIGNMENT)) * ALIGNMENT
    return {
        "SIZE": size,
        "PARTS": parts,
        "CHUNKS": -(-size // (2 * block)) * 2,
        "SLOTS": SLOTS // resident,
        "BLOCK_N": block,
        "ACCESS": ACCESS_BYTES // itemsize,
        "EVEN": n == parts * size and size % (2 * block) == 0,
        "num_warps": WARPS // resident,
    }


def _programs(m: int, shared: dict[str, int], device: torch.device) -> tuple:
    """How many programs share m rows, and the words of each row, zero at first."""
    parts, resident = shared["PARTS"], SLOTS // shared["SLOTS"]
    programs = min(m, resident * sm_count(device) // parts) * parts
    if parts == 1:
        return programs, None
    return programs, torch.zeros(m * parts, dtype=torch.int64, device=device)


def forward_ring(x: torch.Tensor, y: torch.Tensor, stride: int, scale: float) -> None:
    """y = softmax(scale x) of rows [..., N] that lie `stride` elements apart; scale positive."""
    n, m = x.shape[-1], y.numel() // y.shape[-1]
    shared = _shared(n, x.element_size(), 1)
    programs, words = _programs(m, shared, x.device)
    launch(
        _forward_ring_kernel, (programs,), x_ptr=x, y_ptr=y, words_ptr=words, stride_xm=stride,
        M=m, N=n, scale=scale, **shared, launch_cooperative_grid=words is not None,
    )  # fmt: skip


def backward_ring(
    y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, strides: tuple[int, int], scale: float
) -> None:
    """dx = scale y (dy - sum y dy) of rows [..., N]; those of y and dy lie `strides` apart."""
    n, m = y.shape[-1], dx.numel() // dx.shape[-1]
    shared = _shared(n, y.element_size(), 2)
    programs, words = _programs(m, shared, y.device)
    launch(
        _backward_ring_kernel, (programs,), y_ptr=y, dy_ptr=dy, dx_ptr=dx, words_ptr=words,
        stride_ym=strides[0], stride_dym=strides[1], M=m, N=n, scale=scale, **shared,
        launch_cooperative_grid=words is not None,
    )  # fmt: skip

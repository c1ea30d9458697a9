"""The epilogue of the product on Hopper: all that happens to a group's rows after their products.

Biases and factors are loaded by pointers, and a residual lies in slots of the ring. The rows are
finished and leave in parts of their columns, through slots of shared memory, by bulk stores; a
buffer is added to by bulk additions.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .epilogue import activated
from .hopper_tiles import GROUPS, as_matrix, halves


@builtin
def _add_to_global(desc, coord, source, _semantic=None):
    """Start a bulk addition of shared memory to a tensor; Triton 3.6 has no name for it here."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, source.handle)


@gluon.jit
def _leave(
    x, desc, stage, place, TURN: gl.constexpr, WHICH: gl.constexpr, TURNS: gl.constexpr,
    ADDED: gl.constexpr,
):  # fmt: skip
    """Store columns of a tile as soon as a slot of the group is free.

    TURN: how many blocks of the tile left before; TURNS: how many leave in all.
    """
    outer, inner, row, column = place
    OWN: gl.constexpr = stage.shape[0] // GROUPS
    # Each tile begins with the first slot, so no more slots than blocks are used in turn.
    USED: gl.constexpr = OWN if OWN < TURNS else TURNS
    slot = stage.index(WHICH * OWN + TURN % USED)
    # A tile may end with any slot, so the first blocks of the next one wait for all stores of it.
    tma.store_wait(TURN if TURN < USED else USED - 1)
    as_matrix(slot).store(x.to(desc.dtype))
    fence_async_shared()
    if len(desc.block_type.shape) == 4:  # noqa: SIM108  Triton takes one type of a choice
        coordinates = [outer, inner, row, column]
    else:
        coordinates = [row, column]
    if ADDED:
        _add_to_global(desc, coordinates, slot)
    else:
        tma.async_copy_shared_to_global(desc, coordinates, slot)


@gluon.jit
def of_batch(ptr, place, step_outer, step_inner, META: gl.constexpr):
    """The address of the numbers of a tile's batch."""
    if META[5]:
        ptr += gl.cast(place[0], gl.int64) * step_outer + gl.cast(place[1], gl.int64) * step_inner
    return ptr


@gluon.jit
def _columns(ptr, first, stride, N, LEAVING: gl.constexpr):
    """The numbers of LEAVING columns that begin at first; zero for columns past the end."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LEAVING, 16])
    columns = first + gl.arange(0, LEAVING, gl.SliceLayout(0, LAYOUT))
    return gl.load(ptr + columns.to(gl.int64) * stride, mask=columns < N, other=0.0)


@gluon.jit
def by_parts(ptr, first, stride, N, PARTS: gl.constexpr, LEAVING: gl.constexpr):
    """The numbers of a tile's columns, a tensor for each part."""
    found = ()
    for part in gl.static_range(PARTS):
        found = found + (_columns(ptr, first + part * LEAVING, stride, N, LEAVING),)  # noqa: RUF005
    return found


@gluon.jit
def rows_from(ptr, first, stride, M, ROWS: gl.constexpr, LEAVING: gl.constexpr):
    """The numbers of ROWS rows that begin at first; zero for rows past the end."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LEAVING, 16])
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return gl.load(ptr + rows.to(gl.int64) * stride, mask=rows < M, other=0.0)


@gluon.jit
def _affine(
    x, bias, rows, columns, epilogue, place, PART: gl.constexpr, LEAVING: gl.constexpr,
    META: gl.constexpr,
):  # fmt: skip
    """scale rows columns x + bias, of one part of a tile; bias, rows and columns may be None.

    Factors of columns that were not loaded beneath the products are loaded here.
    """
    scale, columns_ptr, N, strides = epilogue[2], epilogue[4], epilogue[6], epilogue[7]
    if META[8]:
        x = x * scale
    if rows is not None:
        x = x * rows[:, None]
    if columns is not None:
        x = x * columns[PART][None, :]
    elif columns_ptr is not None:
        ptr = of_batch(columns_ptr, place, strides[3], strides[4], META)
        x = x * _columns(ptr, place[3] + PART * LEAVING, strides[5], N, LEAVING)[None, :]
    if bias is not None:
        x = x + bias[PART].to(gl.float32)[None, :]
    return x


@gluon.jit
def _finish_part(
    x, y, descs, rings, epilogue, loaded, place, residual_first, PART: gl.constexpr,
    PARTS: gl.constexpr, WHICH: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """Finish the columns of one of the PARTS of a tile, and let them leave.

    x: float32 accumulators; y: those of up, or None. loaded: bias, bias of up, factors of rows and
    of columns.
    """
    out_desc, pre_desc, up_pre_desc = descs[4], descs[5], descs[6]
    bias, up_bias, rows, columns = loaded
    LEAVING: gl.constexpr = out_desc.block_type.shape[-1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LEAVING, 16])
    EACH: gl.constexpr = 1 + (pre_desc is not None) + (up_pre_desc is not None)
    TURNS: gl.constexpr = PARTS * EACH
    here = place[0], place[1], place[2], place[3] + PART * LEAVING
    x = gl.convert_layout(x, LAYOUT)
    x = _affine(x, bias, rows, columns, epilogue, place, PART, LEAVING, META)
    if pre_desc is not None:
        _leave(x, pre_desc, rings[3], here, PART * EACH, WHICH, TURNS, False)
    x = activated(x, META[9], META[10], out_desc.dtype == gl.bfloat16)
    if y is not None:
        y = gl.convert_layout(y, LAYOUT)
        y = _affine(y, up_bias, rows, columns, epilogue, place, PART, LEAVING, META)
        if up_pre_desc is not None:
            _leave(y, up_pre_desc, rings[3], here, PART * EACH + 1, WHICH, TURNS, False)
        x *= y
    if descs[3] is not None:
        x += as_matrix(rings[2].index(residual_first + PART)).load(LAYOUT).to(gl.float32)
    _leave(x, out_desc, rings[3], here, PART * EACH + EACH - 1, WHICH, TURNS, META[11])


@gluon.jit
def finish(
    x, y, descs, rings, epilogue, loaded, place, residual_first, PART: gl.constexpr,
    PARTS: gl.constexpr, WHICH: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """Finish columns of a tile and let them leave, in parts as wide as a slot.

    PART: which of the PARTS of the tile begins with the first column of x.
    """
    LEAVING: gl.constexpr = descs[4].block_type.shape[-1]
    if x.shape[1] > LEAVING:
        left, right = halves(x)
        left_y, right_y = y, y
        if y is not None:
            left_y, right_y = halves(y)
        HALF: gl.constexpr = x.shape[1] // LEAVING // 2
        finish(
            left, left_y, descs, rings, epilogue, loaded, place, residual_first, PART, PARTS,
            WHICH, META,
        )  # fmt: skip
        finish(
            right, right_y, descs, rings, epilogue, loaded, place, residual_first, PART + HALF,
            PARTS, WHICH, META,
        )  # fmt: skip
    # Columns past the end are left out. The branch also keeps the assembler from computing all
    # parts before the first one leaves.
    elif place[3] + PART * LEAVING < epilogue[6]:
        _finish_part(
            x, y, descs, rings, epilogue, loaded, place, residual_first, PART, PARTS, WHICH, META
        )  # fmt: skip

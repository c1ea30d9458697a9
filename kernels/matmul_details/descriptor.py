"""The product by tensor descriptors in Triton: TMA on Hopper, plain loads elsewhere.

It needs items of 16 bits, or of 8 in runs along K. The rows of its operands, or their columns,
start at multiples of 16 bytes. A fixed number of programs stride over the tiles, so the loads of
one tile overlap the epilogue of the one before.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .._runtime.configs import Config, Configs
from .._triton.memory import load_f32
from .batches import Walk
from .epilogue import activated, affine
from .launch import common_arguments
from .tiles import DESCRIPTOR_CONFIGS, MORE_DESCRIPTOR_CONFIGS, choose_descriptor, tile_coords


def suits(walk: Walk) -> bool:
    """Return whether descriptors can describe the operands of a launch."""
    a, b, up = (walk.operands[name] for name in ("a", "b", "up"))
    size = a.matrix.element_size()
    # Tensor cores of Hopper take 8 bits only in runs along K.
    runs = size == 2 or (size == 1 and not a.by_columns() and b.by_columns())
    if not runs or a.matrix.shape[1] == 0 or (up is not None and up.moving() != b.moving()):
        return False
    stored = _stored(walk)
    return all(stored[name].describable() for name in ("a", "b", "up", "out") if stored[name])


def launch_product(walk: Walk, epilogue: dict, config: Config, sms: int) -> None:
    """Start the kernel for the operands of a launch that it suits.

    epilogue: arguments of the kernel that all launches of a product share.
    """
    a, b = (walk.operands[name] for name in ("a", "b"))
    a_turned, b_turned = a.by_columns(), b.by_columns()
    m, n = a.matrix.shape[0], b.matrix.shape[1]
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n) * walk.count
    blocks = {
        "a": [block_k, block_m] if a_turned else [block_m, block_k],
        "b": [block_n, block_k] if b_turned else [block_k, block_n],
        "out": [block_m, block_n],
    }  # fmt: skip
    blocks |= {"up": blocks["b"], "pre": blocks["out"], "up_pre": blocks["out"]}
    stored = _stored(walk)
    descs = {f"{name}_desc": _described(stored[name], x, walk) for name, x in blocks.items()}
    _descriptor_kernel[(min(sms, tiles),)](
        **descs, A_TRANSPOSED=a_turned, B_TRANSPOSED=b_turned, A_STEPS=a.moving(),
        B_STEPS=b.moving(), PARTED=walk.parted, **common_arguments(walk, epilogue), **config,
    )  # fmt: skip


def _stored(walk):
    """The operands of a launch, the factors by the rows of their memory; up lies as b does."""
    a, b, up = (walk.operands[name] for name in ("a", "b", "up"))
    up = up and (up.transposed if b.by_columns() else up)
    return {**walk.operands, "a": a.stored, "b": b.stored, "up": up}


def _described(operand, block, walk):
    """A descriptor of the matrices of an operand, or None."""
    if operand is None:
        return None
    return TensorDescriptor(operand.matrix, *walk.described(operand, block))


@triton.jit
def _descriptor_kernel(
    a_desc, b_desc, up_desc, out_desc, pre_desc, up_pre_desc, bias_ptr, up_bias_ptr, residual_ptr,
    a_scale_ptr, b_scale_ptr, stride_r0, stride_r1, stride_rm, stride_rn, stride_x0, stride_x1,
    stride_xm, stride_y0, stride_y1, stride_yn, scale, inner_batches, batches, M, N, K,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, A_STEPS: tl.constexpr,
    B_STEPS: tl.constexpr, BATCHED: tl.constexpr, PARTED: tl.constexpr, SCALED: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out = activation(scale a b + bias) (scale a up + up_bias) + residual, for what TMA can read.

    Grid: programs, one a multiprocessor at most, which stride over the tiles [BLOCK_M, BLOCK_N] of
    all batches. Reads a [M, K], b [K, N] and up [K, N] by descriptors. Reads bias and up_bias [N]
    and residual [M, N] by pointers. Writes out [M, N], pre and up_pre by descriptors. Each but a,
    b and out may be None. With ACCUMULATE the result is added to out. Accumulates in float32.
    A_TRANSPOSED: a_desc describes a transposed, blocks [BLOCK_K, BLOCK_M]. B_TRANSPOSED: b_desc and
    up_desc describe blocks [BLOCK_N, BLOCK_K]. BATCHED: descriptors have two dimensions of batches
    before these, with blocks of one. A_STEPS, B_STEPS: 2 if the outer batch moves an operand, plus
    1 if the inner one does; up moves as b does. PARTED: inner batches are equal parts of K instead,
    in whole steps; descriptors read zeros past the end. GROUP_M: rows of tiles that share columns
    of b in the L2 cache.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    for number in tl.range(tl.program_id(0), tiles * batches, tl.num_programs(0), flatten=True):
        pid, outer, inner = number, 0, 0
        if BATCHED:
            pid = number % tiles
            outer = number // tiles // inner_batches
            inner = number // tiles % inner_batches
        pid_m, pid_n = tile_coords(pid, tiles_m, tiles_n, GROUP_M)
        first_m = pid_m * BLOCK_M
        first_n = pid_n * BLOCK_N
        SUM: tl.constexpr = tl.int32 if a_desc.dtype == tl.int8 else tl.float32
        acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
        if up_desc is not None:
            up_acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
        first_k, length = 0, K
        if PARTED:
            length = tl.cdiv(tl.cdiv(K, BLOCK_K), inner_batches) * BLOCK_K
            first_k = inner * length
        for start in range(0, length, BLOCK_K):
            at_k = first_k + start
            a = _block(a_desc, outer, inner, first_m, at_k, A_TRANSPOSED, BATCHED, A_STEPS)
            b = _block(b_desc, outer, inner, at_k, first_n, B_TRANSPOSED, BATCHED, B_STEPS)
            acc = tl.dot(a, b, acc, out_dtype=SUM)
            if up_desc is not None:
                up = _block(up_desc, outer, inner, at_k, first_n, B_TRANSPOSED, BATCHED, B_STEPS)
                up_acc = tl.dot(a, up, up_acc, out_dtype=SUM)
        offs_n = first_n + tl.arange(0, BLOCK_N)
        offs_m = first_m + tl.arange(0, BLOCK_M)
        x_ptr, y_ptr = a_scale_ptr, b_scale_ptr
        if BATCHED:
            if x_ptr is not None:
                x_ptr += outer.to(tl.int64) * stride_x0 + inner.to(tl.int64) * stride_x1
            if y_ptr is not None:
                y_ptr += outer.to(tl.int64) * stride_y0 + inner.to(tl.int64) * stride_y1
        pre = affine(
            acc, bias_ptr, scale, x_ptr, y_ptr, stride_xm, stride_yn, offs_m, offs_n, M, N, SCALED
        )  # fmt: skip
        if pre_desc is not None:
            _put(pre_desc, outer, inner, first_m, first_n, pre, BATCHED)
        out = activated(pre, ACTIVATION, PRECISE)
        if up_desc is not None:
            factor = affine(
                up_acc, up_bias_ptr, scale, x_ptr, y_ptr, stride_xm, stride_yn, offs_m, offs_n, M,
                N, SCALED,
            )  # fmt: skip
            if up_pre_desc is not None:
                _put(up_pre_desc, outer, inner, first_m, first_n, factor, BATCHED)
            out *= factor
        if residual_ptr is not None:
            mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
            rows, columns = offs_m.to(tl.int64)[:, None], offs_n.to(tl.int64)[None, :]
            first = residual_ptr
            if BATCHED:
                first += outer.to(tl.int64) * stride_r0 + inner.to(tl.int64) * stride_r1
            out += load_f32(first + rows * stride_rm + columns * stride_rn, mask)
        if ACCUMULATE:
            out += _block(out_desc, outer, inner, first_m, first_n, False, BATCHED, 3)
        _put(out_desc, outer, inner, first_m, first_n, out, BATCHED)


@triton.jit
def _block(
    desc, outer, inner, row, column, TRANSPOSED: tl.constexpr, BATCHED: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """The block of a matrix that begins at (row, column), in the matrix's own orientation."""
    if TRANSPOSED:
        row, column = column, row
    if BATCHED:
        rows: tl.constexpr = desc.block_shape[2]
        columns: tl.constexpr = desc.block_shape[3]
        outer = outer if STEPS >= 2 else 0
        inner = inner if STEPS % 2 else 0
        block = desc.load([outer, inner, row, column]).reshape(rows, columns)
    else:
        block = desc.load([row, column])
    return block.T if TRANSPOSED else block


@triton.jit
def _put(desc, outer, inner, row, column, block, BATCHED: tl.constexpr):
    """Store a block of a matrix in the dtype of its descriptor."""
    block = block.to(desc.dtype)
    if BATCHED:
        desc.store([outer, inner, row, column], block.reshape(1, 1, *block.shape))
    else:
        desc.store([row, column], block)


DESCRIPTOR = Configs(
    _descriptor_kernel,
    DESCRIPTOR_CONFIGS + MORE_DESCRIPTOR_CONFIGS,
    choose_descriptor,
    family="matmul",
)

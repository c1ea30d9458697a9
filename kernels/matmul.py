"""Matrix product with a fused epilogue: out = activation(scale a b + bias) + residual.

At M = N = K = 4096 in bfloat16 there are 1365 FLOP a byte, so the tensor cores decide. Programs
take the output tiles in groups of rows, so that the tiles in flight share their columns of b in the
L2 cache (Triton's matmul tutorial).

`_pointer_kernel` below takes every input, with masks. The two kernels with descriptors are faster,
and take most products of many rows. These and the other parts are in `kernels/matmul_details/`:

    checks.py        shapes, dtypes and devices of the operands
    batches.py       walks over batches; an operand may lie by rows or by columns
    padded.py        copies of operands whose rows begin anywhere, if the product is long enough
    split.py         parts of a long K as batches, if the tiles are few
    descriptor.py    the kernel by tensor descriptors, on any GPU
    hopper.py        the kernel of Hopper, whose groups of warps copy or multiply; hopper_*.py
                     have its parts
    epilogue.py      all that happens to a tile between accumulator and memory
    launch.py        arguments that the kernels share
    tiles.py         tiles of the kernels by pointers and by descriptors
    cost.py          a model of times, which chooses kernel, tile and parts of K

The epilogue works on the float32 accumulator, so it costs no memory traffic but for its own
operands. A float32 product is done as three tf32 products (tf32x3), which keeps float32 accuracy on
the tensor cores.
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import check_no_grad, needs_grad
from ._runtime.call_cache import cached_launch
from ._runtime.checks import MOST_ITEMS, check_flag, check_number, check_tensors, check_that
from ._runtime.configs import Configs
from ._runtime.device import float32_dot, is_hopper, sm_count
from ._runtime.layout import as_read
from ._runtime.traced import present, spread
from ._runtime.vector_access import access_items
from ._triton.arrival_counter import arrival_counters
from ._triton.memory import load_f32, store_as
from .matmul_details import descriptor, hopper
from .matmul_details.batches import Walk, walks
from .matmul_details.checks import check_operands
from .matmul_details.cost import parts_of
from .matmul_details.descriptor import DESCRIPTOR
from .matmul_details.epilogue import activated, affine
from .matmul_details.hopper import HOPPER
from .matmul_details.launch import (
    common_arguments,
    rule_key,
    scale_arguments,
    strides_of,
    whole_sectors,
)
from .matmul_details.padded import with_copies, write_back
from .matmul_details.split import launch_parts
from .matmul_details.tiles import (
    FEW_ROWS,
    MORE_POINTER_CONFIGS,
    POINTER_CONFIGS,
    choose_pointer,
    hopper_ends_first,
    tile_coords,
)

ACCUMULATES = {"matmul": "float32"}


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    *,
    residual: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    scale: float = 1.0,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate_into: torch.Tensor | None = None,
    save_preactivation: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return activation(scale a b + bias) + residual, accumulated in float32.

    With up it is the gated form: activation(scale a b + bias) (scale a up + up_bias) + residual.
    A long product takes memory for copies of operands whose rows do not begin at multiples of 16
    bytes. One with few tiles and a long K takes memory for float32 parts of its result.

    Args:
        a: `[..., M, K]`, float32, float16, bfloat16, float8_e4m3fn or int8, any strides. int8 is
            summed in int32, and float8 with the fast accumulation of the tensor cores.
        b: `[..., K, N]`, of the dtype of a, any strides. Its batch dimensions and those of a are
            broadcast, as by torch.matmul.
        bias: `[N]`, of the dtype of a (of the result, if a has 8 bits), or None.
        activation: "none", "relu", "leaky_relu" (slope 0.01), "gelu" (erf form), "gelu_tanh",
            "silu" or "tanh".
        residual: of the shape of the result or one that broadcasts to it, of the dtype of bias or
            float32, any strides; or None.
        up: the second factor of the gated form, of the shape and dtype of b, any strides; or None.
        up_bias: `[N]`, of the dtype of bias, or None.
        scale: the factor of the products, a real number.
        a_scale: float32, one factor or `[..., M, 1]`, one for each row of a; or None.
        b_scale: float32, one factor or `[..., 1, N]`, one for each column of b and up; or None.
            The product of scale and both factors must have a place in float32.
        out_dtype: float32 or the dtype of a; if a has 8 bits, float32, float16 or bfloat16, or
            int32 for int8 without an epilogue. None for the dtype of a, bfloat16 for float8 and
            int32 for int8.
        accumulate_into: float32, of the shape of the result, any strides. The result is added to
            it in place. No two of its entries may share memory.
        save_preactivation: also return the argument of the activation, and in the gated form its
            factor, in the dtype of the result.

    Returns:
        A new tensor `[..., M, N]`, or accumulate_into. With save_preactivation a tuple of that, the
        argument of the activation and, in the gated form, its factor. There is no backward pass.

    Raises:
        TypeError: an argument has another kind or dtype, or b, up or a bias another dtype than a.
        ValueError: shapes or devices do not fit, the activation is unknown, a size is too large, or
            an input wants a gradient.

    Source:
        Triton's tutorials 03 (matrix multiplication) and 09 (persistent matmul).

    Example:
        >>> a, b = torch.randn(4, 8, device="cuda"), torch.randn(8, 3, device="cuda")
        >>> matmul(a, b, activation="relu").shape
        torch.Size([4, 3])
    """
    # A short call has time for these questions alone. All else follows from the key of its plan.
    if (
        residual is None and up is None and up_bias is None and a_scale is None
        and b_scale is None and out_dtype is None and accumulate_into is None
        and save_preactivation is False and type(scale) is float and scale == 1.0
        and type(activation) is str and not needs_grad(a, b, bias)
    ):  # fmt: skip
        return plain_fwd(a, b, bias, activation)
    tensors = {
        "a": a, "b": b, "bias": bias, "residual": residual, "up": up, "up_bias": up_bias,
        "a_scale": a_scale, "b_scale": b_scale, "accumulate_into": accumulate_into,
    }  # fmt: skip
    tensors = {n: x for n, x in tensors.items() if n in ("a", "b") or x is not None}
    check_tensors(**tensors)
    check_no_grad(**tensors)
    check_flag("save_preactivation", save_preactivation)
    scale = check_number("scale", scale)
    out = product(
        a, b, bias, residual=residual, up=up, up_bias=up_bias, activation=activation, scale=scale,
        a_scale=a_scale, b_scale=b_scale, out_dtype=out_dtype, into=accumulate_into,
        keep=save_preactivation,
    )  # fmt: skip
    return tuple(x for x in out if x is not None) if save_preactivation else out[0]


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    activation: str = "none",
    scale: float = 1.0,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    into: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    keep: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the result of `matmul`, then the pre-activation and the factor of the gate or None.

    For the ops that are built on the product. It checks shapes and dtypes, and asks for no
    gradient. into: as accumulate_into. out: where the result is written, any rows apart; it may be
    the residual. keep: as save_preactivation.
    """
    dtype, residual, a_scale, b_scale = check_operands(
        a, b, bias, residual, up, up_bias, a_scale, b_scale, activation, scale, out_dtype, into,
        out, keep,
    )  # fmt: skip
    return product_of_fitting(
        a, b, bias, residual, up, up_bias, a_scale, b_scale, activation, scale, dtype, into, keep,
        out,
    )  # fmt: skip


def product_of_fitting(
    a, b, bias, residual, up, up_bias, a_scale, b_scale, activation, scale, dtype, into, keep, out
):
    """Return what `product` returns, for arguments that fit: no check compares them.

    PyTorch 2.11 traces no comparison of sizes that are symbols within an autograd function.
    """
    forward = _traced if torch.compiler.is_compiling() else _called
    bias, up_bias = (x if x is None else as_read(x).contiguous() for x in (bias, up_bias))
    return forward(
        as_read(a), as_read(b), bias, residual, up if up is None else as_read(up), up_bias,
        a_scale, b_scale, activation, scale, dtype, into, keep, out,
    )  # fmt: skip


def _called(
    a, b, bias, residual, up, up_bias, a_scale, b_scale, activation, scale, dtype, into, keep, out
):
    for name, size in (("a", a.shape[-2]), ("a", a.shape[-1]), ("b", b.shape[-1])):
        check_that(size <= MOST_ITEMS, f"{name}: a size of {size}, expected at most {MOST_ITEMS}")
    if into is not None and into.is_neg():
        raise ValueError("accumulate_into: a view with a lazy sign, expected plain memory to write")
    results = matmul_fwd(
        a, b, bias, residual, up, up_bias, a_scale, b_scale, into, out, activation, scale,
        scale != 1, dtype, keep,
    )  # fmt: skip
    if into is not None:
        # Then autograd notices if it has saved what is overwritten here.
        torch.autograd.graph.increment_version(into)
    return results


def plain_fwd(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """Return activation(a b + bias): the product without further parts, whose key is short."""
    return product(a, b, bias, activation=activation)[0]


def matmul_fwd(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    up: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    into: torch.Tensor | None,
    out: torch.Tensor | None,
    activation: str,
    scale: float,
    scaled: bool,
    dtype: torch.dtype,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the result, the pre-activation and the factor of the gate, the last two if `keep`.

    Operands as `product` has checked them: biases contiguous, residual of the result's shape.
    into, out: where the result is added or written, or None. scaled: whether scale is not one.
    """
    m, n = a.shape[-2], b.shape[-1]
    batch = () if a.dim() == b.dim() == 2 else torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*batch, m, n)
    out = into if out is None else out
    out = torch.empty(shape, dtype=dtype, device=a.device) if out is None else out
    pre = torch.empty(shape, dtype=dtype, device=a.device) if keep else None
    up_pre = torch.empty(shape, dtype=dtype, device=a.device) if keep and up is not None else None
    if out.numel() == 0:
        return out, pre, up_pre
    if batch:
        a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
        up = up if up is None else up.expand(*batch, *up.shape[-2:])
    by_row = {
        "a": a, "residual": residual, "out": out, "pre": pre, "up_pre": up_pre, "a_scale": a_scale,
    }  # fmt: skip
    # A factor of one makes sums in int32 float32. Products and squares of them would overflow.
    scaled = scaled or (a.dtype == torch.int8 and dtype != torch.int32)
    epilogue = {
        "bias_ptr": bias, "up_bias_ptr": up_bias, "scale": scale, "SCALED": scaled,
        "ACTIVATION": activation, "PRECISE": dtype == torch.float32,
        "ACCUMULATE": into is not None,
    }  # fmt: skip
    for walk in walks(tuple(batch), by_row, {"b": b, "up": up, "b_scale": b_scale}):
        _launch_whole(walk, epilogue)
    return out, pre, up_pre


def _launch_whole(walk: Walk, epilogue: dict) -> None:
    """Start a launch, with copies of operands and in parts of K if they pay."""
    a, b = (walk.operands[name].matrix for name in ("a", "b"))
    (m, k), n, added = a.shape, b.shape[1], epilogue["ACCUMULATE"]
    if m <= FEW_ROWS or a.element_size() != 2 or walk.count > 1:
        _launch(walk, epilogue)
        return
    beside = (walk.operands[name] for name in ("up", "pre", "a_scale", "b_scale"))
    if is_hopper(a.device) and all(x is None for x in beside):
        parts = parts_of(m, n, k, sm_count(a.device), whole_sectors(walk))
        if parts > 1 and (whole := with_copies(walk, added, summed=True)) is not None:
            launch_parts(whole, parts, epilogue, _launch)
            return
    whole = with_copies(walk, added) or walk
    _launch(whole, epilogue)
    write_back(whole, walk)


def _launch(walk: Walk, epilogue: dict) -> None:
    """Start the kernel that suits the operands of a launch."""
    a = walk.operands["a"].matrix
    key = rule_key(walk, epilogue["ACTIVATION"], epilogue["ACCUMULATE"])
    few = key["m"] <= FEW_ROWS and walk.count == 1
    if few or not descriptor.suits(walk):
        _launch_pointer(walk, epilogue, POINTER.pick(a.device, **key))
        return
    config = HOPPER.pick(a.device, **key)
    if hopper.suits(walk, config) and hopper_ends_first(**key):
        hopper.launch_product(walk, epilogue | scale_arguments(walk), config, key["sms"])
    else:
        config = DESCRIPTOR.pick(a.device, **key)
        descriptor.launch_product(walk, epilogue, config, key["sms"])


def _launch_pointer(walk, epilogue, config):
    """Start the pointer kernel, with memory for parts of K if the configuration has several."""
    assert not walk.parted, "parts of K are for kernels with descriptors"
    a, b, up, out = (walk.operands[name] for name in ("a", "b", "up", "out"))
    m, n, device = a.matrix.shape[0], b.matrix.shape[1], a.matrix.device
    a_turned, b_turned = a.by_columns(), b.by_columns()
    tiles = triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, config["BLOCK_N"]) * walk.count
    partial = counters = None
    if config["SPLITS"] > 1:
        shape = (2 if up else 1, tiles * config["SPLITS"], config["BLOCK_M"], config["BLOCK_N"])
        sums = torch.int32 if a.matrix.dtype == torch.int8 else torch.float32
        partial = torch.empty(shape, dtype=sums, device=device)
        counters = arrival_counters(device)
    pointers = {
        f"{name}_ptr": walk.operands[name] and walk.operands[name].matrix
        for name in ("a", "b", "up", "out", "pre", "up_pre")
    }
    _pointer_kernel[(tiles * config["SPLITS"],)](
        **pointers, partial_ptr=partial, counters_ptr=counters, **strides_of("a", a),
        **strides_of("b", b), **strides_of("u", up), **strides_of("o", out),
        # Only float32 has anything to split.
        PRECISION=float32_dot() if a.matrix.element_size() == 4 else "ieee",
        A_WRAPS=not a_turned or m % config["BLOCK_M"] == 0,
        B_WRAPS=b_turned or n % config["BLOCK_N"] == 0, A_TRANSPOSED=a_turned,
        B_TRANSPOSED=b_turned, A_ITEMS=_items(a.stored), B_ITEMS=_items(b.stored),
        OUT_ITEMS=_items(out), **common_arguments(walk, epilogue), **config,
    )  # fmt: skip


def _items(operand):
    """The items of an access of which the length of rows and their distance are multiples."""
    matrix = operand.matrix
    return access_items(matrix.element_size(), matrix.shape[1], matrix.stride(0))


# A traced graph has no addresses, and the choice of the kernel needs them.
@torch.library.custom_op("tilewright::matmul", mutates_args=())
def _traced_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    up: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    activation: str,
    scale: float,
    dtype: torch.dtype,
    keep: bool,
) -> list[torch.Tensor]:
    factors = a, b, bias, residual, up, up_bias, a_scale, b_scale, activation, scale
    return present(_called(*factors, dtype, None, keep, None))


@_traced_matmul.register_fake
def _(a, b, bias, residual, up, up_bias, a_scale, b_scale, activation, scale, dtype, keep):
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*batch, a.shape[-2], b.shape[-1])
    count = 1 if not keep else 2 if up is None else 3
    return [a.new_empty(shape, dtype=dtype) for _ in range(count)]


@torch.library.custom_op("tilewright::matmul_into", mutates_args=("into",))
def _traced_matmul_into(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    up: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    activation: str,
    scale: float,
    into: torch.Tensor,
) -> None:
    factors = a, b, bias, residual, up, up_bias, a_scale, b_scale, activation, scale
    _called(*factors, into.dtype, into, False, None)


def _traced(
    a, b, bias, residual, up, up_bias, a_scale, b_scale, activation, scale, dtype, into, keep, out
):
    factors = a, b, bias, residual, up, up_bias, a_scale, b_scale, activation, scale
    if into is not None:
        _traced_matmul_into(*factors, into)
        return into, None, None
    found = spread(_traced_matmul(*factors, dtype, keep), (True, keep, keep and up is not None))
    return found if out is None else (out.copy_(found[0]), None, None)


@triton.jit
def _pointer_kernel(
    a_ptr, b_ptr, up_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr, pre_ptr, up_pre_ptr,
    a_scale_ptr, b_scale_ptr, partial_ptr, counters_ptr,
    stride_a0, stride_a1, stride_am, stride_an, stride_b0, stride_b1, stride_bm, stride_bn,
    stride_u0, stride_u1, stride_um, stride_un, stride_r0, stride_r1, stride_rm, stride_rn,
    stride_o0, stride_o1, stride_om, stride_on, stride_x0, stride_x1, stride_xm, stride_y0,
    stride_y1, stride_yn, scale, inner_batches, batches, M, N, K,
    BATCHED: tl.constexpr, SCALED: tl.constexpr, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr,
    ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr, A_WRAPS: tl.constexpr, B_WRAPS: tl.constexpr,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, A_ITEMS: tl.constexpr,
    B_ITEMS: tl.constexpr, OUT_ITEMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """out = activation(scale a b + bias) (scale a up + up_bias) + residual, for any strides.

    Grid: SPLITS programs for each tile [BLOCK_M, BLOCK_N] of each batch of out. A program has a
    part of K. With more than one SPLITS each writes its sums to partial, float32, and draws a
    number from the counter of its tile, which must be zero at the start. The last one adds the
    parts in their order, finishes the tile and sets the counter to zero again. Reads a [M, K] and
    b [K, N] of its batch and, if they are not None, up [K, N], bias and up_bias [N], residual
    [M, N]. Writes out [M, N], and pre and up_pre, the arguments of the gate's factors, if they are
    not None; they have the strides of out. With ACCUMULATE the result is added to out. Accumulates
    in float32. Strides: of the outer and the inner batch, of rows, of columns. PRECISION: input
    precision of the product. PRECISE: precision of the activation. A_WRAPS, B_WRAPS: rows
    of a and columns of b past the end are read from the start. A_TRANSPOSED, B_TRANSPOSED: columns,
    not rows, are runs of memory. A_ITEMS, B_ITEMS: the items of an access, of which the length of a
    run and the distance of runs are multiples. OUT_ITEMS: the same of rows of out. GROUP_M: rows of
    tiles that share columns of b in the L2 cache. M, N and K need not be multiples of the blocks.
    """
    stride_om, N = stride_om // OUT_ITEMS * OUT_ITEMS, N // OUT_ITEMS * OUT_ITEMS
    if A_TRANSPOSED:
        stride_an, M = stride_an // A_ITEMS * A_ITEMS, M // A_ITEMS * A_ITEMS
    else:
        stride_am, K = stride_am // A_ITEMS * A_ITEMS, K // A_ITEMS * A_ITEMS
    if not B_TRANSPOSED:
        MOST_N: tl.constexpr = max(B_ITEMS, OUT_ITEMS)
        stride_bm, N = stride_bm // B_ITEMS * B_ITEMS, N // MOST_N * MOST_N
    elif A_TRANSPOSED or B_ITEMS > A_ITEMS:
        stride_bn, K = stride_bn // B_ITEMS * B_ITEMS, K // B_ITEMS * B_ITEMS
    else:
        stride_bn = stride_bn // B_ITEMS * B_ITEMS
    number = tl.program_id(0) // SPLITS
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    pid = number
    if BATCHED:
        batch = pid // (tiles_m * tiles_n)
        pid = pid % (tiles_m * tiles_n)
        outer = (batch // inner_batches).to(tl.int64)
        inner = (batch % inner_batches).to(tl.int64)
        a_ptr += outer * stride_a0 + inner * stride_a1
        b_ptr += outer * stride_b0 + inner * stride_b1
        out_ptr += outer * stride_o0 + inner * stride_o1
        if up_ptr is not None:
            up_ptr += outer * stride_u0 + inner * stride_u1
        if residual_ptr is not None:
            residual_ptr += outer * stride_r0 + inner * stride_r1
        if pre_ptr is not None:
            pre_ptr += outer * stride_o0 + inner * stride_o1
        if up_pre_ptr is not None:
            up_pre_ptr += outer * stride_o0 + inner * stride_o1
        if a_scale_ptr is not None:
            a_scale_ptr += outer * stride_x0 + inner * stride_x1
        if b_scale_ptr is not None:
            b_scale_ptr += outer * stride_y0 + inner * stride_y1
    pid_m, pid_n = tile_coords(pid, tiles_m, tiles_n, GROUP_M)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    steps = offs_k.to(tl.int64)
    in_rows, in_columns = offs_m[:, None] < M, offs_n[None, :] < N
    # Rows and columns past the end wrap around, so only K needs a mask in the loop. Wrapping would
    # hide from the compiler that they are runs of memory, unless they end with a block.
    a_rows, b_columns = offs_m, offs_n
    if A_WRAPS:
        a_rows = offs_m % M
    if B_WRAPS:
        b_columns = offs_n % N
    a_ptrs = a_ptr + a_rows.to(tl.int64)[:, None] * stride_am + steps[None, :] * stride_an
    columns = b_columns.to(tl.int64)[None, :]
    b_ptrs = b_ptr + steps[:, None] * stride_bm + columns * stride_bn
    SUM: tl.constexpr = tl.int32 if a_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    if up_ptr is not None:
        up_ptrs = up_ptr + steps[:, None] * stride_um + columns * stride_un
        up_acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    first, end = 0, K
    if SPLITS > 1:
        length = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
        first = tl.program_id(0) % SPLITS * length
        end = tl.minimum(K, first + length)
        a_ptrs += first.to(tl.int64) * stride_an
        b_ptrs += first.to(tl.int64) * stride_bm
        if up_ptr is not None:
            up_ptrs += first.to(tl.int64) * stride_um
    for start in range(first, end, BLOCK_K):
        in_a, in_b = start + offs_k[None, :] < K, start + offs_k[:, None] < K
        if not A_WRAPS:
            in_a &= in_rows
        if not B_WRAPS:
            in_b &= in_columns
        a = tl.load(a_ptrs, mask=in_a, other=0.0)
        b = tl.load(b_ptrs, mask=in_b, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=SUM)
        if up_ptr is not None:
            up = tl.load(up_ptrs, mask=in_b, other=0.0)
            up_acc = tl.dot(a, up, up_acc, input_precision=PRECISION, out_dtype=SUM)
            up_ptrs += tl.cast(stride_um, tl.int64) * BLOCK_K
        a_ptrs += tl.cast(stride_an, tl.int64) * BLOCK_K
        b_ptrs += tl.cast(stride_bm, tl.int64) * BLOCK_K
    if SPLITS > 1:
        # The parts of up lie behind those of b.
        within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        part_ptrs = partial_ptr + number.to(tl.int64) * (SPLITS * BLOCK_M * BLOCK_N) + within
        further = tl.num_programs(0).to(tl.int64) * (BLOCK_M * BLOCK_N)
        own = part_ptrs + tl.program_id(0) % SPLITS * (BLOCK_M * BLOCK_N)
        tl.store(own, acc)
        if up_ptr is not None:
            tl.store(own + further, up_acc)
        # All warps have written before one of them draws the number.
        tl.debug_barrier()
        if tl.atomic_add(counters_ptr + number, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(counters_ptr + number, 0)
        acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
        if up_ptr is not None:
            up_acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
        for split in range(SPLITS):
            acc += tl.load(part_ptrs + split * (BLOCK_M * BLOCK_N), volatile=True)
            if up_ptr is not None:
                other_ptrs = part_ptrs + further + split * (BLOCK_M * BLOCK_N)
                up_acc += tl.load(other_ptrs, volatile=True)
    rows, columns = offs_m.to(tl.int64)[:, None], offs_n.to(tl.int64)[None, :]
    mask = in_rows & in_columns
    offsets = rows * stride_om + columns * stride_on
    pre = affine(
        acc, bias_ptr, scale, a_scale_ptr, b_scale_ptr, stride_xm, stride_yn, offs_m, offs_n, M, N,
        SCALED,
    )  # fmt: skip
    if pre_ptr is not None:
        store_as(pre_ptr + offsets, pre, mask)
    out = activated(pre, ACTIVATION, PRECISE)
    if up_ptr is not None:
        factor = affine(
            up_acc, up_bias_ptr, scale, a_scale_ptr, b_scale_ptr, stride_xm, stride_yn, offs_m,
            offs_n, M, N, SCALED,
        )  # fmt: skip
        if up_pre_ptr is not None:
            store_as(up_pre_ptr + offsets, factor, mask)
        out *= factor
    if residual_ptr is not None:
        out += load_f32(residual_ptr + rows * stride_rm + columns * stride_rn, mask)
    if ACCUMULATE:
        out += load_f32(out_ptr + offsets, mask)
    store_as(out_ptr + offsets, out, mask)


POINTER = Configs(_pointer_kernel, POINTER_CONFIGS + MORE_POINTER_CONFIGS, choose_pointer)

plain_fwd = cached_launch(plain_fwd)
matmul_fwd = cached_launch(matmul_fwd)

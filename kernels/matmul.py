"""Matrix product with a fused epilogue: out = activation(scale a b + bias) + residual.

At M = N = K = 4096 in bfloat16 there are 1365 FLOP a byte, so the tensor cores decide. Programs
take the output tiles in groups of rows, so that the tiles in flight share their columns of b in the
L2 cache (Triton's matmul tutorial).

The pointer kernel takes every input, with masks. The descriptor kernel needs items of 16 bits. The
rows of its operands, or their columns, start at multiples of 16 bytes. Its tiles travel by tensor
descriptors (TMA on Hopper, plain loads elsewhere). A fixed number of programs stride over the
tiles, so the loads of one tile overlap the epilogue of the one before.

Either takes a and b by rows or by columns (`matmul_details/batches.py` walks batches). An operand
whose rows begin elsewhere is copied if the product is long enough (`matmul_details/padded.py`). A
long K is divided among programs if the tiles are few: within the pointer kernel, and as batches for
the others (`matmul_details/split.py`). A model of their times chooses among the kernels with
descriptors, their tiles and parts of K (`matmul_details/cost.py`).

The epilogue (`matmul_details/epilogue.py`) works on the float32 accumulator, so it costs no memory
traffic but for its own operands. A float32 product is done as three tf32 products (tf32x3), which
keeps float32 accuracy on the tensor cores.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ._runtime.autograd import check_no_grad, needs_grad
from ._runtime.call_cache import cached_launch
from ._runtime.checks import (
    FLOATING,
    MOST_ITEMS,
    check_flag,
    check_number,
    check_one_of,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_tensors,
    check_that,
    shown,
)
from ._runtime.configs import Configs
from ._runtime.device import float32_dot, is_hopper, shared_bytes, sm_count
from ._runtime.layout import ACCESS_BYTES, as_read
from ._runtime.traced import present, spread
from ._runtime.vector_access import access_items
from ._triton.arrival_counter import MOST_COUNTERS, arrival_counters
from ._triton.memory import load_f32, store_as
from .matmul_details import cost, hopper
from .matmul_details.batches import Walk, walks
from .matmul_details.cost import SECTOR_BYTES, parts_of
from .matmul_details.epilogue import (
    ACTIVATIONS,
    activated,
    affine,
    tile_coords,
)
from .matmul_details.padded import with_copies, write_back
from .matmul_details.split import launch_parts

LONG = ("gelu", "gelu_tanh", "silu", "tanh")
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
    batch, n = _check_factors(a, b, up)
    shape = (*batch, a.shape[-2], n)
    dtype = torch.float32 if into is not None else _result_dtype(a.dtype, out_dtype)
    # Factors of 8 bits have an epilogue of the result's dtype.
    beside = a.dtype if a.dtype in FLOATING else dtype
    for name, x in (("bias", bias), ("up_bias", up_bias)):
        if x is not None:
            check_shape(name, x, (n,))
            _check_dtype(name, x, beside)
            check_same_device(a=a, **{name: x})
    check_that(up is not None or up_bias is None, "up_bias: expected None, as up is")
    check_one_of("activation", activation, ACTIVATIONS)
    if residual is not None:
        _check_dtype("residual", residual, beside, torch.float32)
        residual = _expanded("residual", residual, shape, a)
    if a_scale is not None:
        _check_dtype("a_scale", a_scale, torch.float32)
        a_scale = _expanded("a_scale", a_scale, (*batch, a.shape[-2], 1), a)
    if b_scale is not None:
        _check_dtype("b_scale", b_scale, torch.float32)
        b_scale = _expanded("b_scale", b_scale, (*batch, 1, n), a)
    if dtype == torch.int32:
        extra = (bias, residual, up, a_scale, b_scale)
        plain = all(x is None for x in extra) and activation == "none" and scale == 1
        check_that(plain, "out_dtype: torch.int32, expected a floating dtype beside an epilogue")
    if into is not None:
        check_shape("accumulate_into", into, shape)
        if into.dtype != torch.float32:
            raise TypeError(f"accumulate_into: {into.dtype}, expected torch.float32")
        check_same_device(a=a, accumulate_into=into)
        check_that(not keep, "save_preactivation: True, expected False beside accumulate_into")
    if out is not None:
        check_shape("out", out, shape)
        _check_dtype("out", out, dtype)
        check_same_device(a=a, out=out)
        check_that(not keep and into is None, "out: expected None, as into and keep are given")
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


def _result_dtype(dtype, wanted):
    """Return the dtype of a result; TypeError if it cannot be `wanted`."""
    found = {
        torch.float8_e4m3fn: (torch.bfloat16, torch.float16, torch.float32),
        torch.int8: (torch.int32, torch.bfloat16, torch.float16, torch.float32),
    }.get(dtype, (dtype, torch.float32))
    if wanted is not None and wanted not in found:
        raise TypeError(f"out_dtype: {shown(wanted)}, expected one of {found}")
    return wanted or found[0]


def _check_dtype(name, x, *expected):
    if x.dtype not in expected:
        raise TypeError(f"{name}: {x.dtype}, expected {' or '.join(map(str, expected))}")


def _expanded(name, x, shape, a):
    """Return a view of x of a shape that it broadcasts to."""
    pairs = zip(reversed(x.shape), reversed(shape), strict=False)
    # A tracer takes no symbol for the size that it equals if it is looked up in a tuple.
    fits = x.dim() <= len(shape) and all(size == 1 or size == wanted for size, wanted in pairs)
    message = f"{name}: shape {tuple(x.shape)}, expected one that broadcasts to {tuple(shape)}"
    check_that(fits, message)
    check_same_device(a=a, **{name: x})
    return as_read(x).expand(shape)


def _check_factors(a, b, up):
    """Return the batch dimensions and N of a product; raise if the factors do not fit."""
    for name, x in (("a", a), ("b", b)):
        check_that(x.dim() >= 2, f"{name}: {x.dim()} dimensions, expected 2 or more")
    *over_a, _, k = a.shape
    *over_b, inner, n = b.shape
    check_that(inner == k, f"b: shape {tuple(b.shape)}, expected (..., {k}, N)")
    _check_dtype("a", a, *FLOATING, torch.float8_e4m3fn, torch.int8)
    check_same_dtype(a=a, b=b)
    check_same_device(a=a, b=b)
    if up is not None:
        check_shape("up", up, b.shape)
        check_same_dtype(a=a, up=up)
        check_same_device(a=a, up=up)
    if not over_a and not over_b:
        return (), n
    longest = max(len(over_a), len(over_b))
    over_a, over_b = ([1] * (longest - len(x)) + x for x in (over_a, over_b))
    check_that(
        all(p == q or 1 in (p, q) for p, q in zip(over_a, over_b, strict=True)),
        f"b: shape {tuple(b.shape)}, expected batches that broadcast to those of {tuple(a.shape)}",
    )
    return tuple(q if p == 1 else p for p, q in zip(over_a, over_b, strict=True)), n


def _called(
    a, b, bias, residual, up, up_bias, a_scale, b_scale, activation, scale, dtype, into, keep, out
):
    for name, size in (("a", a.shape[-2]), ("a", a.shape[-1]), ("b", b.shape[-1])):
        check_that(size <= MOST_ITEMS, f"{name}: a size of {size}, expected at most {MOST_ITEMS}")
    return matmul_fwd(
        a, b, bias, residual, up, up_bias, a_scale, b_scale, into, out, activation, scale,
        scale != 1, dtype, keep,
    )  # fmt: skip


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
        parts = parts_of(m, n, k, sm_count(a.device), _whole_sectors(walk))
        if parts > 1 and (whole := with_copies(walk, added, summed=True)) is not None:
            launch_parts(whole, parts, epilogue, _launch)
            return
    whole = with_copies(walk, added) or walk
    _launch(whole, epilogue)
    write_back(whole, walk)


def _launch(walk: Walk, epilogue: dict) -> None:
    """Start the kernel that suits the operands of a launch."""
    a, b, up, out = (walk.operands[name] for name in ("a", "b", "up", "out"))
    (m, k), n, device = a.matrix.shape, b.matrix.shape[1], a.matrix.device
    common = epilogue | {"inner_batches": walk.sizes[1], "batches": walk.count} | {
        "M": m, "N": n, "K": k, "BATCHED": walk.count > 1,
    }  # fmt: skip
    residual = walk.operands["residual"]
    common["residual_ptr"] = residual and residual.matrix
    common |= _strides("r", residual)
    factors = {}
    for name, letter, line in (("a_scale", "x", "m"), ("b_scale", "y", "n")):
        operand = walk.operands[name]
        factors[f"{name}_ptr"] = operand and operand.matrix
        strides = _strides(letter, operand)
        factors |= {key: strides[key] for key in (f"stride_{letter}{each}" for each in "01" + line)}
    common |= factors
    a_turned, b_turned = a.by_columns(), b.by_columns()
    stored = {"a": a.stored, "b": b.stored}
    if up is not None:
        stored["up"] = up.transposed if b_turned else up
    size = a.matrix.element_size()
    key = {
        "m": m, "n": n, "k": triton.cdiv(k, walk.count) if walk.parted else k,
        "batches": walk.count, "transposed": b_turned,
        "shared": shared_bytes(device), "sms": sm_count(device),
        "activation": epilogue["ACTIVATION"], "gated": up is not None, "itemsize": size,
        "staged": out.matrix.element_size() * (1 + epilogue["ACCUMULATE"])
        + (0 if residual is None else residual.matrix.element_size()),
        "whole_sectors": _whole_sectors(walk),
    }  # fmt: skip
    # Tensor cores of Hopper take 8 bits only in runs along K.
    runs = size == 2 or (size == 1 and not a_turned and b_turned)
    described = runs and k > 0 and all(each.describable() for each in (*stored.values(), out))
    few = m <= FEW_ROWS and walk.count == 1
    sms = key["sms"]
    described = described and not few and (up is None or _moving(up) == _moving(b))
    if described and hopper.suits(walk, config := HOPPER.pick(device, **key)) and _faster(**key):
        hopper.launch_product(walk, epilogue | factors, config, sms)
    elif described:
        config = DESCRIPTOR.pick(device, **key)
        block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n) * walk.count
        blocks = {
            "a": [block_k, block_m] if a_turned else [block_m, block_k],
            "b": [block_n, block_k] if b_turned else [block_k, block_n],
            "out": [block_m, block_n],
        }  # fmt: skip
        blocks |= {"up": blocks["b"], "pre": blocks["out"], "up_pre": blocks["out"]}
        descs = {
            f"{name}_desc": _described(stored.get(name, walk.operands[name]), block, walk)
            for name, block in blocks.items()
        }
        _descriptor_kernel[(min(sms, tiles),)](
            **descs, A_TRANSPOSED=a_turned, B_TRANSPOSED=b_turned,
            A_STEPS=_moving(a), B_STEPS=_moving(b), PARTED=walk.parted, **common, **config,
        )  # fmt: skip
    else:
        assert not walk.parted, "parts of K are for kernels with descriptors"
        config = POINTER.pick(device, **key)
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
            **pointers, partial_ptr=partial, counters_ptr=counters, **_strides("a", a),
            **_strides("b", b), **_strides("u", up), **_strides("o", out),
            # Only float32 has anything to split.
            PRECISION=float32_dot() if size == 4 else "ieee",
            A_WRAPS=not a_turned or m % config["BLOCK_M"] == 0,
            B_WRAPS=b_turned or n % config["BLOCK_N"] == 0, A_TRANSPOSED=a_turned,
            B_TRANSPOSED=b_turned, A_ITEMS=_run_items(a), B_ITEMS=_run_items(b),
            OUT_ITEMS=_row_items(out.matrix), **common, **config,
        )  # fmt: skip


def _strides(name, operand):
    """Strides of an operand as a kernel takes them: two of batches, of rows, of columns."""
    values = (0, 0, 0, 0) if operand is None else (*operand.steps, *operand.matrix.stride())
    return {f"stride_{name}{d}": value for d, value in zip("01mn", values, strict=True)}


def _whole_sectors(walk):
    """Whether rows of both factors in memory lie multiples of a sector of the L2 cache apart."""
    stored = (walk.operands[name].stored.matrix for name in ("a", "b"))
    rows = (x.stride(0) * x.element_size() for x in stored)
    return all(each % SECTOR_BYTES == 0 for each in rows)


def _run_items(operand):
    """The items of an access to an operand's runs of memory, which begin at their multiples."""
    return _row_items(operand.stored.matrix)


def _row_items(matrix):
    """The items of an access of which the length of rows and their distance are multiples."""
    return access_items(matrix.element_size(), matrix.shape[1], matrix.stride(0))


def _moving(operand):
    """Whether an operand has a matrix for each outer batch (2) and each inner batch (1)."""
    return 2 * (operand.steps[0] != 0) + (operand.steps[1] != 0)


def _described(operand, block, walk):
    """A descriptor of the matrices of an operand: two dimensions, or four if there are batches."""
    if operand is None:
        return None
    matrix = operand.matrix
    if walk.count == 1:
        return TensorDescriptor.from_tensor(matrix, block)
    # A matrix that all batches share has a single place along that dimension.
    over = [size if step else 1 for size, step in zip(walk.sizes, operand.steps, strict=True)]
    steps = [step or ACCESS_BYTES for step in operand.steps]
    return TensorDescriptor(
        matrix, [*over, *matrix.shape], [*steps, *matrix.stride()], [1, 1, *block]
    )


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
                up_ptrs = part_ptrs + further + split * (BLOCK_M * BLOCK_N)
                up_acc += tl.load(up_ptrs, volatile=True)
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


def _tile(m, n, k, group, warps, stages):
    return {
        "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group,
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


# The rules choose from these; the tuner tries those named MORE_ as well.
DESCRIPTOR_CONFIGS = (
    _tile(128, 256, 64, 8, 8, 3),
    _tile(128, 128, 64, 8, 8, 4),
    _tile(128, 128, 64, 8, 8, 3),
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


def _split(tile, splits):
    return tile | {"SPLITS": splits}


POINTER_TILES = (
    _tile(128, 64, 32, 8, 4, 4),
    _tile(128, 64, 64, 8, 8, 3),
    _tile(64, 64, 64, 8, 4, 2),
    _tile(128, 128, 32, 8, 8, 3),
    _tile(64, 64, 32, 8, 4, 2),
    _tile(32, 64, 64, 8, 4, 3),
)
# For few rows: nearly all traffic is b, so many programs have to copy it at once.
ROW_TILES = (_tile(16, 64, 128, 1, 4, 4), _tile(16, 32, 128, 1, 4, 3), _tile(16, 32, 64, 1, 4, 2))
POINTER_CONFIGS = tuple(
    _split(tile, splits) for tile in POINTER_TILES + ROW_TILES for splits in (1, 2, 4, 8, 16)
)
MORE_POINTER_CONFIGS = (
    *(_split(_tile(64, 64, 32, 8, 4, 4), splits) for splits in (1, 2)),
    _split(_tile(128, 64, 32, 8, 4, 3), 1),
    *(_split(_tile(16, 128, 64, 1, 4, 5), splits) for splits in (4, 8, 16)),
    *(_split(_tile(16, 32, 256, 1, 4, 4), splits) for splits in (1, 2, 4)),
)
# Programs of few rows that run beside each other on a multiprocessor.
FEW_ROWS, BESIDE = 16, 2
# Parts of K at most, and steps that a part has at least.
MOST_SPLITS, LEAST_STEPS = 16, 4


def _fitting(configs, itemsize, shared, staged, gated):
    """Those whose stages of a, b and up, and tiles of the epilogue, fit in `shared` bytes.

    staged: bytes in shared memory for each entry of a tile of the result, summed over the tensors
    that the epilogue reads or writes.
    """
    for config in configs:
        m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        items = config["num_stages"] * (m * k + (1 + gated) * k * n)
        # Two accumulators take the registers of a tile twice as wide.
        if gated and m * n > 128 * 128:
            continue
        if items * itemsize + staged * m * n + 1024 <= shared:
            yield config


def _choose_descriptor(
    m, n, k, batches, sms, shared, itemsize, transposed, activation, gated, staged, whole_sectors
):  # fmt: skip
    def us(config):
        # A gated tile has two products.
        tile, items = (config["BLOCK_M"], config["BLOCK_N"]), k * (1 + gated)
        return cost.tiles_us(
            cost.DESCRIPTOR, tile, m, n, items, batches, sms, itemsize, whole_sectors
        )

    return min(_described_configs(itemsize, shared, staged, activation, gated), key=us)


def _described_configs(itemsize, shared, staged, activation, gated):
    # exp needs registers that the widest tile does not leave.
    return _fitting(DESCRIPTOR_CONFIGS[activation in LONG :], itemsize, shared, staged, gated)


def _faster(
    m, n, k, batches, sms, shared, itemsize, transposed, activation, gated, staged, whole_sectors
):  # fmt: skip
    """Whether the Hopper kernel ends before the descriptor kernel."""
    configs = _described_configs(itemsize, shared, staged, activation, gated)
    tiles = {(config["BLOCK_M"], config["BLOCK_N"]) for config in configs}
    return cost.hopper_is_faster(tiles, m, n, k, batches, sms, itemsize, gated, whole_sectors)


def _choose_pointer(
    m, n, k, batches, sms, shared, itemsize, transposed, activation, gated, staged, whole_sectors
):  # fmt: skip
    few = m <= FEW_ROWS and itemsize == 2
    if itemsize == 4:
        first = 0 if m * n >= 2048 * 2048 else 1 if m * n >= 1024 * 1024 else 5
    else:
        first = 3 if m * n >= 4096 * 4096 else 2
    ranked = ROW_TILES if few else (POINTER_TILES[first], *POINTER_TILES[2:])
    tile = next(_fitting(ranked, itemsize, shared, 0, gated))
    tiles = triton.cdiv(m, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"]) * batches
    steps = triton.cdiv(k, tile["BLOCK_K"])
    room = sms * (BESIDE if few else 1)
    most = 1
    # K is split while programs are too few for the GPU and each keeps some steps for itself.
    while 2 * most * tiles <= room and 2 * most <= steps // LEAST_STEPS and most < MOST_SPLITS:
        most *= 2
    return tile | {"SPLITS": most if tiles <= MOST_COUNTERS else 1}


HOPPER = hopper.HOPPER
POINTER = Configs(_pointer_kernel, POINTER_CONFIGS + MORE_POINTER_CONFIGS, _choose_pointer)
DESCRIPTOR = Configs(
    _descriptor_kernel, DESCRIPTOR_CONFIGS + MORE_DESCRIPTOR_CONFIGS, _choose_descriptor
)

plain_fwd = cached_launch(plain_fwd)
matmul_fwd = cached_launch(matmul_fwd)

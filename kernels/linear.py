"""Linear layer with its activation: out = activation(x weightᵀ + bias), forward and backward.

    z = x weightᵀ + bias,  out = a(z),                             dz = dy a'(z)
    gated:  u = x upᵀ + up_bias,  out = a(z) u,                    dz = dy u a'(z),  du = dy a(z)
    dx = dz weight + du up,  dweight = dzᵀ x,  dbias = the sum of dz over rows, likewise for up

All products are those of `matmul.py`, which reads either operand by rows or by columns. So the
three products of a layer need no copy of a weight, an input or a gradient. The forward product
computes the activation from its float32 accumulator.

A layer keeps as little as its activation allows. Without one it keeps x and the weight alone. ReLU,
leaky ReLU and tanh have their slope in the result, which the next layer keeps anyway. GELU and SiLU
keep z, and a gate keeps z and u.

One kernel computes dz and du, and on the way the sums of their columns over some rows each. A
second one adds these up, in one order, so the gradients of biases are deterministic. Both compute
in float32. The gradient of a weight can be added to a float32 buffer within its product, as a
training with several microbatches wants it (Megatron-LM's fused accumulation has the idea).
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import (
    FLOATING,
    MOST_ITEMS,
    check_floating,
    check_one_of,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_tensors,
)
from ._runtime.configs import Configs
from ._runtime.device import sm_count
from ._runtime.launch_guard import guarded
from ._runtime.layout import ACCESS_BYTES, as_read, as_rows_2d
from ._triton.math import DENSITY, LOG2E, gelu_gate, gelu_gate_slope, normal, reciprocal
from ._triton.memory import load_f32, store_as
from .matmul import matmul, product, product_of_fitting
from .matmul_details.epilogue import ACTIVATIONS, LEAKY_SLOPE, activated

ACCUMULATES = {"linear": "float32"}
# Activations whose slope follows from their result.
FROM_RESULT = ("relu", "leaky_relu", "tanh")


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    *,
    up: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,
    up_main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return activation(x weightᵀ + bias), accumulated in float32.

    With up it is the gated form: activation(x weightᵀ + bias) (x upᵀ + up_bias).

    Args:
        x: `[..., K]`, float32, float16 or bfloat16, any strides.
        weight: `[N, K]`, of the dtype of x, any strides.
        bias: `[N]`, of the dtype of x, or None.
        activation: "none", "relu", "leaky_relu" (slope 0.01), "gelu" (erf form), "gelu_tanh",
            "silu" or "tanh".
        up: the weight of the second factor of the gated form, as weight, or None.
        up_bias: `[N]`, of the dtype of x, or None.
        main_grad: float32 `[N, K]`, any strides, or None. The backward pass adds the gradient of
            the weight to it, in place, and the weight itself gets none.
        up_main_grad: the same for up.

    Returns:
        A new contiguous tensor `[..., N]` of the dtype of x. It is differentiable once, in x,
        weights and biases.

    Raises:
        TypeError: an argument has another kind or dtype.
        ValueError: shapes or devices do not fit, the activation is unknown, a size is too large, or
            up_bias or up_main_grad is given without up.

    Source:
        Shazeer, "GLU variants improve transformer" (2020), has the gated form.

    Example:
        >>> x, weight = torch.randn(2, 4, 8, device="cuda"), torch.randn(3, 8, device="cuda")
        >>> linear(x, weight, activation="relu").shape
        torch.Size([2, 4, 3])
    """
    given = {"bias": bias, "up": up, "up_bias": up_bias}
    given |= {"main_grad": main_grad, "up_main_grad": up_main_grad}
    given = {name: t for name, t in given.items() if t is not None}
    if not given.keys() - {"bias"} and not needs_grad(x, weight, bias):
        out = _quick(x, weight, bias, activation)
        if out is not None:
            return _in_shape_of(x, out)
    _check(x, weight, activation, given)
    if needs_grad(x, weight, bias, up, up_bias):
        out = _Linear.apply(x, weight, bias, up, up_bias, activation, main_grad, up_main_grad)
    else:
        out, _, _ = linear_fwd(x, weight, bias, up, up_bias, activation, False)
    return _in_shape_of(x, out)


def _in_shape_of(x, out):
    """Return the rows of the result in the shape that x has but for its last dimension.

    Autograd lets nobody write to a view that an autograd function has made.
    """
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, up, up_bias, activation, main_grad, up_main_grad):
        keep = up is not None or activation not in ("none", *FROM_RESULT)
        out = z = u = None
        if not keep:
            out = _quick(x, weight, bias, activation)
        if out is None:
            out, z, u = linear_fwd(x, weight, bias, up, up_bias, activation, keep)
        slope_from = z if keep else out if activation != "none" else None
        # A slope depends on the biases; `once` must see them where nothing else wants a gradient.
        biases = (None, None) if slope_from is None else (bias, up_bias)
        ctx.save_for_backward(x, weight, up, slope_from, u, *biases)
        ctx.activation = activation
        # Autograd would take a write to a saved tensor for a fault.
        ctx.main_grads = main_grad, up_main_grad
        return out

    @staticmethod
    @once
    def backward(ctx, dy):
        x, weight, up, slope_from, u, *_ = ctx.saved_tensors
        wants_x, wants_w, wants_b, wants_up, wants_up_b, *_ = ctx.needs_input_grad
        # dy has the shape of the rows, but any strides.
        dz, du, dbias, dup_bias = as_rows_2d(as_read(dy)), None, None, None
        if slope_from is not None or wants_b:
            made, du, dbias, dup_bias = linear_grad_fwd(
                dz, slope_from, u, ctx.activation, wants_b, wants_up_b
            )
            dz = dz if made is None else made
        dx = dweight = dup = None
        if wants_x:
            dx = _product(dz, weight)
            if up is not None:
                dx = _product(du, up, residual=dx)
            dx = dx.view(x.shape)
        main_grad, up_main_grad = ctx.main_grads
        if wants_w:
            dweight = _weight_grad(dz, x, weight, main_grad)
        if wants_up:
            dup = _weight_grad(du, x, up, up_main_grad)
        return dx, dweight, dbias, dup, dup_bias, None, None, None


def _weight_grad(dz, x, weight, main_grad):
    """Return dzᵀ x in the layout of the weight, or None after adding it to main_grad."""
    rows = as_rows_2d(as_read(x))
    if main_grad is not None:
        _product(dz.T, rows, into=main_grad)
        return None
    if weight.stride(0) == 1 and weight.shape[1] > 1 and weight.stride(1) > 1:
        return _product(rows.T, dz).T
    return _product(dz.T, rows)


def _product(a, b, residual=None, into=None):
    """Return a b + residual, or add it to `into`; the factors fit."""
    if torch.compiler.is_compiling():
        dtype = a.dtype if into is None else torch.float32
        return product_of_fitting(
            a, b, None, residual, None, None, None, None, "none", 1.0, dtype, into, False, None
        )[0]
    if residual is None and into is None:
        # A known call of it takes the host less time.
        return matmul(a, b)
    return product(a, b, residual=residual, into=into)[0]


def _quick(x, weight, bias, activation):
    """Return the rows of the result of a layer without a gate that keeps nothing, or None.

    A short call has no time for checks with names. None leaves it to them to find a fault, and to
    the product with all of its options to compute what `matmul` cannot.
    """
    if torch.compiler.is_compiling():
        return None
    try:
        if x.dtype not in FLOATING or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
            return None
        rows = x if x.dim() == 2 else as_rows_2d(x)
        return matmul(rows, weight.T, bias, activation)
    except (AttributeError, IndexError, TypeError, ValueError):
        return None


def linear_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    up: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return out `[M, N]`, and z and u if `keep`; the arguments are those of `linear`, checked."""
    return product_of_fitting(
        as_rows_2d(x), weight.T, bias, None, up if up is None else up.T, up_bias, None, None,
        activation, 1.0, x.dtype, None, keep, None,
    )  # fmt: skip


def linear_grad_fwd(
    dy: torch.Tensor,
    slope_from: torch.Tensor | None,
    u: torch.Tensor | None,
    activation: str,
    wants_bias: bool,
    wants_up_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return dz and du `[M, N]`, and the sums of their columns `[N]` if wanted.

    dy: `[M, N]`, contiguous in N. slope_from: z, or the result of an activation of FROM_RESULT. It
    is None if there is no activation. Then dz is dy, and None is returned in its place. u: the
    factor of the gate, or None, as du then is.
    """
    m, n = dy.shape
    dz = None if slope_from is None else torch.empty((m, n), dtype=dy.dtype, device=dy.device)
    du = None if u is None else torch.empty((m, n), dtype=dy.dtype, device=dy.device)
    sums = [
        torch.empty(n, dtype=dy.dtype, device=dy.device) if wanted else None
        for wanted in (wants_bias, wants_up_bias)
    ]
    if n == 0:
        return dz, du, *sums
    config = SLOPES.pick(dy.device, n=min(n, WIDE), itemsize=dy.element_size())
    tiles = (n - 1) // config["BLOCK_N"] + 1
    # As many parts of the rows as fill the device, and a block of rows at least in each.
    parts = max(1, min(-(-m // config["BLOCK_M"]), -(-PROGRAMS * sm_count(dy.device) // tiles)))
    rows = -(-m // parts)
    partial = [
        None if each is None else torch.empty((parts, n), dtype=torch.float32, device=dy.device)
        for each in sums
    ]
    _slope_kernel[(parts * tiles,)](
        dy_ptr=dy, slope_ptr=slope_from, u_ptr=u, dz_ptr=dz,
        du_ptr=du, sums_ptr=partial[0], up_sums_ptr=partial[1], stride_dy=dy.stride(0),
        M=m, N=n, rows=rows, tiles=tiles, ACTIVATION=activation,
        PRECISE=dy.dtype == torch.float32, **config,
    )  # fmt: skip
    for part, total in zip(partial, sums, strict=True):
        if part is not None:
            _column_kernel[(-(-n // COLUMNS),)](
                part_ptr=part, out_ptr=total, N=n, parts=parts,
                BLOCK_M=ROWS_AT_ONCE, BLOCK_N=COLUMNS, num_warps=4,
            )  # fmt: skip
    return dz, du, *sums


def _check(x, weight, activation, given):
    """Raise TypeError or ValueError unless the arguments are such as `linear` takes."""
    check_tensors(x=x, weight=weight, **given)
    check_floating(x=x)
    if x.dim() == 0:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected [..., K]")
    k = x.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != k:
        raise ValueError(f"weight: shape {tuple(weight.shape)}, expected (N, {k})")
    check_same_dtype(x=x, weight=weight)
    check_same_device(x=x, weight=weight)
    for name, tensor in given.items():
        check_shape(name, tensor, weight.shape[:1] if "bias" in name else weight.shape)
        if "main_grad" not in name:
            check_same_dtype(x=x, **{name: tensor})
        elif tensor.dtype != torch.float32:
            raise TypeError(f"{name}: {tensor.dtype}, expected torch.float32")
        elif not torch.compiler.is_compiling() and tensor.is_neg():
            raise ValueError(f"{name}: a view with a lazy sign, expected plain memory to write")
        check_same_device(x=x, **{name: tensor})
        if name.startswith("up_") and "up" not in given:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected None, as up is")
    check_one_of("activation", activation, ACTIVATIONS)
    if torch.compiler.is_compiling():
        return
    for name, size in (("x", x.numel() // max(k, 1)), ("x", k), ("weight", weight.shape[0])):
        if size > MOST_ITEMS:
            raise ValueError(f"{name}: a size of {size}, expected at most {MOST_ITEMS}")


@triton.jit
def _slope_kernel(
    dy_ptr, slope_ptr, u_ptr, dz_ptr, du_ptr, sums_ptr, up_sums_ptr,
    stride_dy, M, N, rows, tiles, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dz = dy u a'(z), du = dy a(z), and the sums of both over `rows` rows, computed in float32.

    Grid: parts * tiles, tiles = cdiv(N, BLOCK_N). A program owns BLOCK_N columns of `rows` rows. It
    reads dy, whose rows lie stride_dy apart, and z or the result of the activation at slope_ptr,
    and u. It writes dz, du, and a row of the sums [parts, N], float32.

    Each pointer but dy_ptr may be None. Without slope_ptr dz is dy, without u_ptr u is one. The
    slope is that of a result for "relu", "leaky_relu" and "tanh" without u, else that of z.
    """
    part = (tl.program_id(0) // tiles).to(tl.int64)
    cols = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    wide = (cols < N)[None, :]
    first = part * rows
    last = tl.minimum(first + rows, M)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    up_acc = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(first, last, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        mask = (offs_m < last)[:, None] & wide
        places = offs_m[:, None] * N + cols[None, :]
        dz = load_f32(dy_ptr + offs_m[:, None] * stride_dy + cols[None, :], mask)
        if slope_ptr is not None:
            at = load_f32(slope_ptr + places, mask)
            if u_ptr is not None:
                u = load_f32(u_ptr + places, mask)
                du = dz * activated(at, ACTIVATION, PRECISE)
                store_as(du_ptr + places, du, mask)
                if up_sums_ptr is not None:
                    up_acc += tl.sum(du, 0)
                dz = dz * u * _slope(at, activated(at, ACTIVATION, PRECISE), ACTIVATION, PRECISE)
            else:
                dz = dz * _slope(at, at, ACTIVATION, PRECISE)
            store_as(dz_ptr + places, dz, mask)
        if sums_ptr is not None:
            acc += tl.sum(dz, 0)
    if sums_ptr is not None:
        tl.store(sums_ptr + part * N + cols, acc, mask=cols < N)
    if up_sums_ptr is not None:
        tl.store(up_sums_ptr + part * N + cols, up_acc, mask=cols < N)


@triton.jit
def _slope(z, result, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr):
    """Return a'(z); result: a(z). "relu", "leaky_relu" and "tanh" look at the result alone."""
    if ACTIVATION == "relu":
        # NaN is not at most zero, so it passes a gradient on, as in PyTorch.
        return tl.where(result <= 0, 0.0, 1.0)
    elif ACTIVATION == "leaky_relu":
        return tl.where(result > 0, 1.0, LEAKY_SLOPE)
    elif ACTIVATION == "tanh":
        return 1.0 - result * result
    elif ACTIVATION == "gelu":
        share, bell = normal(z, PRECISE)
        return share + DENSITY * z * bell
    elif ACTIVATION == "gelu_tanh":
        return gelu_gate_slope(z, gelu_gate(z, PRECISE))
    elif ACTIVATION == "silu":
        gate = reciprocal(1 + tl.exp2(z * -LOG2E), PRECISE)
        return gate + z * gate * (1 - gate)
    else:
        return tl.full(z.shape, 1.0, tl.float32)


@triton.jit
def _column_kernel(
    part_ptr, out_ptr, N, parts, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """out[n] = the sum of part [parts, N] over its rows, in float32.

    Grid: cdiv(N, BLOCK_N). A program owns BLOCK_N columns, reads BLOCK_M rows at a time, and writes
    out [N] in its dtype.
    """
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, parts, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        mask = (offs_m < parts)[:, None] & (cols < N)[None, :]
        acc += load_f32(part_ptr + offs_m.to(tl.int64)[:, None] * N + cols[None, :], mask)
    store_as(out_ptr + cols, tl.sum(acc, 0), cols < N)


# The choice of a tile is the same for all rows of this length or more.
WIDE = 4096
# Programs of a multiprocessor that the parts of the rows make.
PROGRAMS = 8
# The tile of the sums of partial sums.
ROWS_AT_ONCE, COLUMNS = 32, 32
SLOPE_CONFIGS = tuple(
    {"BLOCK_M": rows, "BLOCK_N": columns, "num_warps": warps}
    for columns in (64, 128, 256, 512, 1024)
    for rows in (1, 2, 4, 8, 16)
    for warps in (1, 2, 4, 8)
    if 8 <= rows * columns // (32 * warps) <= 32
)


def _choose_slope(n, itemsize):
    # One access of 16 bytes a thread of a row, and two rows at once.
    columns = min(128 * ACCESS_BYTES // itemsize, max(16, 1 << (n - 1).bit_length()))
    return {"BLOCK_M": 2, "BLOCK_N": columns, "num_warps": max(1, columns * itemsize // 512)}


def _suits(candidate, n, itemsize):
    return candidate["BLOCK_N"] < 2 * max(n, 64)


SLOPES = Configs(_slope_kernel, SLOPE_CONFIGS, _choose_slope, _suits)
linear_fwd = guarded(linear_fwd)
linear_grad_fwd = cached_launch(linear_grad_fwd)

"""Cross entropy of logits and class indices, with label smoothing and z-loss; forward and backward.

The formulas are those of kernels/_cross_entropy.py. Bytes: the forward pass reads the logits;
where gradients are wanted it writes theirs too, at once, and the backward pass only multiplies by
the gradient of the loss: not at all, and without the host waiting, where that is one. So training
costs one read and one write of the logits where a backward pass of its own costs another read
(Liger-Kernel, Hsu et al., 2024, has the idea, and writes over the logits, which this op does not).
FLOPs: about 10 an item, so memory decides.

The loss alone is one walk with a running maximum and sum in each lane. For the gradient a row stays
in the registers of a program, in the dtype in which it came, and is read once. Of a row that is too
long for them the beginning is walked twice, the second time out of the L2, which it does not leave
while few rows are under way. The last program to finish adds up the losses (kernels/_ticket.py).
"""

import torch
import triton
import triton.language as tl

from kernels import _cross_entropy as shared
from kernels._checks import floating
from kernels._contract import Cost, Op, Tensor, case
from kernels._cross_entropy import (
    ROW_CONFIGS,
    WALK_CONFIGS,
    choose_row,
    choose_walk,
    count_of,
    gradient_of_row,
    own_logit,
    row_loss,
    suits_row,
    sum_of,
    walk,
)
from kernels._launch import launch, needs_grad
from kernels._layout import rows_of
from kernels._ticket import ticket
from kernels._tuned import Configs


def cross_entropy_reference(
    logits, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, reduction="mean"
):
    return shared.reference(logits, targets, ignore_index, label_smoothing, z_loss, reduction)


def _cost(a_case, direction, itemsize):
    logits = a_case["M"] * a_case["V"]
    written = logits * itemsize if direction == "both" else 0
    return Cost(
        logits * itemsize + 8 * a_case["M"], written + itemsize, (10 if written else 5) * logits
    )


CROSS_ENTROPY = Op(
    "cross_entropy",
    cross_entropy_reference,
    {
        "logits": Tensor("M V"),
        "targets": Tensor("M", "int64", grad=False, below="V", sentinel=("ignored", -100)),
    },
    _cost,
    edge=(
        case(M=1, V=1),
        case(M=3, V=127),
        case("ignored", M=17, V=129),
        case(M=2, V=1024),
        case(M=0, V=64),
        case("none", M=9, V=200, layout="padded"),
        case(M=9, V=200, layout="offset"),
        case("sum", "smooth", M=9, V=40, layout="transposed"),
        case(M=4, V=100, layout="expanded"),
        case("smooth", M=5, V=300, values="large"),
        case("smooth", "z", "ignored", M=9, V=300),
        case("none", "z", "ignored", M=9, V=300),
        case(M=5, V=300, values="equal"),
        case(M=5, V=300, values="spike"),
        case("none", M=5, V=300, values="inf"),
        case("none", M=6, V=100, values="infinities"),
        case(M=2, V=40000),
        case(M=1, V=270000, dtypes=("float32",)),
        case("smooth", "z", "ignored", M=3, V=33000, dtypes=("float16",)),
    ),
    sweep=(
        case(M=8192, V=32000, dtypes=("bfloat16",)),
        case(M=8192, V=128256, dtypes=("bfloat16",)),
        case(M=4096, V=1024, dtypes=("bfloat16",)),
        case(M=4096, V=32000, dtypes=("float16", "float32")),
        case(M=4096, V=65536, dtypes=("bfloat16",)),
        case("smooth", "z", "ignored", M=8192, V=32000, dtypes=("bfloat16",)),
    ),
    passes=("forward", "both"),
    flags={
        "ignored": {},
        "smooth": {"label_smoothing": 0.1},
        "z": {"z_loss": 1e-3},
        "sum": {"reduction": "sum"},
        "none": {"reduction": "none"},
    },
)
ACCUMULATES = {"cross_entropy": "float32"}
# Losses that the last program adds up at a time.
SUMMED = tl.constexpr(2048)


@triton.jit
def _finish(
    losses_ptr, out_ptr, ticket_ptr, targets_ptr, count_ptr, M, ignore_index, MEAN: tl.constexpr
):  # fmt: skip
    """Called by each program after its last loss; the last one adds up all."""
    # Release: the losses are in memory before the number is drawn. Acquire: the last sees all.
    tl.debug_barrier()
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        loss = sum_of(losses_ptr, M, SUMMED)
        if MEAN:
            count = count_of(targets_ptr, M, ignore_index, SUMMED)
            loss = loss / count
            if count_ptr is not None:
                tl.store(count_ptr, count)
        tl.store(out_ptr, loss.to(out_ptr.dtype.element_ty))
        tl.store(ticket_ptr, 0)


@triton.jit
def _loss_kernel(
    logits_ptr, targets_ptr, losses_ptr, out_ptr, ticket_ptr, stride_m, M, V, ignore_index,
    smoothing, z_loss, SMOOTH: tl.constexpr, MEAN: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # A traced graph hands floats over as float64.
    smoothing, z_loss = tl.cast(smoothing, tl.float32), tl.cast(z_loss, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_m
    target = tl.load(targets_ptr + row)
    loss = 0.0
    if target != ignore_index:
        own, _ = own_logit(row_ptr, target, V)
        top, total, plain = walk(row_ptr, V, SMOOTH, UNROLL, BLOCK_V)
        loss, _ = row_loss(own, top, total, plain, V, smoothing, z_loss, SMOOTH)
    tl.store(losses_ptr + row, loss.to(losses_ptr.dtype.element_ty))
    if out_ptr is not None:
        _finish(losses_ptr, out_ptr, ticket_ptr, targets_ptr, None, M, ignore_index, MEAN)


@triton.jit
def _gradient_kernel(
    logits_ptr, targets_ptr, losses_ptr, out_ptr, ticket_ptr, dlogits_ptr, kept_ptr, count_ptr,
    stride_m, M, V, walked, ignore_index, smoothing, z_loss,
    SMOOTH: tl.constexpr, MEAN: tl.constexpr, WALKS: tl.constexpr, KEPT: tl.constexpr,
    AHEAD: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    smoothing, z_loss = tl.cast(smoothing, tl.float32), tl.cast(z_loss, tl.float32)
    scale = 1.0
    if kept_ptr is not None:
        scale /= tl.load(kept_ptr)
    row = tl.program_id(0).to(tl.int64)
    gradient_of_row(
        logits_ptr + row * stride_m, dlogits_ptr + row * V, losses_ptr + row,
        tl.load(targets_ptr + row), V, walked, ignore_index, smoothing, z_loss, scale,
        SMOOTH, WALKS, KEPT, AHEAD, LANES, WIDTH,
    )  # fmt: skip
    if out_ptr is not None:
        _finish(losses_ptr, out_ptr, ticket_ptr, targets_ptr, count_ptr, M, ignore_index, MEAN)


LOSS = Configs(_loss_kernel, WALK_CONFIGS, choose_walk)
GRADIENT = Configs(_gradient_kernel, ROW_CONFIGS, choose_row, suits_row)


def cross_entropy_fwd(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    reduction: str,
    wants_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """logits: [M, V], contiguous in V; targets: [M], contiguous.

    Returns the loss in the dtype of the logits; their gradient, contiguous, where it is wanted;
    and the count that the gradient is still to be divided by, if it is.
    """
    (m, v), dtype, device = logits.shape, logits.dtype, logits.device
    each, mean = reduction == "none", reduction == "mean"
    losses = torch.empty(m, dtype=dtype if each else torch.float32, device=device)
    out = drawn = dlogits = kept = later = None
    if wants_gradient:
        dlogits = torch.empty((m, v), dtype=dtype, device=device)
        if shared.kept_for_later(dtype, reduction):
            later = torch.empty((), dtype=torch.float32, device=device)
        elif mean:
            kept = shared.count_kept(targets, ignore_index)
    if m == 0:
        out = losses if each else losses.sum(dtype=dtype)
        return out / 0 if mean else out, dlogits, None
    if not each:
        out, drawn = torch.empty((), dtype=dtype, device=device), ticket(device)
    key = {"v": v, "itemsize": logits.element_size()}
    if wants_gradient:
        walked, config = shared.row_plan(**key, config=GRADIENT.pick(device, **key))
        launch(
            _gradient_kernel, (m,), logits_ptr=logits, targets_ptr=targets, losses_ptr=losses,
            out_ptr=out, ticket_ptr=drawn, dlogits_ptr=dlogits, kept_ptr=kept, count_ptr=later,
            stride_m=logits.stride(0), M=m, V=v, walked=walked, ignore_index=ignore_index,
            smoothing=float(smoothing), z_loss=float(z_loss), SMOOTH=smoothing > 0, MEAN=mean,
            **config,
        )  # fmt: skip
    else:
        launch(
            _loss_kernel, (m,), logits_ptr=logits, targets_ptr=targets, losses_ptr=losses,
            out_ptr=out, ticket_ptr=drawn, stride_m=logits.stride(0), M=m, V=v,
            ignore_index=ignore_index, smoothing=float(smoothing), z_loss=float(z_loss),
            SMOOTH=smoothing > 0, MEAN=mean, **LOSS.pick(device, **key),
        )  # fmt: skip
    return losses if each else out, dlogits, later


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, *options):
        loss, dlogits, count = cross_entropy_fwd(logits, targets, *options, True)
        ctx.save_for_backward(dlogits, count)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        dlogits, count = ctx.saved_tensors
        return shared.scaled(dlogits, dloss, count), None, None, None, None, None


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross entropy, computed in float32; what PyTorch's function gives, and a z-loss.

    logits: [M, V]; float32, float16 or bfloat16. targets: [M], int64 or int32, from 0 to V - 1 or
    `ignore_index`, whose rows have neither loss nor gradient. z_loss: the factor of the square of
    the log of the sum of exponentials, added to each loss. reduction: "mean" over the rows that
    count (NaN without any), "sum" or "none".

    Returns a scalar, or [M] for "none", in the dtype of the logits. Differentiable in the logits,
    which stay as they are: the forward pass writes the gradient to a tensor of their size.
    TypeError or ValueError for arguments of another shape, dtype or range. On a GPU a target out
    of range makes the loss and the gradient of its row NaN, as nobody waits to look.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits: shape {tuple(logits.shape)}, expected two dimensions")
    floating(logits=logits)
    shared.together(logits, targets=targets)
    m, v = logits.shape
    shared.check(targets, m, v, ignore_index, label_smoothing, reduction)
    logits, targets = rows_of(logits), targets.contiguous()
    options = ignore_index, label_smoothing, z_loss, reduction
    if needs_grad(logits):
        return _CrossEntropy.apply(logits, targets, *options)
    return cross_entropy_fwd(logits, targets, *options, False)[0]

"""Cross entropy of logits and class indices, with label smoothing and z-loss; forward and backward.

The formulas are those of kernels/_cross_entropy.py. Bytes: the forward pass reads the logits;
where gradients are wanted it writes theirs too, at once, and the backward pass only multiplies by
the gradient of the loss: not at all, and without the host waiting, where that is one. So training
costs one read and one write of the logits where a backward pass of its own costs another read
(Liger-Kernel, Hsu et al., 2024, has the idea, and writes over the logits, which this op does not).
FLOPs: about 10 an item, so memory decides.

The loss alone is one walk with a running maximum and sum in each lane. For the gradient the
registers of a program, or of several that meet (kernels/_parts.py), hold a row, which is read once.
A still longer row is walked a second time, from its end to its beginning: what was read last is
near, in the L1 cache or, as few rows are under way at a time, in the L2.
"""

import torch
import triton
import triton.language as tl

from kernels import _cross_entropy as shared
from kernels._checks import floating
from kernels._contract import Cost, Op, Tensor, case
from kernels._cross_entropy import (
    PART_CONFIGS,
    WALK_CONFIGS,
    WALKS_CONFIGS,
    choose_part,
    choose_walk,
    choose_walks,
    gradient_by_walks,
    gradient_of_part,
    own_logit,
    row_loss,
    suits_part,
    walk,
)
from kernels._device import sm_count
from kernels._launch import launch, needs_grad
from kernels._layout import rows_of
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


@triton.jit
def _loss_kernel(
    logits_ptr, targets_ptr, losses_ptr, stride_m, V, ignore_index, smoothing, z_loss,
    SMOOTH: tl.constexpr, UNROLL: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_m
    target = tl.load(targets_ptr + row)
    loss = 0.0
    if target != ignore_index:
        own, _ = own_logit(row_ptr, target, V)
        top, total, plain = walk(row_ptr, V, SMOOTH, UNROLL, BLOCK_V)
        loss, _ = row_loss(own, top, total, plain, V, smoothing, z_loss, SMOOTH)
    tl.store(losses_ptr + row, loss.to(losses_ptr.dtype.element_ty))


@triton.jit
def _gradient_row_kernel(
    logits_ptr, targets_ptr, losses_ptr, dlogits_ptr, kept_ptr, known_ptr, count_ptr,
    stride_m, V, LENGTH, ignore_index, smoothing, z_loss,
    SMOOTH: tl.constexpr, BLOCK_V: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    scale = 1.0
    if kept_ptr is not None:
        scale /= tl.load(kept_ptr)
    if PARTS > 1:
        known_ptr += row * (PARTS * (2 + SMOOTH))
        count_ptr += row
    gradient_of_part(
        logits_ptr + row * stride_m, dlogits_ptr + row * V, losses_ptr + row, known_ptr, count_ptr,
        tl.load(targets_ptr + row), tl.program_id(0) % PARTS, V, LENGTH, ignore_index,
        smoothing, z_loss, scale, SMOOTH, BLOCK_V, PARTS,
    )  # fmt: skip


@triton.jit
def _gradient_loop_kernel(
    logits_ptr, targets_ptr, losses_ptr, dlogits_ptr, kept_ptr,
    stride_m, M, V, ignore_index, smoothing, z_loss, SMOOTH: tl.constexpr,
    PROGRAMS: tl.constexpr, UNROLL: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    scale = 1.0
    if kept_ptr is not None:
        scale /= tl.load(kept_ptr)
    for index in range(tl.program_id(0), M, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        gradient_by_walks(
            logits_ptr + row * stride_m, dlogits_ptr + row * V, losses_ptr + row,
            tl.load(targets_ptr + row), V, ignore_index, smoothing, z_loss, scale,
            SMOOTH, UNROLL, BLOCK_V,
        )  # fmt: skip


LOSS = Configs(_loss_kernel, WALK_CONFIGS, choose_walk)
GRADIENT_ROW = Configs(_gradient_row_kernel, PART_CONFIGS, choose_part, suits_part)
GRADIENT_LOOP = Configs(_gradient_loop_kernel, WALKS_CONFIGS, choose_walks)


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
    m, v = logits.shape
    exact = logits.dtype if reduction == "none" else torch.float32
    losses = torch.empty(m, dtype=exact, device=logits.device)
    dlogits = None
    if wants_gradient:
        dlogits = torch.empty((m, v), dtype=logits.dtype, device=logits.device)
    count = shared.count_kept(targets, ignore_index) if reduction == "mean" else None
    later = count if shared.kept_for_later(logits.dtype, reduction) else None
    if m:
        _fill(logits, targets, losses, dlogits, None if later is not None else count,
              ignore_index, float(smoothing), float(z_loss))  # fmt: skip
    if reduction == "none":
        return losses, dlogits, later
    return shared.reduced(losses, count, logits.dtype), dlogits, later


def _fill(logits, targets, losses, dlogits, kept, ignore_index, smoothing, z_loss):
    """Writes the loss of each row and, where `dlogits` is given, the gradients."""
    m, v = logits.shape
    key = {"v": v, "itemsize": logits.element_size()}
    smooth, stride = smoothing > 0, logits.stride(0)
    if dlogits is None:
        launch(
            _loss_kernel, (m,), logits_ptr=logits, targets_ptr=targets, losses_ptr=losses,
            stride_m=stride, V=v, ignore_index=ignore_index, smoothing=smoothing,
            z_loss=z_loss, SMOOTH=smooth, **LOSS.pick(logits.device, **key),
        )  # fmt: skip
    elif shared.in_parts(logits, v):
        config = GRADIENT_ROW.pick(logits.device, **key)
        length, block, known, count = shared.parts_of(m, v, config, smoothing, logits.device)
        launch(
            _gradient_row_kernel, (m * config["PARTS"],), logits_ptr=logits, targets_ptr=targets,
            losses_ptr=losses, dlogits_ptr=dlogits, kept_ptr=kept, known_ptr=known,
            count_ptr=count, stride_m=stride, V=v, LENGTH=length, ignore_index=ignore_index,
            smoothing=smoothing, z_loss=z_loss, SMOOTH=smooth, BLOCK_V=block, **config,
        )  # fmt: skip
    else:
        config = GRADIENT_LOOP.pick(logits.device, **key)
        grid = (min(m, config["PROGRAMS"] * sm_count(logits.device)),)
        launch(
            _gradient_loop_kernel, grid, logits_ptr=logits, targets_ptr=targets,
            losses_ptr=losses, dlogits_ptr=dlogits, kept_ptr=kept, stride_m=stride,
            M=m, V=v, ignore_index=ignore_index, smoothing=smoothing, z_loss=z_loss,
            SMOOTH=smooth, **config,
        )  # fmt: skip


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

"""The three launches of a step of AdamW: sums of squares, scalars of the step, and the update.

A plan (`step_plan.py`) tells the tables and chunks of each launch. The sums of squares of the
chunks are added up in one order, so the step is deterministic. All arithmetic is in float32.

Sources: Kingma and Ba, "Adam: a method for stochastic optimization" (2015); Loshchilov and Hutter,
"Decoupled weight decay regularization" (2019). The table of addresses is the idea of multi-tensor
apply in NVIDIA's Apex.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .._runtime.call_cache import cached_launch
from .._runtime.configs import Configs
from .._runtime.launch_guard import guarded
from .._runtime.layout import ACCESS_BYTES
from .lists import Lists
from .step_plan import StepPlan

# The numbers that `_scalars_kernel` writes: the factor of a gradient, 1 / (1 - beta1**t),
# 1 / sqrt(1 - beta2**t), and one if the step counts, else zero.
SCALARS = 4
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# PyTorch adds this to the norm before it divides by it.
CLIP_EPS = tl.constexpr(1e-6)


class Rate(NamedTuple):
    """The learning rate of a group, NaN if a tensor holds it, and its decay."""

    lr: float
    lr_tensor: torch.Tensor | None
    weight_decay: float


def take(
    plan: StepPlan,
    groups: Sequence[Lists],
    rates: Sequence[Rate],
    step: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    max_norm: float | None,
) -> torch.Tensor:
    """Take the step of a plan that serves the groups, and return the norm.

    rates: one for each group. The norm is NaN without max_norm.
    """
    gradients, squares = plan.gradients(groups), None
    if max_norm is not None:
        squares = torch.empty(plan.sums, dtype=torch.float32, device=step.device)
        for part in plan.squares:
            squares_fwd(
                gradients.tables[part.dtype], part.chunks, squares, part.first, part.tensors,
                part.chunk, part.dtype, gradients.aligned[part.dtype],
            )  # fmt: skip
    most = math.inf if max_norm is None else max_norm
    norm, scalars = scalars_fwd(squares, step, _log(beta1), _log(beta2), most)
    for part, rate in zip(plan.updates, rates, strict=True):
        if part is not None:
            update_fwd(
                part.table, gradients.tables[part.dtype], part.chunks, scalars, rate.lr_tensor,
                rate.lr, rate.weight_decay, eps, beta1, 1 - beta1, beta2, 1 - beta2,
                part.tensors, part.first, part.chunk, part.dtype, part.moment, part.has_masters,
                part.aligned and gradients.aligned[part.dtype],
            )  # fmt: skip
    written = itertools.chain.from_iterable(lists.written for lists in groups)
    # Then autograd notices if it has saved what is overwritten here.
    torch.autograd.graph.increment_version(itertools.chain([step], *written))
    return norm


def readable(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    masters: list[torch.Tensor],
) -> None:
    """Start nothing: the guard refuses tensors that a kernel cannot read through their address."""


def squares_fwd(
    table: torch.Tensor,
    chunks: torch.Tensor,
    squares: torch.Tensor,
    first: int,
    tensors: int,
    chunk: int,
    dtype: torch.dtype,
    aligned: bool,
) -> None:
    """Write the sums of the squares of all chunks of gradients to squares, from `first` on."""
    config = SQUARES.pick(squares.device, itemsize=dtype.itemsize)
    _squares_kernel[(chunks.shape[1],)](
        grads_ptr=table, chunks_ptr=chunks, squares_ptr=squares, first=first, tensors=tensors,
        CHUNK=chunk, GRAD=TYPES[dtype], ALIGNED=aligned, **config,
    )  # fmt: skip


def scalars_fwd(
    squares: torch.Tensor | None,
    step: torch.Tensor,
    log_beta1: float,
    log_beta2: float,
    max_norm: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the step; return the norm and the scalars that the update reads.

    squares: the sums of squares of all gradients, or None; the norm then is NaN.
    """
    scalars = torch.empty(SCALARS, dtype=torch.float32, device=step.device)
    norm = torch.empty((), dtype=torch.float32, device=step.device)
    _scalars_kernel[(1,)](
        squares_ptr=squares, step_ptr=step, scalars_ptr=scalars, norm_ptr=norm,
        count=0 if squares is None else squares.shape[0],
        log_beta1=log_beta1, log_beta2=log_beta2, max_norm=max_norm,
        CLIPPED=squares is not None, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return norm, scalars


def update_fwd(
    table: torch.Tensor,
    grads: torch.Tensor,
    chunks: torch.Tensor,
    scalars: torch.Tensor,
    lr_tensor: torch.Tensor | None,
    lr: float,
    weight_decay: float,
    eps: float,
    kept1: float,
    new1: float,
    kept2: float,
    new2: float,
    tensors: int,
    first: int,
    chunk: int,
    dtype: torch.dtype,
    moment: torch.dtype,
    has_masters: bool,
    aligned: bool,
) -> None:
    """Update the tensors of a table by the scalars that `scalars_fwd` made.

    lr: not used if there is an lr_tensor. first: the place of the first gradient in its table.
    """
    config = UPDATE.pick(
        scalars.device, itemsize=dtype.itemsize, widened=moment.itemsize // dtype.itemsize
    )
    _update_kernel[(chunks.shape[1],)](
        table_ptr=table, grads_ptr=grads, chunks_ptr=chunks, scalars_ptr=scalars,
        lr_ptr=lr_tensor, lr=lr, weight_decay=weight_decay, eps=eps,
        kept1=kept1, new1=new1, kept2=kept2, new2=new2,
        tensors=tensors, first=first, CHUNK=chunk, PARAM=TYPES[dtype], MOMENT=TYPES[moment],
        HAS_MASTERS=has_masters, ALIGNED=aligned, **config,
    )  # fmt: skip


def _log(beta):
    return math.log(beta) if beta else -math.inf


@triton.jit(do_not_specialize=["tensors", "first"])
def _update_kernel(
    table_ptr, grads_ptr, chunks_ptr, scalars_ptr, lr_ptr,
    lr, weight_decay, eps, kept1, new1, kept2, new2,
    tensors, first, CHUNK: tl.constexpr, PARAM: tl.constexpr, MOMENT: tl.constexpr,
    HAS_MASTERS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step of AdamW for each element of a list of tensors, computed in float32.

    Grid: one program for each chunk. A program owns CHUNK elements of one tensor. It reads those of
    param, grad, m, v and, if HAS_MASTERS, master, and writes all but grad. The lr_ptr may be None.

    - table [kinds + 1, tensors], int64: the addresses of param, m, v and, if HAS_MASTERS, master.
      The last row has the lengths.
    - grads: the addresses of the gradients, that of the first tensor at `first`.
    - chunks [2, programs], int32: the tensor of each chunk, and its number within the tensor.
    - ALIGNED: all addresses are multiples of 16 bytes.
    - BLOCK: a power of two that divides CHUNK.
    """
    # The data waits for two loads, one after the other: the place of the chunk, and the addresses.
    is_taken = tl.load(scalars_ptr + 3) != 0.0
    owner = tl.load(chunks_ptr + tl.program_id(0))
    start = tl.load(chunks_ptr + tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * CHUNK
    param_ptr = _pointer(table_ptr + owner, PARAM, ALIGNED)
    grad_ptr = _pointer(grads_ptr + first + owner, PARAM, ALIGNED)
    m_ptr = _pointer(table_ptr + tensors + owner, MOMENT, ALIGNED)
    v_ptr = _pointer(table_ptr + 2 * tensors + owner, MOMENT, ALIGNED)
    master_ptr = param_ptr
    if HAS_MASTERS:
        master_ptr = _pointer(table_ptr + 3 * tensors + owner, tl.float32, ALIGNED)
    length = tl.load(table_ptr + (4 if HAS_MASTERS else 3) * tensors + owner)
    stop = tl.minimum(start + CHUNK, length)
    if is_taken:
        factor = tl.load(scalars_ptr)
        rate = lr if lr_ptr is None else tl.load(lr_ptr)
        step_size = rate * tl.load(scalars_ptr + 1)
        root_scale = tl.load(scalars_ptr + 2)
        decay = 1.0 - rate * weight_decay
        for begin in range(start, stop, BLOCK):
            offs = begin + tl.arange(0, BLOCK)
            # A mask whose bound is no multiple of the vector width makes every access scalar.
            if begin + BLOCK <= stop:
                _update_block(
                    param_ptr + offs, grad_ptr + offs, m_ptr + offs, v_ptr + offs,
                    master_ptr + offs, None, factor, step_size, root_scale, decay, eps,
                    kept1, new1, kept2, new2, HAS_MASTERS,
                )  # fmt: skip
            else:
                _update_block(
                    param_ptr + offs, grad_ptr + offs, m_ptr + offs, v_ptr + offs,
                    master_ptr + offs, offs < stop, factor, step_size, root_scale, decay, eps,
                    kept1, new1, kept2, new2, HAS_MASTERS,
                )  # fmt: skip


@triton.jit
def _update_block(
    param_ptrs, grad_ptrs, m_ptrs, v_ptrs, master_ptrs, mask, factor, step_size, root_scale, decay,
    eps, kept1, new1, kept2, new2, HAS_MASTERS: tl.constexpr,
):  # fmt: skip
    """Update the elements at these pointers; master_ptrs are param_ptrs without HAS_MASTERS.

    A moment is stored as soon as it is known. The assembler puts off the load of a parameter to
    where it is used, but not beyond a store, so all loads are in flight together.
    """
    p = tl.load(master_ptrs, mask=mask).to(tl.float32)
    g = tl.load(grad_ptrs, mask=mask).to(tl.float32) * factor
    m = tl.load(m_ptrs, mask=mask).to(tl.float32)
    v = tl.load(v_ptrs, mask=mask).to(tl.float32)
    m = kept1 * m + new1 * g
    tl.store(m_ptrs, m.to(m_ptrs.dtype.element_ty), mask=mask)
    v = kept2 * v + new2 * g * g
    tl.store(v_ptrs, v.to(v_ptrs.dtype.element_ty), mask=mask)
    p = decay * p - step_size * (m / (tl.sqrt(v) * root_scale + eps))
    tl.store(param_ptrs, p.to(param_ptrs.dtype.element_ty), mask=mask)
    if HAS_MASTERS:
        tl.store(master_ptrs, p, mask=mask)


@triton.jit(do_not_specialize=["tensors", "first"])
def _squares_kernel(
    grads_ptr, chunks_ptr, squares_ptr, first,
    tensors, CHUNK: tl.constexpr, GRAD: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """squares[first + i] = the sum of the squares of chunk i, computed in float32.

    Grid: one program for each chunk. A program reads the CHUNK elements of a chunk, and writes one
    float32. grads [2, tensors], int64: addresses and lengths. The other arguments are those of
    `_update_kernel`.
    """
    owner = tl.load(chunks_ptr + tl.program_id(0))
    start = tl.load(chunks_ptr + tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * CHUNK
    grad_ptr = _pointer(grads_ptr + owner, GRAD, ALIGNED)
    stop = tl.minimum(start + CHUNK, tl.load(grads_ptr + tensors + owner))
    acc = tl.zeros((BLOCK,), tl.float32)
    # A loop without a branch, so that the compiler has the loads of several rounds in flight.
    whole = stop - (stop - start) % BLOCK
    for begin in range(start, whole, BLOCK):
        g = tl.load(grad_ptr + begin + tl.arange(0, BLOCK)).to(tl.float32)
        acc += g * g
    if whole < stop:
        offs = whole + tl.arange(0, BLOCK)
        g = tl.load(grad_ptr + offs, mask=offs < stop, other=0.0).to(tl.float32)
        acc += g * g
    tl.store(squares_ptr + first + tl.program_id(0), tl.sum(acc, 0))


@triton.jit
def _scalars_kernel(
    squares_ptr, step_ptr, scalars_ptr, norm_ptr, count, log_beta1, log_beta2, max_norm,
    CLIPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """step += 1, and scalars = what `_update_kernel` needs to know of the norm and the step.

    Grid: one program. It reads the `count` sums of squares, if CLIPPED, and the step. It writes the
    step, four scalars and the norm. A norm that is not finite leaves the step, and forbids the
    update.
    """
    norm = float("nan")
    factor = 1.0
    finite = True
    if CLIPPED:
        offs = tl.arange(0, BLOCK)
        acc = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, count, BLOCK):
            acc += tl.load(squares_ptr + start + offs, mask=start + offs < count, other=0.0)
        norm = tl.sqrt_rn(tl.sum(acc, 0))
        factor = tl.minimum(1.0, max_norm / (norm + CLIP_EPS))
        finite = norm < float("inf")
    step = tl.load(step_ptr) + tl.where(finite, 1.0, 0.0)
    tl.store(step_ptr, step)
    tl.store(scalars_ptr, factor)
    tl.store(scalars_ptr + 1, 1.0 / _one_minus_exp(step * log_beta1))
    tl.store(scalars_ptr + 2, 1.0 / tl.sqrt_rn(_one_minus_exp(step * log_beta2)))
    tl.store(scalars_ptr + 3, tl.where(finite, 1.0, 0.0))
    tl.store(norm_ptr, norm)


@triton.jit
def _pointer(place_ptr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer that is stored as a number."""
    ptr = tl.load(place_ptr).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        ptr = tl.multiple_of(ptr, 16)
    return ptr


@triton.jit
def _one_minus_exp(x):
    """Return 1 - exp x for x below zero; near zero by its series, as the difference cancels."""
    series = 1.0 + x / 7.0
    for k in tl.static_range(6, 1, -1):
        series = 1.0 + x / k * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


CONFIGS = tuple(
    {"BLOCK": block, "num_warps": warps}
    for block in (512, 1024, 2048, 4096)
    for warps in (2, 4, 8)
    if 4 <= block // (32 * warps) <= 32
)


def _choose_update(itemsize, widened):
    # One access of 16 bytes a thread of the widest tensor; two if all are float32. More elements a
    # thread than such an access has would make float32 go through shared memory beside 16 bits.
    return {"BLOCK": 512 if widened > 1 else 1024, "num_warps": 4}


def _choose_squares(itemsize):
    # Two accesses of 16 bytes for each of 128 threads.
    return {"BLOCK": 4096 // itemsize, "num_warps": 4}


def _suits_update(candidate, itemsize, widened):
    return _suits(candidate, itemsize * widened)


def _suits(candidate, itemsize):
    item_bytes = candidate["BLOCK"] * itemsize // (32 * candidate["num_warps"])
    return ACCESS_BYTES <= item_bytes <= 4 * ACCESS_BYTES


UPDATE = Configs(_update_kernel, CONFIGS, _choose_update, _suits_update, family="adamw")
SQUARES = Configs(_squares_kernel, CONFIGS, _choose_squares, _suits, family="adamw")
readable = guarded(readable)
squares_fwd = cached_launch(squares_fwd)
scalars_fwd = cached_launch(scalars_fwd)
update_fwd = cached_launch(update_fwd)

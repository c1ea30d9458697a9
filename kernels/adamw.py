"""AdamW over a list of tensors, in place, with clipping by the global norm, in three launches.

Memory decides: a step reads the parameters, gradients and moments once, and writes all but the
gradients. With clipping it reads the gradients once more for their norm. A table on the device
holds the addresses of all tensors, so one launch serves them all; a program owns a chunk of one
tensor. The sums of squares of the chunks are added up in one order, so the step is deterministic.

A single program computes from the norm and the step what all elements share: the factor of the
gradients and the corrections of the moments. It also counts the step, on the device, so the host
never waits and a CUDA graph holds whole steps. All arithmetic is in float32.

All that follows from the lists lies in a plan (`adamw_details/step_plan.py`), which serves as long
as the tensors stay where they are.

Sources: Kingma and Ba, "Adam: a method for stochastic optimization" (2015); Loshchilov and Hutter,
"Decoupled weight decay regularization" (2019). Clipping by the norm is that of Pascanu, Mikolov and
Bengio, "On the difficulty of training recurrent neural networks" (2013). The table of addresses is
the idea of multi-tensor apply in NVIDIA's Apex.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ._runtime.call_cache import cached_launch
from ._runtime.checks import check_number, shown
from ._runtime.configs import Configs
from ._runtime.launch_guard import guarded
from ._runtime.layout import ACCESS_BYTES
from .adamw_details.lists import (
    Lists,
    as_list,
    check_device,
    check_lists,
    check_scalar,
    listed,
)
from .adamw_details.step_plan import Plans, StepPlan

ACCUMULATES = {"adamw": "float32"}
# The harness restores what a call has written over before it makes the next one.
IN_PLACE = ("adamw",)
# The numbers that `_scalars_kernel` writes: the factor of a gradient, 1 / (1 - beta1**t),
# 1 / sqrt(1 - beta2**t), and one if the step counts, else zero.
SCALARS = 4
# The greatest decay of a moment.
BELOW_ONE = math.nextafter(1, 0)
# The plans of calls of the function; an optimizer has its own.
PLANS = Plans()
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# PyTorch adds this to the norm before it divides by it.
CLIP_EPS = tl.constexpr(1e-6)


class Rate(NamedTuple):
    """The learning rate of a group, NaN if a tensor holds it, and its decay."""

    lr: float
    lr_tensor: torch.Tensor | None
    weight_decay: float


def adamw(
    params: torch.Tensor | Sequence[torch.Tensor],
    grads: torch.Tensor | Sequence[torch.Tensor],
    exp_avgs: torch.Tensor | Sequence[torch.Tensor],
    exp_avg_sqs: torch.Tensor | Sequence[torch.Tensor],
    step: torch.Tensor,
    masters: torch.Tensor | Sequence[torch.Tensor] | None = None,
    *,
    lr: float | torch.Tensor = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    max_norm: float | None = None,
) -> tuple[torch.Tensor | Sequence[torch.Tensor], ...]:
    """Update parameters by one step of AdamW, in place, and return what was updated.

    With g' = g min(1, max_norm / (norm + 1e-6)), or g' = g, and t = step + 1, for each element:

        m = beta1 m + (1 - beta1) g',  v = beta2 v + (1 - beta2) g'²,
        p = (1 - lr weight_decay) p - lr m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps)

    The norm is that of all gradients together, in float32. If it is not finite, as after an
    overflow of one of its squares, nothing is updated and the step does not count. Without
    max_norm there is no such look at the gradients, and one that is not finite enters as it is.

    Args:
        params: a tensor, or several of one dtype: float32, float16 or bfloat16. Any shapes, each
            without gaps in memory. None may be there twice.
        grads: the gradient of each, of its shape and dtype.
        exp_avgs: the first moment m of each, of its shape and layout; all float32, or all of the
            dtype of params.
        exp_avg_sqs: the second moment v of each, as exp_avgs.
        step: a float32 number on the device without dimensions, the steps taken so far.
        masters: the parameters in float32, of which params become roundings; or None.
        lr: the learning rate, 0 or more, or a float32 tensor of one on the device.
        beta1: the decay of the first moment, from 0 to below 1.
        beta2: the decay of the second moment, from 0 to below 1.
        eps: what is added to the root, 0 or more.
        weight_decay: decoupled, 0 or more.
        max_norm: the most that the norm of all gradients may be, 0 or more, or None.

    Returns:
        params, exp_avgs and exp_avg_sqs, as given; masters if given; and, with max_norm, the norm
        before clipping, a new float32 tensor without dimensions. There is no backward pass.

    Raises:
        TypeError: an argument has another kind or dtype.
        ValueError: lengths, shapes, layouts or devices do not fit, a number is out of range, a
            parameter is there twice, or an input wants a gradient outside of torch.no_grad.

    Source:
        Loshchilov and Hutter, "Decoupled weight decay regularization" (2019).

    Example:
        >>> p, g, m, v = (torch.ones(4, device="cuda") for _ in range(4))
        >>> step = torch.zeros((), device="cuda")
        >>> params, *_, norm = adamw([p], [g], [m], [v], step, lr=0.1, max_norm=1.0)
        >>> norm.item(), step.item()
        (2.0, 1.0)
    """
    given = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    given |= {} if masters is None else {"masters": masters}
    compiling = torch.compiler.is_compiling()
    lists = Lists(*map(as_list, given.values()), *([[]] if masters is None else []))
    # An empty list of masters is a fault, and no list of them is none.
    is_empty = isinstance(masters, (list, tuple)) and not masters
    plan = None if compiling or is_empty else PLANS.find([lists])
    if plan is None:
        lists = Lists(*(listed(*each) for each in given.items()), *lists[len(given) :])
        check_lists(lists, masters is not None)
    rate, lr_tensor = _rate(lr, lists.params)
    _check_step(step, lists.params)
    beta1 = check_number("beta1", beta1, 0, BELOW_ONE)
    beta2 = check_number("beta2", beta2, 0, BELOW_ONE)
    eps = check_number("eps", eps, 0, math.inf)
    weight_decay = check_number("weight_decay", weight_decay, 0, math.inf)
    if max_norm is not None:
        max_norm = check_number("max_norm", max_norm, 0, math.inf)
    if compiling:
        norm = _traced_adamw(
            *lists, step, lr_tensor, rate, beta1, beta2, eps, weight_decay, max_norm
        )
    else:
        plan = plan or _planned(PLANS, [lists])
        rates = [Rate(rate, lr_tensor, weight_decay)]
        norm = _take(plan, [lists], rates, step, beta1, beta2, eps, max_norm)
    updated = tuple(value for name, value in given.items() if name != "grads")
    return updated if max_norm is None else (*updated, norm)


class AdamW(torch.optim.Optimizer):
    """AdamW as an optimizer of PyTorch: all groups in a few launches, clipping included.

    Args:
        params: parameters, or groups of them; a group may have its own lr and weight_decay.
        lr: the learning rate, a number or a float32 tensor of one on the device.
        betas: the decays of the moments, the same for all groups.
        eps: what is added to the root, the same for all groups.
        weight_decay: decoupled.
        clip: the most that the norm of all gradients may be, or None. It may be changed later.
        moments: the dtype of the moments; None for that of each parameter.
        masters: keep a copy in float32 of each parameter of 16 bits.

    `step()` skips an update whose norm is not finite. `norm` is that of the last step, a float32
    tensor on the device, or None before the first step; it is NaN without clip. All parameters lie
    on one device, and share one counter of steps.
    """

    def __init__(
        self,
        params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        clip: float | None = None,
        moments: torch.dtype | None = None,
        masters: bool = False,
    ):
        if moments not in (None, torch.float32):
            raise TypeError(f"moments: {shown(moments)}, expected torch.float32 or None")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        beta1, beta2 = betas
        self.beta1 = check_number("betas", beta1, 0, BELOW_ONE)
        self.beta2 = check_number("betas", beta2, 0, BELOW_ONE)
        self.eps = check_number("eps", eps, 0, math.inf)
        self.clip, self.moments, self.masters = clip, moments, masters
        self.norm: torch.Tensor | None = None
        self._step: torch.Tensor | None = None
        self._plans = Plans()

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters that have a gradient; return what the closure returns, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups, rates = [], []
        for group in self.param_groups:
            for lists in self._lists(group):
                groups.append(lists)
                rates.append(Rate(*_rate(group["lr"], lists.params), float(group["weight_decay"])))
        if not groups:
            return loss
        plan = self._plans.find(groups)
        if plan is None:
            for lists in groups:
                check_lists(lists, has_masters=bool(lists.masters))
                check_device("params", lists.params[0], groups[0].params[0])
            plan = _planned(self._plans, groups)
        max_norm = None if self.clip is None else check_number("clip", self.clip, 0, math.inf)
        self.norm = _take(
            plan, groups, rates, self._step, self.beta1, self.beta2, self.eps, max_norm
        )
        return loss

    def _lists(self, group):
        """Yield the lists of the parameters of a group that have a gradient, for each dtype."""
        every = [p for p in group["params"] if p.grad is not None]
        dtypes = dict.fromkeys([p.dtype for p in every])
        for dtype in dtypes:
            params = every if len(dtypes) == 1 else [p for p in every if p.dtype == dtype]
            has_masters = self.masters and dtype != torch.float32
            states = self._states(params, has_masters)
            yield Lists(
                params,
                [p.grad for p in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["master"] for state in states] if has_masters else [],
            )

    def _states(self, params, has_masters):
        """Return the states of parameters, which have all that a step needs."""
        states, needed = [self.state[p] for p in params], ["exp_avg", "exp_avg_sq"]
        needed += ["master"] if has_masters else []
        whole = (
            self._step is not None
            and all(state.get("step") is self._step for state in states)
            and all(name in state for state in states for name in needed)
        )
        if not whole:
            for param in params:
                self._begin(param)
        return states

    def _begin(self, param):
        """Make what the state of a parameter lacks; a loaded one has moments and a counter."""
        state = self.state[param]
        if self._step is None:
            known = state.get("step")
            if known is None:
                known = torch.zeros((), dtype=torch.float32)
            self._step = known.to(param.device, torch.float32)
        state["step"] = self._step
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(param, dtype=self.moments)
        if self.masters and param.dtype != torch.float32 and "master" not in state:
            state["master"] = param.detach().float()

    def __getstate__(self):
        """Return what a copy or a file holds: all but the plans, which know addresses."""
        own = ("beta1", "beta2", "eps", "clip", "moments", "masters", "norm", "_step")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._plans = Plans()

    def load_state_dict(self, state_dict):
        """Load a state with the dtypes that it has; PyTorch would give it those of the weights."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[param][name] = value.to(param.device, copy=True)
        self._step = None


def _planned(plans, groups):
    """Return the plan of a step on lists that are checked, and keep it among the plans."""
    for lists in groups:
        readable(*lists)
    plan = StepPlan(groups)
    plans.add(groups, plan)
    return plan


def _take(plan, groups, rates, step, beta1, beta2, eps, max_norm):
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


# A traced graph has no addresses.
@torch.library.custom_op(
    "tilewright::adamw",
    mutates_args=("params", "exp_avgs", "exp_avg_sqs", "masters", "step"),
)
def _traced_adamw(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    masters: list[torch.Tensor],
    step: torch.Tensor,
    lr_tensor: torch.Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    max_norm: float | None,
) -> torch.Tensor:
    groups = [Lists(params, grads, exp_avgs, exp_avg_sqs, masters)]
    plan = PLANS.find(groups) or _planned(PLANS, groups)
    rates = [Rate(lr, lr_tensor, weight_decay)]
    return _take(plan, groups, rates, step, beta1, beta2, eps, max_norm).clone()


@_traced_adamw.register_fake
def _(params, grads, exp_avgs, exp_avg_sqs, masters, step, *numbers):
    return step.new_empty(())


def _rate(lr, params):
    """Return the learning rate as a number, or NaN and the tensor that holds it."""
    if not isinstance(lr, torch.Tensor):
        return check_number("lr", lr, 0, math.inf), None
    check_scalar("lr", lr, params)
    return math.nan, lr


def _check_step(step, params):
    if not isinstance(step, torch.Tensor):
        raise TypeError(f"step: {shown(step)}, expected a tensor")
    check_scalar("step", step, params)
    if not torch.compiler.is_compiling() and step.is_neg():
        raise ValueError("step: a view with a lazy sign, expected plain memory to write")


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


UPDATE = Configs(_update_kernel, CONFIGS, _choose_update, _suits_update)
SQUARES = Configs(_squares_kernel, CONFIGS, _choose_squares, _suits)
readable = guarded(readable)
squares_fwd = cached_launch(squares_fwd)
scalars_fwd = cached_launch(scalars_fwd)
update_fwd = cached_launch(update_fwd)

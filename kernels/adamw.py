"""AdamW over a list of tensors, in place, with clipping by the global norm, in three launches.

Memory decides: a step reads the parameters, gradients and moments once, and writes all but the
gradients. With clipping it reads the gradients once more for their norm. A table on the device
holds the addresses of all tensors, so one launch serves them all; a program owns a chunk of one
tensor. The sums of squares of the chunks are added up in one order, so the step is deterministic.

A single program computes from the norm and the step what all elements share: the factor of the
gradients and the corrections of the moments. It also counts the step, on the device, so the host
never waits and a CUDA graph holds whole steps. All arithmetic is in float32.

All that follows from the lists lies in a plan (`adamw_details/step_plan.py`), which serves as long
as the tensors stay where they are. `adamw_details/launches.py` has the kernels.

Sources: Kingma and Ba, "Adam: a method for stochastic optimization" (2015); Loshchilov and Hutter,
"Decoupled weight decay regularization" (2019). Clipping by the norm is that of Pascanu, Mikolov and
Bengio, "On the difficulty of training recurrent neural networks" (2013). The table of addresses is
the idea of multi-tensor apply in NVIDIA's Apex.
"""

import math
from collections.abc import Sequence

import torch

from ._runtime.checks import check_number, shown
from .adamw_details.launches import Rate, readable, take
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
# The greatest decay of a moment.
BELOW_ONE = math.nextafter(1, 0)
# The plans of calls of the function; an optimizer has its own.
PLANS = Plans()


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
        norm = take(plan, [lists], rates, step, beta1, beta2, eps, max_norm)
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
                decay = check_number("weight_decay", group["weight_decay"], 0, math.inf)
                rates.append(Rate(*_rate(group["lr"], lists.params), decay))
        if not groups:
            return loss
        plan = self._plans.find(groups)
        if plan is None:
            for lists in groups:
                check_lists(lists, has_masters=bool(lists.masters))
                check_device("params", lists.params[0], groups[0].params[0])
            plan = _planned(self._plans, groups)
        max_norm = None if self.clip is None else check_number("clip", self.clip, 0, math.inf)
        self.norm = take(
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
            # A new parameter beside those of a loaded state goes on with their counter.
            states = (state, *self.state.values())
            counters = (each["step"] for each in states if "step" in each)
            known = next(counters, torch.zeros((), dtype=torch.float32))
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
    return take(plan, groups, rates, step, beta1, beta2, eps, max_norm).clone()


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

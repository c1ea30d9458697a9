"""AdamW over a list of tensors, in place, with clipping by the global norm, in three launches.

Memory decides: a step reads the parameters, gradients and moments once, and writes all but the
gradients. With clipping it reads the gradients once more for their norm. A table on the device
holds the addresses of all tensors, so one launch serves them all; a program owns a chunk of one
tensor. The sums of squares of the chunks are added up in one order, so the step is deterministic.

A single program computes from the norm and the step what all elements share: the factor of the
gradients and the corrections of the moments. It also counts the step, on the device, so the host
never waits and a CUDA graph holds whole steps. All arithmetic is in float32.

Sources: Kingma and Ba, "Adam: a method for stochastic optimization" (2015); Loshchilov and Hutter,
"Decoupled weight decay regularization" (2019). Clipping by the norm is that of Pascanu, Mikolov and
Bengio, "On the difficulty of training recurrent neural networks" (2013). The table of addresses is
the idea of multi-tensor apply in NVIDIA's Apex.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ._runtime.address_table import address_table, chunk_table
from ._runtime.autograd import check_no_grad
from ._runtime.checks import (
    check_floating,
    check_number,
    shown,
)
from ._runtime.configs import Configs
from ._runtime.launch_guard import guarded
from ._runtime.layout import ACCESS_BYTES

ACCUMULATES = {"adamw": "float32"}
# The harness restores what a call has written over before it makes the next one.
IN_PLACE = ("adamw",)
# Elements of a chunk: many of them from LARGE elements on, where each multiprocessor has enough.
LARGE, LONG_CHUNK, SHORT_CHUNK = 2**25, 2**15, 2**12
# The numbers that `_scalars_kernel` writes: the factor of a gradient, 1 / (1 - beta1**t),
# 1 / sqrt(1 - beta2**t), and one if the step counts, else zero.
SCALARS = 4
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# PyTorch adds this to the norm before it divides by it.
CLIP_EPS = tl.constexpr(1e-6)


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
    lists = {name: _listed(name, value) for name, value in given.items()}
    _check_lists(lists)
    rate, lr_tensor = _rate(lr, lists["params"])
    _check_step(step, lists["params"])
    decays = {"beta1": beta1, "beta2": beta2}
    beta1, beta2 = (check_number(*each, 0, math.nextafter(1, 0)) for each in decays.items())
    eps = check_number("eps", eps, 0, math.inf)
    weight_decay = check_number("weight_decay", weight_decay, 0, math.inf)
    if max_norm is not None:
        max_norm = check_number("max_norm", max_norm, 0, math.inf)
    if not lists["params"]:
        raise ValueError(f"params: {shown(params)}, expected at least one tensor")
    run = _traced_adamw if torch.compiler.is_compiling() else adamw_step
    norm = run(
        lists["params"], lists["grads"], lists["exp_avgs"], lists["exp_avg_sqs"],
        lists.get("masters", []), step, lr_tensor,
        rate, beta1, beta2, eps, weight_decay, max_norm,
    )  # fmt: skip
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
        self.beta1 = check_number("betas", beta1, 0, math.nextafter(1, 0))
        self.beta2 = check_number("betas", beta2, 0, math.nextafter(1, 0))
        self.eps = check_number("eps", eps, 0, math.inf)
        self.clip, self.moments, self.masters = clip, moments, masters
        self.norm: torch.Tensor | None = None
        self._step: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters that have a gradient; return what the closure returns, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [
            (group, dtype, [p for p in group["params"] if p.grad is not None and p.dtype == dtype])
            for group in self.param_groups
            for dtype in TYPES
        ]
        groups = [each for each in groups if each[2]]
        every = [p for _, _, params in groups for p in params]
        if not every:
            return loss
        for param in every:
            self._begin(param)
        grads = [p.grad for p in every]
        self.norm, scalars = prepare(grads, self._step, self.beta1, self.beta2, self.clip)
        for group, dtype, params in groups:
            states = [self.state[p] for p in params]
            lists = {
                "params": params,
                "grads": [p.grad for p in params],
                "exp_avgs": [state["exp_avg"] for state in states],
                "exp_avg_sqs": [state["exp_avg_sq"] for state in states],
            }
            if self.masters and dtype != torch.float32:
                lists["masters"] = [state["master"] for state in states]
            _check_lists(lists)
            rate, lr_tensor = _rate(group["lr"], params)
            update(
                params, lists["grads"], lists["exp_avgs"], lists["exp_avg_sqs"],
                lists.get("masters", []), scalars, lr_tensor,
                rate, self.beta1, self.beta2, self.eps, float(group["weight_decay"]),
            )  # fmt: skip
        return loss

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

    def load_state_dict(self, state_dict):
        """Load a state with the dtypes that it has; PyTorch would give it those of the weights."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[param][name] = value.to(param.device, copy=True)
        self._step = None


def adamw_step(
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
    """Make the step of `adamw`, and return the norm, which is NaN without max_norm.

    masters: empty if there are none. lr: not used if there is an lr_tensor.
    """
    norm, scalars = prepare(grads, step, beta1, beta2, max_norm)
    update(
        params, grads, exp_avgs, exp_avg_sqs, masters, scalars, lr_tensor,
        lr, beta1, beta2, eps, weight_decay,
    )  # fmt: skip
    return norm


def prepare(
    grads: list[torch.Tensor],
    step: torch.Tensor,
    beta1: float,
    beta2: float,
    max_norm: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the step, and return the norm of all gradients and the scalars that `update` reads.

    grads: of any dtypes. The norm is NaN without max_norm.
    """
    device = step.device
    scalars = torch.empty(SCALARS, dtype=torch.float32, device=device)
    norm = torch.empty((), dtype=torch.float32, device=device)
    groups = [[g for g in grads if g.dtype == dtype] for dtype in TYPES]
    chunk = _chunk_of(grads)
    groups = [group for group in groups if group] if max_norm is not None else []
    counts = [sum(-(-g.numel() // chunk) for g in group) for group in groups]
    squares = torch.empty(sum(counts), dtype=torch.float32, device=device)
    first = 0
    for group, count in zip(groups, counts, strict=True):
        if count:
            _sum_squares(group, squares, first, chunk)
        first += count
    _scalars_kernel[(1,)](
        squares_ptr=squares, step_ptr=step, scalars_ptr=scalars, norm_ptr=norm,
        count=sum(counts),
        log_beta1=_log(beta1), log_beta2=_log(beta2),
        max_norm=math.inf if max_norm is None else max_norm,
        CLIPPED=max_norm is not None, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return norm, scalars


def _sum_squares(grads, squares, first, chunk):
    """Write the sums of the squares of chunks to squares, from `first` on; grads: of one dtype."""
    lengths = [g.numel() for g in grads]
    table, aligned = address_table([grads], lengths)
    owners, begins = chunk_table(lengths, chunk, squares.device)
    config = SQUARES.pick(squares.device, itemsize=grads[0].element_size())
    _squares_kernel[(len(owners),)](
        table_ptr=table, owners_ptr=owners, begins_ptr=begins, squares_ptr=squares, first=first,
        tensors=len(grads), CHUNK=chunk, GRAD=TYPES[grads[0].dtype], ALIGNED=aligned, **config,
    )  # fmt: skip


def update(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    masters: list[torch.Tensor],
    scalars: torch.Tensor,
    lr_tensor: torch.Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update lists of tensors as `adamw` has them, by the scalars that `prepare` made."""
    lengths = [p.numel() for p in params]
    chunk = _chunk_of(params)
    owners, begins = chunk_table(lengths, chunk, scalars.device)
    if not len(owners):
        return
    grads = [_as_laid_out(g, p) for g, p in zip(grads, params, strict=True)]
    rows = [params, grads, exp_avgs, exp_avg_sqs, *([masters] if masters else [])]
    table, aligned = address_table(rows, lengths)
    config = UPDATE.pick(scalars.device, itemsize=params[0].element_size())
    _update_kernel[(len(owners),)](
        table_ptr=table, owners_ptr=owners, begins_ptr=begins, scalars_ptr=scalars,
        lr_ptr=lr_tensor, lr=lr, weight_decay=weight_decay, eps=eps,
        kept1=beta1, new1=1 - beta1, kept2=beta2, new2=1 - beta2,
        tensors=len(params), CHUNK=chunk, PARAM=TYPES[params[0].dtype],
        MOMENT=TYPES[exp_avgs[0].dtype], HAS_MASTERS=bool(masters), ALIGNED=aligned, **config,
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
    return adamw_step(
        params, grads, exp_avgs, exp_avg_sqs, masters, step, lr_tensor,
        lr, beta1, beta2, eps, weight_decay, max_norm,
    ).clone()  # fmt: skip


@_traced_adamw.register_fake
def _(params, grads, exp_avgs, exp_avg_sqs, masters, step, *numbers):
    return step.new_empty(())


def _listed(name, value):
    """Return a tensor, or several, as a list; raise TypeError for anything else."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(each, torch.Tensor) for each in value
    ):
        raise TypeError(f"{name}: {shown(value)}, expected a tensor or a list of tensors")
    return list(value)


def _check_lists(lists):
    """Raise TypeError or ValueError unless the lists fit each other as `adamw` takes them."""
    params, compiling = lists["params"], torch.compiler.is_compiling()
    for name, tensors in lists.items():
        if len(tensors) != len(params):
            raise ValueError(f"{name}: {len(tensors)} tensors, expected {len(params)} as params")
        for place, tensor in enumerate(tensors):
            label = name if len(tensors) == 1 else f"{name}[{place}]"
            check_no_grad(**{label: tensor})
            _check_dtype(name, label, tensor, lists)
            param = params[place]
            if tensor.shape != param.shape:
                raise ValueError(
                    f"{label}: shape {tuple(tensor.shape)}, expected {tuple(param.shape)} as the"
                    " parameter has"
                )
            _check_device(label, tensor, params[0])
            if name != "grads" and not compiling:
                _check_written(label, tensor, param)
    addresses = set() if compiling else {p.data_ptr() for p in params if p.numel()}
    written = sum(p.numel() > 0 for p in params)
    # A tensor of a build has no address.
    if not compiling and 0 not in addresses and len(addresses) < written:
        raise ValueError(f"params: {shown(params)}, expected no tensor twice")


def _check_dtype(name, label, tensor, lists):
    """Raise TypeError unless a tensor of the list `name` has a dtype that `adamw` takes there."""
    if name == "params":
        check_floating(**{label: tensor})
    kind = lists["params"][0].dtype
    if name in ("params", "grads"):
        known = (kind,)
    elif name == "masters":
        known = (torch.float32,)
    else:
        known = torch.float32, kind
    if tensor.dtype not in known:
        wanted = " or ".join(map(str, dict.fromkeys(known)))
        raise TypeError(f"{label}: {tensor.dtype}, expected {wanted}")
    if name == "exp_avg_sqs" and tensor.dtype != lists["exp_avgs"][0].dtype:
        raise TypeError(
            f"{label}: {tensor.dtype}, expected {lists['exp_avgs'][0].dtype} as exp_avgs has"
        )


def _check_device(label, tensor, param):
    if tensor.device != param.device:
        raise ValueError(f"{label}: on {tensor.device}, expected {param.device} as params")


def _check_written(label, tensor, param):
    """Raise ValueError unless a tensor that is written lies without gaps, as its parameter does."""
    if tensor.is_neg():
        raise ValueError(f"{label}: a view with a lazy sign, expected plain memory to write")
    if not _has_no_gaps(tensor) or (
        tensor.stride() != param.stride() and not _both_plain(tensor, param)
    ):
        raise ValueError(
            f"{label}: strides {tensor.stride()}, expected no gaps in memory and the strides"
            f" {param.stride()} of the parameter"
        )


def _has_no_gaps(x):
    """Return whether the entries of x are a run of memory, in any order."""
    if x.is_contiguous():
        return True
    run = 1
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n != 1):
        if stride != run:
            return False
        run *= size
    return True


def _both_plain(x, y):
    return x.is_contiguous() and y.is_contiguous()


def _as_laid_out(grad, param):
    """Return the gradient in the order of the memory of its parameter, a copy if it must be."""
    grad = grad.resolve_neg()
    if grad.stride() == param.stride() or _both_plain(grad, param):
        return grad
    return torch.empty_like(param).copy_(grad)


def _rate(lr, params):
    """Return the learning rate as a number, or NaN and the tensor that holds it."""
    if not isinstance(lr, torch.Tensor):
        return check_number("lr", lr, 0, math.inf), None
    _check_scalar("lr", lr, params)
    return math.nan, lr


def _check_step(step, params):
    if not isinstance(step, torch.Tensor):
        raise TypeError(f"step: {shown(step)}, expected a tensor")
    _check_scalar("step", step, params)
    if not torch.compiler.is_compiling() and step.is_neg():
        raise ValueError("step: a view with a lazy sign, expected plain memory to write")


def _check_scalar(name, tensor, params):
    """Raise TypeError or ValueError unless a tensor is a float32 number on the device of params."""
    check_no_grad(**{name: tensor})
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name}: {tensor.dtype}, expected float32")
    if tensor.dim():
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected ()")
    if params:
        _check_device(name, tensor, params[0])


def _chunk_of(tensors):
    """Return the elements of a chunk for a list of tensors."""
    return LONG_CHUNK if sum(x.numel() for x in tensors) >= LARGE else SHORT_CHUNK


def _log(beta):
    return math.log(beta) if beta else -math.inf


@triton.jit
def _update_kernel(
    table_ptr, owners_ptr, begins_ptr, scalars_ptr, lr_ptr,
    lr, weight_decay, eps, kept1, new1, kept2, new2,
    tensors, CHUNK: tl.constexpr, PARAM: tl.constexpr, MOMENT: tl.constexpr,
    HAS_MASTERS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step of AdamW for each element of a list of tensors, computed in float32.

    Grid: one program for each chunk. A program owns CHUNK elements of one tensor. It reads those of
    param, grad, m, v and, if HAS_MASTERS, master, and writes all but grad. The lr_ptr may be None.

    table: addresses, rows as `address_table` writes them, int64. owners [chunks]: the tensor of
    each chunk. begins [tensors]: the first chunk of each tensor. ALIGNED: all addresses are
    multiples of 16 bytes. BLOCK: a power of two that divides CHUNK.
    """
    if tl.load(scalars_ptr + 3) != 0.0:
        factor = tl.load(scalars_ptr)
        rate = lr if lr_ptr is None else tl.load(lr_ptr)
        step_size = rate * tl.load(scalars_ptr + 1)
        root_scale = tl.load(scalars_ptr + 2)
        decay = 1.0 - rate * weight_decay
        owner = tl.load(owners_ptr + tl.program_id(0))
        start = (tl.program_id(0) - tl.load(begins_ptr + owner)).to(tl.int64) * CHUNK
        param_ptr = _row(table_ptr, 0, owner, tensors, PARAM, ALIGNED)
        grad_ptr = _row(table_ptr, 1, owner, tensors, PARAM, ALIGNED)
        m_ptr = _row(table_ptr, 2, owner, tensors, MOMENT, ALIGNED)
        v_ptr = _row(table_ptr, 3, owner, tensors, MOMENT, ALIGNED)
        master_ptr = param_ptr
        if HAS_MASTERS:
            master_ptr = _row(table_ptr, 4, owner, tensors, tl.float32, ALIGNED)
        length = tl.load(table_ptr + (5 if HAS_MASTERS else 4) * tensors + owner)
        stop = tl.minimum(start + CHUNK, length)
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
    """Update the elements at these pointers; master_ptrs are param_ptrs without HAS_MASTERS."""
    p = tl.load(master_ptrs, mask=mask).to(tl.float32)
    g = tl.load(grad_ptrs, mask=mask).to(tl.float32) * factor
    m = tl.load(m_ptrs, mask=mask).to(tl.float32)
    v = tl.load(v_ptrs, mask=mask).to(tl.float32)
    m = kept1 * m + new1 * g
    v = kept2 * v + new2 * g * g
    p = decay * p - step_size * (m / (tl.sqrt(v) * root_scale + eps))
    tl.store(m_ptrs, m.to(m_ptrs.dtype.element_ty), mask=mask)
    tl.store(v_ptrs, v.to(v_ptrs.dtype.element_ty), mask=mask)
    tl.store(param_ptrs, p.to(param_ptrs.dtype.element_ty), mask=mask)
    if HAS_MASTERS:
        tl.store(master_ptrs, p, mask=mask)


@triton.jit
def _squares_kernel(
    table_ptr, owners_ptr, begins_ptr, squares_ptr, first,
    tensors, CHUNK: tl.constexpr, GRAD: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """squares[first + i] = the sum of the squares of chunk i, computed in float32.

    Grid: one program for each chunk. A program reads the CHUNK elements of a chunk, and writes one
    float32. The arguments are those of `_update_kernel`; the table has the gradients alone.
    """
    owner = tl.load(owners_ptr + tl.program_id(0))
    start = (tl.program_id(0) - tl.load(begins_ptr + owner)).to(tl.int64) * CHUNK
    grad_ptr = _row(table_ptr, 0, owner, tensors, GRAD, ALIGNED)
    stop = tl.minimum(start + CHUNK, tl.load(table_ptr + tensors + owner))
    acc = tl.zeros((BLOCK,), tl.float32)
    for begin in range(start, stop, BLOCK):
        offs = begin + tl.arange(0, BLOCK)
        if begin + BLOCK <= stop:
            g = tl.load(grad_ptr + offs).to(tl.float32)
            acc += g * g
        else:
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
def _row(
    table_ptr, row: tl.constexpr, owner, tensors, DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return the pointer to tensor `owner` in a row of the table of addresses."""
    ptr = tl.load(table_ptr + row * tensors + owner).to(tl.pointer_type(DTYPE))
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


def _choose_update(itemsize):
    # Eight elements a thread: one or two accesses of 16 bytes of each tensor.
    return {"BLOCK": 1024, "num_warps": 4}


def _choose_squares(itemsize):
    # Two accesses of 16 bytes for each of 128 threads.
    return {"BLOCK": 4096 // itemsize, "num_warps": 4}


def _suits(candidate, itemsize):
    item_bytes = candidate["BLOCK"] * itemsize // (32 * candidate["num_warps"])
    return ACCESS_BYTES <= item_bytes <= 4 * ACCESS_BYTES


UPDATE = Configs(_update_kernel, CONFIGS, _choose_update, _suits)
SQUARES = Configs(_squares_kernel, CONFIGS, _choose_squares, _suits)
prepare = guarded(prepare)
update = guarded(update)

"""The lists of tensors that a step of AdamW takes, and the precise checks of them."""

from typing import NamedTuple

import torch

from .._runtime.autograd import check_no_grad
from .._runtime.checks import check_floating, shown


class Lists(NamedTuple):
    """Lists of one length, of parameters of one dtype; masters is empty if there are none."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    masters: list[torch.Tensor]

    @property
    def written(self) -> tuple[list[torch.Tensor], ...]:
        """All lists but that of the gradients; masters if there are any."""
        lists = self.params, self.exp_avgs, self.exp_avg_sqs, self.masters
        return lists if self.masters else lists[:-1]


def as_list(value: object) -> object:
    """Return a tensor as a list of it, and anything else as it is."""
    return [value] if isinstance(value, torch.Tensor) else value


def listed(name: str, value: object) -> list[torch.Tensor]:
    """Return a tensor, or several, as a list; raise TypeError for anything else."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(each, torch.Tensor) for each in value
    ):
        raise TypeError(f"{name}: {shown(value)}, expected a tensor or a list of tensors")
    return list(value)


def check_lists(lists: Lists, has_masters: bool) -> None:
    """Raise TypeError or ValueError unless the lists fit each other as `adamw` takes them."""
    params, compiling = lists.params, torch.compiler.is_compiling()
    for name, tensors in zip(lists._fields, lists, strict=True):
        if name == "masters" and not has_masters:
            continue
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
            check_device(label, tensor, params[0])
            if name != "grads" and not compiling:
                _check_written(label, tensor, param)
    if not params:
        raise ValueError(f"params: {shown(params)}, expected at least one tensor")
    addresses = set() if compiling else {p.data_ptr() for p in params if p.numel()}
    written = sum(p.numel() > 0 for p in params)
    # A tensor of a build has no address.
    if not compiling and 0 not in addresses and len(addresses) < written:
        raise ValueError(f"params: {shown(params)}, expected no tensor twice")


def check_device(label: str, tensor: torch.Tensor, param: torch.Tensor) -> None:
    """Raise ValueError unless a tensor lies on the device of a parameter."""
    if tensor.device != param.device:
        raise ValueError(f"{label}: on {tensor.device}, expected {param.device} as params")


def check_scalar(name: str, tensor: torch.Tensor, params: list[torch.Tensor]) -> None:
    """Raise TypeError or ValueError unless a tensor is a float32 number on the device of params."""
    check_no_grad(**{name: tensor})
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name}: {tensor.dtype}, expected float32")
    if tensor.dim():
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected ()")
    check_device(name, tensor, params[0])


def as_laid_out(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the gradient in the order of the memory of its parameter, a copy if it must be."""
    grad = grad.resolve_neg()
    if grad.stride() == param.stride() or _both_plain(grad, param):
        return grad
    return torch.empty_like(param).copy_(grad)


def _check_dtype(name, label, tensor, lists):
    """Raise TypeError unless a tensor of the list `name` has a dtype that `adamw` takes there."""
    if name == "params":
        check_floating(**{label: tensor})
    kind = lists.params[0].dtype
    if name in ("params", "grads"):
        known = (kind,)
    elif name == "masters":
        known = (torch.float32,)
    else:
        known = torch.float32, kind
    if tensor.dtype not in known:
        wanted = " or ".join(map(str, dict.fromkeys(known)))
        raise TypeError(f"{label}: {tensor.dtype}, expected {wanted}")
    # One launch reads all moments, so they have one dtype.
    if name in ("exp_avgs", "exp_avg_sqs") and tensor.dtype != lists.exp_avgs[0].dtype:
        raise TypeError(
            f"{label}: {tensor.dtype}, expected {lists.exp_avgs[0].dtype} as exp_avgs has"
        )


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

"""Autograd for launchers: whether a gradient is wanted, and errors if none can be given."""

import functools
from collections.abc import Callable

import torch

from .checks import check_no_tangent


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Return whether a result of these tensors takes part in a backward pass.

    An argument that is no tensor counts as none; the launcher refuses it by name.
    """
    try:
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return torch.is_grad_enabled()
    except AttributeError:
        pass
    return False


class _Refusing(torch.autograd.Function):
    """Pass on gradients that depend on further tensors, and refuse to differentiate them."""

    @staticmethod
    def forward(ctx, name, count, *gradients_and_further):
        ctx.name = name
        return tuple(gradient.detach() for gradient in gradients_and_further[:count])

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            f"{ctx.name}: its gradient was differentiated again, and no second derivative is "
            "computed; expected a single backward pass"
        )


def once(backward: Callable) -> Callable:
    """Return a backward pass whose gradients raise an error if they are differentiated again.

    A result depends on the inputs through a saved tensor or a gradient, or is constant in them; a
    saved output is enough. PyTorch's `once_differentiable` ties its result to no input. If only
    some inputs are asked for, it raises nothing, and part of a sum silently counts as a constant.
    """
    name = backward.__qualname__.partition(".")[0].lstrip("_")

    @functools.wraps(backward)
    def differentiated(ctx, *grads):
        # PyTorch refuses second derivatives of a traced graph by itself.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        further = [x for x in (*ctx.saved_tensors, *grads) if x is not None and x.requires_grad]
        if not further:
            return results
        several = results if isinstance(results, tuple) else (results,)
        found = [x for x in several if x is not None]
        tied = iter(_Refusing.apply(name, len(found), *found, *further))
        several = tuple(None if x is None else next(tied) for x in several)
        return several if isinstance(results, tuple) else several[0]

    return differentiated


def check_no_grad(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError if a derivative is wanted in one of the tensors; the op computes none."""
    for name, tensor in tensors.items():
        if needs_grad(tensor):
            raise ValueError(
                f"{name}: requires a gradient, which this op does not compute; expected a tensor "
                f"without one, such as {name}.detach()"
            )
    check_no_tangent(**tensors)

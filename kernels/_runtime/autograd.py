"""When launchers need autograd, and what they refuse where they have no gradient."""

import functools
from collections.abc import Callable

import torch

from .checks import no_tangent


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether a result of these tensors takes part in a backward pass.

    What is no tensor is none here: the launcher refuses it by name.
    """
    try:
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return torch.is_grad_enabled()
    except AttributeError:
        pass
    return False


class _Refusing(torch.autograd.Function):
    """Hands gradients on that hang on further tensors, and refuses to differentiate them."""

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
    """A backward pass whose gradients cannot be differentiated again: to do so is an error.

    It counts on the tensors that are saved, an output being enough, and on the gradients that it is
    given: a result depends on the inputs through one of them, or is constant in them. PyTorch's
    `once_differentiable` raises nothing where only some inputs are asked for, since what it returns
    is tied to no input: part of a sum would silently count as a constant.
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


def constant(**tensors: torch.Tensor | None) -> None:
    """ValueError names a tensor of which a derivative is wanted, by an op that computes none."""
    for name, tensor in tensors.items():
        if needs_grad(tensor):
            raise ValueError(
                f"{name}: requires a gradient, which this op does not compute; expected a tensor "
                f"without one, such as {name}.detach()"
            )
    no_tangent(**tensors)

"""The setting in which a rule is asked, and the answers that it may give.

A rule is a file in `network/accelerate/rules/` with a function

    rule(module, setting) -> an iterable of Swap and Left

that returns nothing for a module of another kind. Its presence is its registration.
"""

import functools
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from network.probe import refusal

FLOATING = (torch.float32, torch.float16, torch.bfloat16)
# Models of Hugging Face whose attention, gated MLP and RMS norm have one form.
GATED_FAMILIES = ("llama", "mistral", "qwen2")
FAMILIES = (*GATED_FAMILIES, "gpt2")


@dataclass(frozen=True)
class Swap:
    """A change that a rule proposes: attributes of modules, and the kernels behind them.

    absorbed: modules that are no longer called.
    """

    by: str
    changes: tuple[tuple[nn.Module, str, object], ...]
    absorbed: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class Left:
    """The reason for which a rule leaves a module as it is."""

    why: str


@dataclass
class Setting:
    """The model as rules see it.

    Fields:
        training: gradients will be wanted.
        counts: how often each module occurs in the model, by its `id`.
        tried: refusals by what was tried, so that each kernel is tried once.
    """

    training: bool
    device: torch.device
    dtype: torch.dtype
    counts: dict[int, int]
    tried: dict[tuple, str] = field(default_factory=dict)

    def of(self, module: nn.Module) -> tuple[torch.device, torch.dtype]:
        """Return device and dtype of a module's own weights, or of the model if it has none."""
        for weight in module.parameters():
            if weight.is_floating_point():
                return weight.device, weight.dtype
        return self.device, self.dtype

    def refusal(
        self, module: nn.Module, kernel: Callable, *shapes: tuple, **settings: object
    ) -> str:
        """Return why a kernel cannot serve a module, or "": it is tried on a few random numbers.

        Args:
            shapes: of its tensor arguments, which have the module's dtype and device. One that ends
                with "constant" is of a tensor without a gradient, with "index" of int64 zeros.
            settings: its keyword arguments.
        """
        device, dtype = self.of(module)
        key = kernel, shapes, device, dtype, tuple(sorted(settings.items()))
        if key not in self.tried:
            tried = functools.partial(kernel, **settings)
            # Tensors of inference mode have no gradients, and later calls may want some.
            with torch.inference_mode(False):
                given = tuple(self._random(shape, device, dtype) for shape in shapes)
                self.tried[key] = refusal(tried, given, self.training)
        return self.tried[key]

    def _random(self, shape, device, dtype):
        *sizes, kind = shape if isinstance(shape[-1], str) else (*shape, "")
        if kind == "index":
            return torch.zeros(sizes, dtype=torch.int64, device=device)
        # The generator's device, whatever the default one is.
        drawn = torch.randn(sizes, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        return drawn.to(device, dtype).requires_grad_(self.training and not kind)


def forward_of(module: nn.Module, function: Callable) -> tuple[nn.Module, str, object]:
    """Return the change that makes function(module, ...) the forward pass of a module.

    A pickle of the module holds the forward pass of its class instead.
    """
    # A method is pickled as its object and its name, which is looked up when the pickle is read.
    function.__name__ = "forward"
    return module, "forward", types.MethodType(function, module)


def is_replaced(module: nn.Module) -> bool:
    """Return whether the forward pass of a module is another than that of its class.

    That of its class may lie in the module itself: a pickle of a swapped module gives that.
    """
    own = vars(module).get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def is_hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks, which a kernel in its place would not call."""
    hooks = module._forward_hooks, module._forward_pre_hooks
    return any((*hooks, module._backward_hooks, module._backward_pre_hooks))


def is_of(module: nn.Module, families: tuple[str, ...], suffix: str) -> bool:
    """Return whether a module is one of Hugging Face's, of these families, by the end of its name.

    Subclasses that others wrote are not: their forward pass is not known.
    """
    kind = type(module)
    places = {f"transformers.models.{name}.modeling_{name}" for name in families}
    return kind.__module__ in places and kind.__name__.endswith(suffix)


def with_globals(function: Callable, **others: object) -> Callable | None:
    """Return a function that finds other objects under global names; None if it uses none of them.

    The code of the function stays theirs, whatever version it is of.
    """
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__") or not set(others) <= set(code.co_names):
        return None
    names = {**function.__globals__, **others}
    found = types.FunctionType(
        code, names, function.__name__, function.__defaults__, function.__closure__
    )
    found.__kwdefaults__ = function.__kwdefaults__
    return found


def unfit_alone(x: torch.Tensor, name: str = "input") -> str:
    """Return why no kernel takes a tensor, or "": its dtype, its layout, or a transform."""
    if x.dtype not in FLOATING:
        return f"its {name} is {x.dtype}"
    if x.is_nested:
        return f"its {name} is a nested tensor"
    # PyTorch asks the same before it calls a torch.autograd.Function, which the kernels are.
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "a transform of torch.func is active"
    return ""


def unfit(x: torch.Tensor, *weights: torch.Tensor | None) -> str:
    """Return why a call must stay with PyTorch, or "": also autocast, or two dtypes."""
    if why := unfit_alone(x):
        return why
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on"
    odd = [weight for weight in weights if weight is not None and weight.dtype != x.dtype]
    return f"its input is {x.dtype} and a weight {odd[0].dtype}" if odd else ""


def stays(what: nn.Module | str, why: str) -> None:
    """Warn that a call of a swapped module, or of a part of it, runs as it did before."""
    if not torch.compiler.is_compiling():
        what = what if isinstance(what, str) else type(what).__name__
        warnings.warn(f"accelerate: {what} runs as before: {why}", stacklevel=3)

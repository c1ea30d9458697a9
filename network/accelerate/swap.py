"""Find what can be swapped in a model, swap it in place, and say what was done."""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import nn

from network.accelerate import rules
from network.accelerate.report import Line, Report
from network.accelerate.setting import Setting, Swap, is_replaced

UNKNOWN = "no kernel for this kind of module"


def accelerate(model: nn.Module, *, training: bool | None = None) -> Report:
    """Swap the parts of a model that the kernels serve, in place, and return what was done.

    Known are nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.CrossEntropyLoss, and an nn.Linear followed by
    its activation in an nn.Sequential. Known are also Hugging Face's Llama, Mistral, Qwen2 and
    GPT-2: their norms, MLPs, rotary embedding, loss, and attention of the implementation `sdpa`.
    Weights, names and hooks stay, so checkpoints and optimizers do too.

    Args:
        training: gradients will be wanted. None asks whether a weight requires one. A kernel
            without a gradient is then left out; with False it is put in, and refuses an input that
            wants one.

    Each kernel is tried on a few numbers of the model's dtype and device before it is put in. A
    model without a known part is not changed, and the report says so. A call that a kernel does
    not serve, such as one under autocast, runs as before, with a warning.

    Returns a `Report`. TypeError if the model is no nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: a {type(model).__name__}, expected an nn.Module")
    wanted = any(weight.requires_grad for weight in model.parameters())
    setting = _setting(model, wanted if training is None else training)
    replaced, left, changes, taken = [], [], [], set()
    for path, module in model.named_modules():
        kind = type(module).__name__
        if module in taken:
            continue
        if is_replaced(module):
            left.append(Line(path, kind, "its forward pass is replaced already"))
            taken |= _absorbed(module, setting)
            continue
        outcomes = _outcomes(module, setting)
        for outcome in outcomes:
            if isinstance(outcome, Swap):
                replaced.append(Line(path, kind, outcome.by))
                changes += outcome.changes
                taken |= {changed for changed, *_ in outcome.changes} | set(outcome.absorbed)
            else:
                left.append(Line(path, kind, outcome.why))
        if not outcomes and _computes(module):
            left.append(Line(path, kind, UNKNOWN))
    return Report(tuple(replaced), tuple(left), [_changed(*change) for change in changes])


def _setting(model, training):
    device, dtype = torch.device("cpu"), torch.get_default_dtype()
    for weight in model.parameters():
        if weight.is_floating_point():
            device, dtype = weight.device, weight.dtype
            break
    found = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    return Setting(training, device, dtype, found)


def _rules() -> Iterator[Callable]:
    for found in pkgutil.iter_modules(rules.__path__):
        yield importlib.import_module(f"{rules.__name__}.{found.name}").rule


def _outcomes(module, setting):
    return [each for rule in _rules() for each in rule(module, setting)]


def _absorbed(module, setting):
    """The modules that a swapped one no longer calls; none if others replaced its forward pass."""
    function = getattr(vars(module)["forward"], "__func__", None)
    if not getattr(function, "__module__", "").startswith(f"{rules.__name__}."):
        return set()
    swaps = [each for each in _outcomes(module, setting) if isinstance(each, Swap)]
    return {inner for swap in swaps for inner in swap.absorbed}


def _computes(module):
    """Whether a module is more than a container: it has weights of its own, or nothing inside."""
    own = next(module.parameters(recurse=False), None) is not None
    return own or next(module.children(), None) is None


def _changed(module, name, value):
    """Set an attribute and return how to undo that."""
    had, before = name in vars(module), vars(module).get(name)
    vars(module)[name] = value

    def undo():
        if had:
            vars(module)[name] = before
        else:
            del vars(module)[name]

    return undo

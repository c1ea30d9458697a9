"""nn.CrossEntropyLoss, and the loss of Hugging Face's causal language models."""

import copy
from collections.abc import Callable

import torch
from torch import nn

from kernels.cross_entropy import cross_entropy
from network.accelerate.setting import (
    FAMILIES,
    Left,
    Setting,
    Swap,
    forward_of,
    is_of,
    stays,
    unfit_alone,
    with_globals,
)

LOGITS, TARGETS = (2, 64), (2, "index")
INDICES = torch.int64, torch.int32


def rule(module: nn.Module, setting: Setting) -> list[Swap | Left]:
    hugging_face = is_of(module, FAMILIES, "ForCausalLM") or is_of(module, FAMILIES, "LMHeadModel")
    if not (hugging_face or type(module) is nn.CrossEntropyLoss):
        return []
    if why := setting.refusal(module, cross_entropy, LOGITS, TARGETS):
        return [Left(why)]
    if not hugging_face:
        if module.weight is not None:
            return [Left("its classes have weights, which the kernel does not take")]
        return [Swap("cross_entropy", (forward_of(module, _cross_entropy),))]
    theirs = module.loss_function
    if isinstance(theirs, _Loss):
        return [Left("its loss is replaced already")]
    loss = with_globals(theirs, fixed_cross_entropy=_fixed_cross_entropy)
    if loss is None:
        return [Left("its loss is not the one of a causal language model")]
    return [Swap("cross_entropy", ((module, "_loss_function", _Loss(loss, theirs)),))]


class _Loss:
    """A loss that calls the kernel. A pickle holds the loss that was there before instead."""

    def __init__(self, loss: Callable, theirs: Callable):
        self.loss, self.theirs = loss, theirs

    def __call__(self, *given, **named):
        return self.loss(*given, **named)

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        # A copy of a function is the function itself.
        return copy.copy, (self.theirs,)


def _cross_entropy(self, input, target):
    if why := unfit_alone(input):
        stays(self, why)
        return type(self).forward(self, input, target)
    if input.dim() != 2 or target.dtype not in INDICES:
        stays(self, f"its input is {input.dtype} {tuple(input.shape)}, its target {target.dtype}")
        return type(self).forward(self, input, target)
    return cross_entropy(
        input,
        target,
        ignore_index=self.ignore_index,
        label_smoothing=self.label_smoothing,
        reduction=self.reduction,
    )


def _fixed_cross_entropy(source, target, num_items_in_batch=None, ignore_index=-100, **unused):
    """source: float32 [M, V], as the caller makes it; target: [M]."""
    loss = cross_entropy
    if why := unfit_alone(source):
        stays("loss", why)
        loss = nn.functional.cross_entropy
    if num_items_in_batch is None:
        return loss(source, target, ignore_index=ignore_index)
    return loss(source, target, ignore_index=ignore_index, reduction="sum") / (
        num_items_in_batch.to(source.device)
        if hasattr(num_items_in_batch, "to")
        else num_items_in_batch
    )

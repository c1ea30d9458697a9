"""The gated MLPs of Hugging Face's Llama, Mistral and Qwen2.

act(gate) times up is one kernel. In training with SiLU the whole MLP is one part, which keeps less
for its gradient (`network.stacks._swiglu_mlp`).
"""

import torch
from torch import nn

from kernels.gated import geglu, swiglu
from network.accelerate.activations import name_of
from network.accelerate.setting import (
    GATED_FAMILIES,
    Left,
    Setting,
    Swap,
    forward_of,
    is_hooked,
    is_of,
    is_replaced,
    stays,
    unfit,
    unfit_alone,
)
from network.stacks._swiglu_mlp import swiglu_mlp

HALF = (2, 64)
WHOLE = (2, 64), (96, 64), (96, 64), (64, 96)
# PyTorch may compute products of float32 in TF32, which the joined part does not.
HALVES = torch.float16, torch.bfloat16


def rule(module: nn.Module, setting: Setting) -> list[Swap | Left]:
    if not is_of(module, GATED_FAMILIES, "MLP"):
        return []
    name = name_of(module.act_fn)
    if name not in FORWARDS:
        return [Left(f"no gated kernel has its activation, {type(module.act_fn).__name__}")]
    if is_hooked(module.act_fn):
        return [Left("its activation has hooks, which the kernel would not call")]
    joins = name == "silu" and setting.training and _joins(module)
    if joins and not setting.refusal(module, swiglu_mlp, *WHOLE):
        absorbed = module.act_fn, *_projections(module)
        return [Swap("swiglu_mlp", (forward_of(module, _joined),), absorbed)]
    kernel, forward = FORWARDS[name]
    if why := setting.refusal(module, kernel, HALF, HALF):
        return [Left(why)]
    # The activation is part of the kernel and no longer called.
    return [Swap(kernel.__name__, (forward_of(module, forward),), (module.act_fn,))]


def _with(name, combine):
    def forward(self, x):
        # As with a projection, the activation may have been replaced or hooked since.
        if not _activates(self, name):
            return type(self).forward(self, x)
        gate = self.gate_proj(x)
        # Under autocast the projections give halves whatever x is.
        if why := unfit_alone(gate, "gate"):
            stays(self, why)
            return type(self).forward(self, x)
        return self.down_proj(combine(gate, self.up_proj(x)))

    return forward


def _joined(self, x):
    # Without gradients nothing is kept, and products alone are PyTorch's.
    plain = torch.compiler.is_compiling() or not torch.is_grad_enabled()
    # A projection may have been replaced or hooked since, and an adapter has to be called.
    if plain or not (_joins(self) and _activates(self, "silu")) or unfit(x, self.gate_proj.weight):
        return _apart(self, x)
    return swiglu_mlp(x, *(each.weight for each in _projections(self)))


def _joins(module):
    """Whether the projections are plain products of halves that nothing watches."""
    return all(
        type(each) is nn.Linear
        and each.bias is None
        and each.weight.dtype in HALVES
        and not is_replaced(each)
        and not is_hooked(each)
        for each in _projections(module)
    )


def _activates(module, name):
    """Whether the activation is the one of this name, and nothing watches it."""
    return name_of(module.act_fn) == name and not is_hooked(module.act_fn)


def _projections(module):
    return module.gate_proj, module.up_proj, module.down_proj


_apart = _with("silu", swiglu)
FORWARDS = {
    "silu": (swiglu, _apart),
    "gelu_tanh": (geglu, _with("gelu_tanh", geglu)),
    "gelu": (geglu, _with("gelu", lambda gate, up: geglu(gate, up, "none"))),
}

"""The gated MLPs of Hugging Face's Llama, Mistral and Qwen2: act(gate) times up in one kernel."""

from torch import nn

from kernels.gated import geglu, swiglu
from network.accelerate.activations import name_of
from network.accelerate.setting import (
    FLOATING,
    GATED_FAMILIES,
    Left,
    Setting,
    Swap,
    forward_of,
    is_of,
    stays,
)

HALF = (2, 64)


def rule(module: nn.Module, setting: Setting) -> list[Swap | Left]:
    if not is_of(module, GATED_FAMILIES, "MLP"):
        return []
    name = name_of(module.act_fn)
    if name not in FORWARDS:
        return [Left(f"no gated kernel has its activation, {type(module.act_fn).__name__}")]
    if module.act_fn._forward_hooks or module.act_fn._forward_pre_hooks:
        return [Left("its activation has hooks, which the kernel would not call")]
    kernel, forward = FORWARDS[name]
    if why := setting.refusal(module, kernel, HALF, HALF):
        return [Left(why)]
    # The activation is part of the kernel and no longer called.
    return [Swap(kernel.__name__, (forward_of(module, forward),), (module.act_fn,))]


def _with(combine):
    def forward(self, x):
        gate = self.gate_proj(x)
        # Under autocast the projections give halves whatever x is.
        if gate.dtype not in FLOATING:
            stays(self, f"its gate is {gate.dtype}")
            return type(self).forward(self, x)
        return self.down_proj(combine(gate, self.up_proj(x)))

    return forward


FORWARDS = {
    "silu": (swiglu, _with(swiglu)),
    "gelu_tanh": (geglu, _with(geglu)),
    "gelu": (geglu, _with(lambda gate, up: geglu(gate, up, "none"))),
}

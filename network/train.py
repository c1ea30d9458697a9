"""A training step: forward, backward, clipping by the global norm, AdamW.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019). Weights of two dimensions
decay; norms and biases do not, as is usual.
"""

import math
from collections.abc import Callable

import torch

from network.model import Transformer
from network.profile_names import operation

RATE, DECAY, CLIP = 3e-4, 0.1, 1.0
BETAS, EPS = (0.9, 0.95), 1e-8


def adamw(model: Transformer, rate: float, decay: float) -> torch.optim.Optimizer:
    """Return PyTorch's AdamW over the weights of a model; on a GPU fused, and fit for a graph."""
    gpu = next(model.parameters()).is_cuda
    how = {"betas": BETAS, "eps": EPS, "fused": gpu, "capturable": gpu}
    return torch.optim.AdamW(groups(model, decay), lr=rate, **how)


def groups(model: Transformer, decay: float) -> list[dict[str, object]]:
    """Return the weights of a model in groups: those that decay, and the others."""
    weights = list(model.parameters())
    return [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": decay},
        {"params": [w for w in weights if w.dim() <= 1], "weight_decay": 0.0},
    ]


class TrainStep:
    """A step as a call: `loss = step(ids, targets)`.

    Args:
        rate: the learning rate, reached after `warmup` steps in equal parts.
        decay: the weight decay.
        clip: the most that the norm of all gradients may be.
        check: look at the loss before the backward pass, for which the host waits. A measurement
            leaves it out.
        optimizer: (model, rate, decay) -> an optimizer; PyTorch's AdamW if None. One that clips by
            itself has `clip`, the most that the norm may be, which is set here.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        rate: float = RATE,
        decay: float = DECAY,
        clip: float = CLIP,
        warmup: int = 0,
        check: bool = True,
        optimizer: Callable | None = None,
    ):
        self.model, self.rate, self.clip, self.warmup = model, rate, clip, warmup
        self.check, self.number = check, 0
        self.optimizer = (optimizer or adamw)(model, rate, decay)
        self.clips_itself = hasattr(self.optimizer, "clip")
        if self.clips_itself:
            self.optimizer.clip = clip

    def __call__(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss before the update, a scalar on the device.

        ids, targets: int64 [B, S]. FloatingPointError if the loss is not finite and `check` is
        true; the weights then are those before the step.
        """
        self.model.train()
        loss = self.model(ids, targets)
        if self.check and not math.isfinite(value := loss.item()):
            raise FloatingPointError(
                f"step {self.number}: the loss is {value}; lower the learning rate, or look for"
                " a weight that is not finite"
            )
        loss.backward()
        self.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.dropout_seed.add_(1)
        self.number += 1
        return loss.detach()

    def update(self) -> None:
        """Clip the gradients and let the optimizer take a step."""
        if not self.clips_itself:
            with operation("clip"):
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.warmup:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * min(1.0, (self.number + 1) / self.warmup)
        with operation("optimizer"):
            self.optimizer.step()

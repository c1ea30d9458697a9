"""A training step: forward, backward, clipping by the global norm, AdamW.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019). Weights of two dimensions
decay; norms and biases do not, as is usual.
"""

import math
from collections.abc import Callable

import torch
from torch.profiler import record_function

from network.model import Transformer


def adamw(model: Transformer, rate: float, decay: float) -> torch.optim.Optimizer:
    """Return PyTorch's AdamW over the weights of a model, fused on a GPU."""
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": decay},
        {"params": [w for w in weights if w.dim() <= 1], "weight_decay": 0.0},
    ]
    fused = weights[0].is_cuda
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


class TrainStep:
    """A step as a call: `loss = step(ids, targets)`.

    Args:
        rate: the learning rate, reached after `warmup` steps in equal parts.
        decay: the weight decay.
        clip: the most that the norm of all gradients may be.
        check: look at the loss before the backward pass, for which the host waits. A measurement
            leaves it out.
        optimizer: (model, rate, decay) -> an optimizer.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        rate: float = 3e-4,
        decay: float = 0.1,
        clip: float = 1.0,
        warmup: int = 0,
        check: bool = True,
        optimizer: Callable = adamw,
    ):
        self.model, self.rate, self.clip, self.warmup = model, rate, clip, warmup
        self.check, self.number = check, 0
        self.optimizer = optimizer(model, rate, decay)

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
        with record_function("part.clip"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.warmup:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * min(1.0, (self.number + 1) / self.warmup)
        with record_function("part.optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.dropout_seed.add_(1)
        self.number += 1
        return loss.detach()

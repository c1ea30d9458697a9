"""A training step as a CUDA graph: forward, backward, clipping and update in one replay.

The host may need longer for the launches of a step than the GPU does for its work, as in a network
of short kernels. A replay is one launch. The whole step lies in the graph, which is more than
`torch.compile(mode="reduce-overhead")` records: that leaves clipping and the update to the host.
"""

import torch

from network.train import TrainStep


class StepGraph:
    """A step as a call, as `TrainStep`: `loss = graph(ids, targets)`.

    The first call runs as it is, and libraries compile in it. The second is captured and replayed,
    as are the others. A call runs as it is again if it meets what the graph does not hold: a
    gradient from elsewhere, tokens of another shape, another setting of the optimizer. So it does
    after a weight, buffer or moment has moved, and after a weight was frozen or thawed. A learning
    rate that changes from step to step is to be a tensor.

    Args:
        step: its model is on a GPU, and no part of it reads a number on the host.

    Raises:
        ValueError: the step looks at its loss, or its learning rate warms up. Both are work of the
            host, which a graph does not hold.

    Example:
        >>> step = StepGraph(TrainStep(model, check=False))
        >>> losses = [step(ids, targets) for ids, targets in batches]
    """

    def __init__(self, step: TrainStep):
        if step.check or step.warmup:
            raise ValueError(
                "step: has a check or a warmup, which a graph does not hold; make it with"
                " check=False and warmup=0"
            )
        self.step = step
        self.drop()

    def __call__(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss before the update, a scalar on the device.

        ids, targets: int64 [B, S].
        """
        weights, shapes = self.step.model.parameters(), (ids.shape, targets.shape)
        # A replay would not add to a gradient, and a capture would read it where it lay.
        begun = any(weight.grad is not None for weight in weights)
        if begun or self._serves != (shapes, self._settings(), self._places()):
            self.drop()
            loss = self.step(ids, targets)
            self._serves = shapes, self._settings(), self._places()
            return loss
        if self._graph is None:
            self._capture(ids, targets)
        self._ids.copy_(ids)
        self._targets.copy_(targets)
        self._graph.replay()
        if not self.step.model.training:
            self.step.model.train()
        self.step.number += 1
        return self._loss.clone()

    def drop(self) -> None:
        """Give back the memory of the graph; the next two calls are as the first two."""
        self._graph: torch.cuda.CUDAGraph | None = None
        # Shapes of tokens, settings and places: those of the last call that was no replay.
        self._serves: tuple[object, ...] | None = None
        self._ids = self._targets = self._loss = None

    def _capture(self, ids, targets):
        self._ids, self._targets = ids.clone(), targets.clone()
        graph, number = torch.cuda.CUDAGraph(), self.step.number
        try:
            with torch.cuda.graph(graph):
                self._loss = self.step(self._ids, self._targets)
        except BaseException:
            # Its gradients have no numbers.
            self.step.optimizer.zero_grad(set_to_none=True)
            self.drop()
            raise
        finally:
            # A capture runs nothing on the device.
            self.step.number = number
        self._graph = graph

    def _settings(self):
        """The numbers that a graph holds, and the places of those that it reads."""
        optimizer = self.step.optimizer
        every = [x for group in optimizer.param_groups for k, x in group.items() if k != "params"]
        # Ours has some for all groups.
        every += [x for x in vars(optimizer).values() if isinstance(x, (int, float))]
        every.append(self.step.clip)
        return [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in every]

    def _places(self):
        weights, states = [*self.step.model.parameters()], self.step.optimizer.state.values()
        held = [x for state in states for x in state.values() if isinstance(x, torch.Tensor)]
        every = (*weights, *self.step.model.buffers(), *held)
        return [x.data_ptr() for x in every], [x.requires_grad for x in weights]

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
    as are the others. If the tokens have another shape, or weights or moments have moved, a call
    runs as it is again.

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
        if self._serves != (ids.shape, self._places()):
            self.drop()
            loss = self.step(ids, targets)
            self._serves = ids.shape, self._places()
            return loss
        if self._graph is None:
            self._capture(ids, targets)
        self._ids.copy_(ids)
        self._targets.copy_(targets)
        self._graph.replay()
        self.step.number += 1
        return self._loss.clone()

    def drop(self) -> None:
        """Give back the memory of the graph; the next two calls are as the first two."""
        self._graph: torch.cuda.CUDAGraph | None = None
        # The shape of tokens, and the addresses of weights and moments.
        self._serves: tuple[torch.Size, tuple[int, ...]] | None = None
        self._ids = self._targets = self._loss = None

    def _capture(self, ids, targets):
        self._ids, self._targets = ids.clone(), targets.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self.step(self._ids, self._targets)
        # A capture runs nothing on the device.
        self.step.number -= 1
        self._graph = graph

    def _places(self):
        states = self.step.optimizer.state.values()
        held = [x for state in states for x in state.values() if isinstance(x, torch.Tensor)]
        return tuple(x.data_ptr() for x in (*self.step.model.parameters(), *held))

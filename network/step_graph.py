"""A training step as a CUDA graph: forward, backward, clipping and update in one replay.

The host may need longer for the launches of a step than the GPU does for its work, as in a network
of short kernels. A replay is one launch. The whole step lies in the graph, which is more than
`torch.compile(mode="reduce-overhead")` records: that leaves clipping and the update to the host.
"""

import torch

from network.train import TrainStep


class StepGraph:
    """A step as a call, as `TrainStep`: `loss = graph(ids, targets)`.

    The first call runs as it is, and libraries compile in it. The second runs too, and is captured
    after that; the others replay it. So each call takes one step, and a step that is taken once
    keeps no memory for a graph. If weights or moments have moved, a call runs and is captured anew.

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
        self.step, self._graph, self._began = step, None, False
        self._places: tuple[int, ...] = ()

    def __call__(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss before the update, a scalar on the device.

        ids, targets: int64 [B, S]. ValueError if B or S are not those of the captured call.
        """
        if self._graph is None or self._places != self._addresses():
            loss = self.step(ids, targets)
            if self._began:
                self._capture(ids, targets)
            self._began = True
            return loss
        if ids.shape != self._ids.shape or targets.shape != self._targets.shape:
            raise ValueError(
                f"ids, targets: shapes {tuple(ids.shape)} and {tuple(targets.shape)}, expected"
                f" {tuple(self._ids.shape)}; a graph serves the shapes of its capture"
            )
        self._ids.copy_(ids)
        self._targets.copy_(targets)
        self._graph.replay()
        self.step.number += 1
        return self._loss.clone()

    def drop(self) -> None:
        """Give back the memory of the graph; the next call runs and is captured anew."""
        self._graph, self._places = None, ()
        self._ids = self._targets = self._loss = None

    def _capture(self, ids, targets):
        self.drop()
        self._ids, self._targets = ids.clone(), targets.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self.step(self._ids, self._targets)
        # A capture runs nothing on the device.
        self.step.number -= 1
        self._graph, self._places = graph, self._addresses()

    def _addresses(self):
        states = self.step.optimizer.state.values()
        held = [x for state in states for x in state.values() if isinstance(x, torch.Tensor)]
        return tuple(x.data_ptr() for x in (*self.step.model.parameters(), *held))

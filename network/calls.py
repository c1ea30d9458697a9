"""Stacks as implementations of the ops of a network (`network/ops/`).

`function(op, stack)` returns the callable that is verified and timed. It gets flat weights and
makes a network whose parameters lie in them, once; calls with the same memory use that network
again. A stack whose parts cannot do what the network asks says so before the first call. Ours takes
PyTorch's part for one that it cannot do yet.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from network import stack as stacks
from network.cache import Cache
from network.config import Config, undropped
from network.flat import bound, views
from network.model import Transformer
from network.ops.model import STEP
from network.parts import used
from network.stack import Stack
from network.step_graph import StepGraph
from network.token_graph import TokenGraph
from network.train import TrainStep

OURS = "ours"


def function(op: str, stack: str) -> Callable:
    """Return the implementation of an op by a stack.

    Raises:
        ValueError: no stack has this name.
        Unavailable: its library is absent.
    """
    return {
        "model_forward": Forward,
        "model_train_step": Train,
        "model_decode": Decode,
    }[op](stack)


@dataclass
class Kept:
    """A network that lies in the memory of a flat tensor, and what belongs to it.

    Fields:
        storage: that of the flat weights; kept, so that no other tensor gets its address.
        more: what a call keeps for the next one.
    """

    storage: torch.UntypedStorage
    key: tuple
    model: Transformer
    more: dict[str, object] = field(default_factory=dict)


class Call:
    """A stack, and the network of the last call; the base of the three calls."""

    training = False
    # Each time of the call is recorded with these.
    remarks: tuple[str, ...] = ("the host launches each kernel",)
    # The calls after which one is as all others.
    ahead = 1

    def __init__(self, stack: str | Stack):
        self.stack = stack if isinstance(stack, Stack) else stacks.load(stack)
        self._kept: Kept | None = None

    def forget(self) -> None:
        """Drop the network of the last call."""
        self._kept = None

    def drop_memory(self) -> None:
        """Drop what a call keeps for the next one beside the network, if it is large."""

    def _network(self, weights: torch.Tensor, preset_name: str) -> Kept:
        config, storage = undropped(preset_name), weights.untyped_storage()
        key = preset_name, storage._cdata, weights.storage_offset(), weights.dtype
        if self._kept is None or self._kept.key != key:
            self._kept = None
            stack = fit(self.stack, config, self.training, weights.dtype, weights.device)
            # A leaf of its own: it requires a gradient, and the argument does not.
            model = bound(config, stack.parts, weights.detach())
            if stack.compiled:
                model.compile()
            model.train(self.training)
            self._kept = Kept(storage, key, model)
        return self._kept


@functools.lru_cache(maxsize=32)
def fit(
    stack: Stack, config: Config, training: bool, dtype: torch.dtype, device: torch.device
) -> Stack:
    """Return the stack that runs: ours without the parts that cannot do what is asked.

    Raises:
        ValueError: a part of another stack cannot, or is not called by this network.
    """
    if stack.name == OURS:
        return stacks.able(stack, config, training, dtype=dtype, device=device)
    called = {*used(config, training), *([stacks.OPTIMIZER] if training else [])}
    if idle := sorted(set(stack.taken) - called):
        raise ValueError(f"stack {stack.name}: a network of this kind calls no {', '.join(idle)}")
    stack.require(config, training, dtype=dtype, device=device)
    return stack


class Forward(Call):
    """The logits [B, S, V] of all tokens."""

    @torch.no_grad()
    def __call__(self, ids, weights, preset_name):
        return self._network(weights, preset_name).model(ids)


class Train(Call):
    """A step: the loss before it, and the weights and first moments after it, in place.

    On a GPU the step becomes a CUDA graph, as `StepGraph` makes it, if the stack allows that and
    `graph` is true. If the call itself is being captured, it becomes part of that graph.
    """

    training = True

    def __init__(self, stack: str | Stack, graph: bool = True):
        super().__init__(stack)
        self.graph = graph and self.stack.graph
        if self.graph:
            self.remarks, self.ahead = ("a step is a CUDA graph",), 2

    def drop_memory(self) -> None:
        """Drop the graph of the step."""
        if self._kept is not None and "graph" in self._kept.more:
            self._kept.more["graph"].drop()

    @torch.enable_grad()
    def __call__(self, ids, targets, weights, m, v, preset_name):
        kept = self._network(weights, preset_name)
        moments = tuple(each.untyped_storage()._cdata for each in (m, v))
        if kept.more.get("moments") != moments:
            step = TrainStep(kept.model, check=False, optimizer=self.stack.optimizer)
            kept.more = {"step": step, "moments": moments, "kept": (m, v)}
            kept.more["number"] = _resume(step, kept.model, m, v)
            if self.graph and weights.is_cuda:
                kept.more["graph"] = StepGraph(step)
        kept.more["number"].fill_(STEP - 1)
        step = kept.more["step"]
        if "graph" in kept.more and not torch.cuda.is_current_stream_capturing():
            step = kept.more["graph"]
        loss = step(ids, targets)
        return loss.to(weights.dtype), weights, m


def _resume(step: TrainStep, model: Transformer, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Hand the optimizer its moments, and return its count of steps, an entry for each weight."""
    weights = list(model.parameters())
    number = torch.zeros(len(weights), dtype=torch.float32, device=m.device)
    if not m.is_cuda:
        number = number.cpu()
    rows = zip(weights, number, views(model, m.detach()), views(model, v.detach()), strict=True)
    for weight, count, mean, square in rows:
        step.optimizer.state[weight] = {"step": count, "exp_avg": mean, "exp_avg_sq": square}
    return number


class Decode(Call):
    """The logits after the prompt and after the last of the given tokens, [B, V] each.

    On a GPU one token is captured as a CUDA graph, and the graph is replayed for each. If the call
    itself is being captured, its tokens become part of that graph.
    """

    remarks = ("a decoded token is a CUDA graph",)

    def drop_memory(self) -> None:
        """Drop the cache and the graph."""
        if self._kept is not None:
            self._kept.more = {}

    @torch.no_grad()
    def __call__(self, ids, follow, weights, preset_name):
        kept = self._network(weights, preset_name)
        (b, s), t = ids.shape, follow.shape[1]
        if kept.more.get("shape") != (b, s, t):
            model = kept.model
            cache = Cache(model.config, b, s + t, weights.dtype, weights.device)
            kept.more = {"shape": (b, s, t), "cache": cache}
        model, cache = kept.model, kept.more["cache"]
        cache.clear()
        first = model(ids, cache=cache)
        if not weights.is_cuda or torch.cuda.is_current_stream_capturing():
            for number in range(t):
                last = model(follow[:, number : number + 1], cache=cache)
            return first, last
        graph = kept.more.get("graph")
        if graph is None or not graph.valid():
            graph = kept.more["graph"] = TokenGraph(model, cache)
        for number in range(t):
            last = graph(follow[:, number : number + 1])
        # The next call overwrites the graph's result.
        return first, last.clone()

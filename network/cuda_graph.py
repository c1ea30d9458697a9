"""Inference as a CUDA graph: a model's call, captured once and replayed in a block of code.

A graph is a recording of launches on fixed addresses. So it serves one set of shapes, computes no
gradient, and does nothing on the host while it runs.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.utils import _pytree as tree

# Calls before the capture, in which a library may compile, tune or set itself up.
WARM = 3

Example = torch.Tensor | tuple | Mapping[str, object]


@contextlib.contextmanager
def cuda_graph(model: nn.Module, example: Example) -> Iterator[nn.Module]:
    """Replay a captured graph for each call of the model within the block.

    Within the block `model(...)` copies its tensors to the places of the capture, replays the
    graph, and returns copies of the results. After the block the model is as it was.

    Args:
        model: a module for inference, on a GPU, in evaluation mode.
        example: what the model will be called with: a tensor, a tuple of positional arguments, or
            a mapping of keyword arguments. Tensors of later calls must have its shapes and dtypes;
            other arguments must be equal to its own.

    Yields:
        The model.

    Raises:
        ValueError: the model or the example is not on a GPU, the model is in training mode, or a
            gradient is wanted. Within the block: a call has other arguments than the example, or
            wants a gradient.
        RuntimeError: the model did something that a graph cannot hold, such as reading a number
            from the GPU.

    Example:
        >>> with torch.no_grad(), cuda_graph(model, ids):
        ...     logits = model(ids)
    """
    arguments, keywords = _split(example)
    if model.training:
        raise ValueError("model: in training mode, expected model.eval()")
    _require_no_gradient(model, (arguments, keywords))
    _require_gpu(model, (arguments, keywords))
    graph = _Captured(model.forward, arguments, keywords)

    def replayed(*given: object, **named: object) -> object:
        _require_no_gradient(model, (given, named))
        return graph(given, named)

    own = model.__dict__.get("forward")
    model.forward = replayed
    try:
        yield model
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own


class _Captured:
    """A recorded call: the tensors that it reads, and those that it writes."""

    def __init__(self, forward, arguments, keywords):
        leaves, self._shape = tree.tree_flatten((arguments, keywords))
        self._given = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        arguments, keywords = tree.tree_unflatten(self._given, self._shape)
        self._graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(aside):
            for _ in range(WARM):
                forward(*arguments, **keywords)
        torch.cuda.current_stream().wait_stream(aside)
        with torch.no_grad(), torch.cuda.graph(self._graph):
            self._results = forward(*arguments, **keywords)

    def __call__(self, arguments, keywords):
        leaves, shape = tree.tree_flatten((arguments, keywords))
        if shape != self._shape:
            raise ValueError("arguments: others than those of the example")
        for number, (given, held) in enumerate(zip(leaves, self._given, strict=True)):
            _require_alike(number, given, held)
        for given, held in zip(leaves, self._given, strict=True):
            if isinstance(held, torch.Tensor):
                held.copy_(given)
        self._graph.replay()
        return tree.tree_map_only(torch.Tensor, torch.clone, self._results)


def _split(example):
    """The positional and the keyword arguments of an example."""
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, tuple):
        return example, {}
    if isinstance(example, Mapping):
        return (), dict(example)
    kind = type(example).__name__
    raise TypeError(f"example: {kind}, expected a tensor, a tuple or a mapping")


def _require_gpu(model, given):
    """Raise ValueError unless the model and all tensors of the example are on a GPU."""
    if not torch.cuda.is_available():
        raise ValueError("cuda_graph: no GPU is visible, and a CUDA graph needs one")
    held = [("model", weight) for weight in model.parameters()]
    held += [("example", x) for x in tree.tree_leaves(given) if isinstance(x, torch.Tensor)]
    if not any(name == "example" for name, _ in held):
        raise ValueError("example: has no tensor, expected one or more")
    for name, tensor in held:
        if not tensor.is_cuda:
            raise ValueError(f"{name}: a tensor on {tensor.device}, expected cuda")


def _require_no_gradient(model, given):
    """Raise ValueError if autograd would record the call."""
    if not torch.is_grad_enabled():
        return
    tensors = [x for x in tree.tree_leaves(given) if isinstance(x, torch.Tensor)]
    if any(x.requires_grad for x in (*model.parameters(), *tensors)):
        raise ValueError(
            "model: wants a gradient, which a captured graph does not compute; call it within"
            " torch.no_grad()"
        )


def _require_alike(number, given, held):
    """Raise ValueError unless an argument is as in the example, and a tensor has its shape."""
    if not isinstance(held, torch.Tensor):
        if given != held:
            raise ValueError(f"argument {number}: {given!r}, expected {held!r} as in the example")
        return
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"argument {number}: {type(given).__name__}, expected a tensor")
    for what in ("shape", "dtype", "device"):
        found, expected = getattr(given, what), getattr(held, what)
        if found != expected:
            found, expected = (tuple(x) if what == "shape" else x for x in (found, expected))
            raise ValueError(
                f"argument {number}: {what} {found}, expected {expected}; a graph serves the"
                " shapes of its example"
            )

"""One call of an implementation: its results and gradients, by name."""

from collections.abc import Callable, Mapping, Sequence

import torch

from ops._spec import Case, Op

Named = dict[str, torch.Tensor]


class Wrong(Exception):
    """A result that no error figure describes: the message says what is wrong with it."""


def run(
    op: Op,
    function: Callable,
    case: Case,
    tensors: Mapping[str, torch.Tensor | None],
    seeds: Sequence[torch.Tensor] | None = None,
) -> Named:
    """The results of one call by name: `out` (or `out0`, `out1`, …); with `seeds`, the gradients
    of the outputs, also `d<input>` for each input that has one.
    """
    wanted = [name for name, t in tensors.items() if t is not None and op.inputs[name].grad]
    leaves = {name: None if t is None else t.detach() for name, t in tensors.items()}
    if seeds is not None:
        for name in wanted:
            leaves[name].requires_grad_()
    with torch.set_grad_enabled(seeds is not None):
        result = function(**leaves, **op.arguments(case))
    outputs = result if isinstance(result, tuple) else (result,)
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            raise Wrong(f"returns {type(output).__name__}, not a tensor")
    names = ["out"] if len(outputs) == 1 else [f"out{i}" for i in range(len(outputs))]
    named = {name: output.detach() for name, output in zip(names, outputs, strict=True)}
    if seeds is not None:
        found = torch.autograd.grad(outputs, [leaves[name] for name in wanted], seeds)
        named |= {f"d{name}": grad for name, grad in zip(wanted, found, strict=True)}
    return named

"""Make one valid call of each op."""

import functools
import inspect
from pathlib import Path

import torch

from harness.calls import inputs
from harness.machine import nvml
from harness.project import registry
from harness.project.implementations import OURS
from harness.study import jobs

DEVICE = "cuda" if nvml.gpus() else "cpu"
OPS = sorted(jobs.ops(Path(__file__).parents[2]))


def richest(op):
    """Return the smallest plain edge case among those with the most tensors."""
    plain = [c for c in op.edge if not c.layout and not c.values and "float32" in op.dtypes_of(c)]
    plain = [c for c in plain if max(c.sizes.values()) > 1 and min(c.sizes.values()) > 0]

    def rank(case):
        present = [t for t in op.inputs.values() if t.is_in(case)]
        return -len(present), sum(case.sizes.values())

    return min(plain, key=rank)


def call_of(name):
    """Return the op, our function, and the tensors and options of a valid call."""
    op, _ = registry.op(name)
    case = richest(op)
    made = inputs.make(op, case, "float32", 0, DEVICE)
    good = {key: tensor for key, tensor in made.items() if tensor is not None}
    function, options = registry.function(name, OURS), op.arguments(case)
    if op.adapted:
        # As users call it, unless the harness has arguments of its own.
        public = inspect.unwrap(function)
        if options.keys() <= inspect.signature(public).parameters.keys():
            function = public
    if registry.in_place(name, OURS):
        function = _on_copies(function)
    return op, function, good, options


def _on_copies(function):
    """Return the function on copies of its tensors, because it writes over what it is given."""

    @functools.wraps(function)
    def call(**given):
        copies = {k: t.clone() if torch.is_tensor(t) else t for k, t in given.items()}
        return function(**copies)

    return call


INDICES = ("bucketize", "randint")


def differentiable(name):
    """Return whether the file of an op has an autograd function."""
    file = vars(inspect.getmodule(call_of(name)[1])).values()
    return any(inspect.isclass(x) and issubclass(x, torch.autograd.Function) for x in file)


WITHOUT = [name for name in OPS if name not in INDICES and not differentiable(name)]

"""Trace each op without a GPU, in a process of its own; print what breaks its graph."""

import contextlib
import dataclasses
import math
from pathlib import Path

import torch
import torch.utils._triton

# Otherwise Triton makes no kernels on a machine without a GPU, and the tracer looks into Triton.
torch.utils._triton.has_triton = lambda: True

from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table  # noqa: E402

from harness.calls import inputs  # noqa: E402
from harness.project import registry  # noqa: E402
from harness.project.implementations import OURS  # noqa: E402
from harness.study import jobs  # noqa: E402

SCALARS = range(-(2**31), 2**31)
# No power of two lies between them.
LENGTHS = (2100, 2200, 3000, 4000)
# Items of a row of a case that is made with so many rows.
WIDEST = 2**12


class _TracedError(Exception):
    """The whole function is one graph, which a machine without a GPU cannot run."""


def backend(graph, examples):
    def run(*arguments):
        raise _TracedError(_beyond(graph))

    return run


def _beyond(graph):
    """Return the integers beyond 32 bits that kernels get; Inductor takes them for shorter ones."""
    found = []
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if "constant_args_idx" in node.kwargs:
                constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
                given = {**constants, **node.kwargs["kwargs"]}
                found += [
                    f"{name}={value}"
                    for name, value in given.items()
                    if isinstance(value, int) and value not in SCALARS
                ]
    return ", ".join(found)


def trace(op, function, case, dynamic, grads):
    tensors = inputs.make(op, case, op.dtypes_of(case)[-1], 0, "cpu")
    for name, tensor in tensors.items():
        if grads and tensor is not None and op.inputs[name].grad:
            tensor.requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    try:
        compiled(**tensors, **op.arguments(case))
    except _TracedError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "was not traced"


def graphs_of_lengths(op, function, case, lengths):
    """Return how many graphs serve a training step with so many rows, one length after another."""
    made = []

    def counting(graph, examples):
        made.append(graph)
        return backend(graph, examples)

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend=counting)
    for length in lengths:
        longer = dataclasses.replace(case, sizes=case.sizes | {"M": length})
        tensors = inputs.make(op, longer, op.dtypes_of(case)[-1], 0, "cpu")
        for name, tensor in tensors.items():
            if tensor is not None and op.inputs[name].grad:
                tensor.requires_grad_()
        with contextlib.suppress(_TracedError):
            compiled(**tensors, **op.arguments(longer))
    return len(made)


def _items_of_a_row(case):
    return math.prod(size for name, size in case.sizes.items() if name != "M")


def main():
    torch.set_num_threads(1)
    for name in sorted(jobs.ops(Path.cwd())):
        op, function = registry.op(name)[0], registry.function(name, OURS)
        cases = [c for c in op.edge if all(c.sizes.values()) and not (c.layout or c.values)]
        traced = 0
        for case in {case.flags: case for case in cases}.values():
            # The gradients take longer, so they are traced once only.
            for dynamic, grads in ((False, op.differentiable), (True, False)):
                why, traced = trace(op, function, case, dynamic, grads), traced + 1
                if why:
                    print(f"{name} {case.name}, {dynamic=}: {why}")
        print(f"{name}: {traced} graphs")
        with_rows = [case for case in cases if op.differentiable and "M" in case.sizes]
        for case in [case for case in with_rows if _items_of_a_row(case) <= WIDEST][-1:]:
            # Batches differ in their rows. The first has a graph of its own, and all others one.
            count = graphs_of_lengths(op, function, case, LENGTHS)
            if count > 2:
                print(f"{name} {case.name}: {count} graphs for {len(LENGTHS)} lengths")


if __name__ == "__main__":
    main()

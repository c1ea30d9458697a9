"""Runs the cases of `harness.sanitize` once each on the GPU; the tool alone judges them."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from harness.calls import inputs, invoke
from harness.cli import run
from harness.project import registry, source_tree
from harness.project.implementations import OURS
from ops._spec import Case, Op

SEED = 0
# Products of a library whose results kernels of ours read.
PRODUCTS = ("mm", "addmm")


def main() -> None:
    parser = argparse.ArgumentParser(prog="harness.sanitize.worker", description=__doc__)
    parser.add_argument("--file", required=True)
    parser.add_argument("--dtypes", nargs="+", required=True)
    arguments = parser.parse_args()
    import torch

    for name in PRODUCTS:
        setattr(torch, name, _filled(getattr(torch, name)))
    count = 0
    for name in [op for op, family in source_tree.ops(Path()).items() if family == arguments.file]:
        op, function = registry.op(name)[0], registry.function(name, OURS)
        for case in op.edge:
            for dtype in op.dtypes_of(case):
                if dtype in arguments.dtypes:
                    call(op, function, case, dtype, "cuda")
                    count += 1
    torch.cuda.synchronize()
    print(f"sanitized {count} cases")


def _filled(product: Callable) -> Callable:
    """Return the product, into memory that was written before.

    initcheck does not see the bulk stores of cuBLAS on Hopper, and would name each kernel that
    reads them.
    """

    def filled(*arguments, out=None):
        if out is not None and not any(out is argument for argument in arguments):
            out.fill_(math.nan)
        return product(*arguments, out=out)

    return filled


def call(op: Op, function, case: Case, dtype: str, device: str) -> None:
    """Both passes of a case, on random inputs and gradients."""
    import torch

    tensors = inputs.make(op, case, dtype, SEED, device)
    gradients = None
    if op.differentiable:
        shapes = inputs.make(op, case, dtype, SEED, "meta")
        outputs = invoke.run(op, op.reference, case, shapes).values()
        blank = [torch.empty_like(output, device=device) for output in outputs]
        gradients = inputs.gradients(blank, SEED)
    invoke.run(op, function, case, tensors, gradients)


if __name__ == "__main__":
    run(main)

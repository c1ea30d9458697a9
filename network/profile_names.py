"""The names under which a profile finds the parts of a step."""

import contextlib

import torch
from torch._C._profiler import _RecordFunctionFast

PREFIX = "part."


def operation(name: str) -> contextlib.AbstractContextManager:
    """Return a context that a profile shows as an operation with the name of a part.

    The profiler gives the time of a kernel to the operation that launched it. `record_function` is
    no operation: a kernel that is launched right within it, by none of PyTorch's operations,
    belongs to nothing. Ours launches AdamW so. `torch.compile` cannot trace this context, and meets
    one that does nothing.
    """
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return _RecordFunctionFast(PREFIX + name)

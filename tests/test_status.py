"""Check the status that an exception stands for, and its one-line reason."""

import pytest

from harness import status as statuses
from harness.cli import UserError
from harness.project.registry import Unavailable
from harness.status import Inaccurate, Unsupported


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's class."""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OutOfMemoryError("CUDA out of memory."), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("CUDA error: out of memory"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "oom"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "oom"),
        (RuntimeError("CUDA error: an illegal memory access"), "crashed"),
        (ValueError("bad"), "crashed"),
        (Unsupported("bad"), "unsupported"),
        (UserError("baselines.x: has no function y"), "unsupported"),
        (Unavailable("ImportError: no x"), "unavailable"),
        (Inaccurate("changed"), "inaccurate"),
    ],
)
def test_the_status_of_an_exception(error, status):
    assert statuses.of(error) == status
    assert status in statuses.STATUSES


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("one\ntwo"), "ValueError: one"),
        (ValueError(""), "ValueError"),
        (TypeError("raised:\n  no compiler\nmore"), "TypeError: raised: no compiler"),
        (Unsupported("one\ntwo"), "one"),
        (Unsupported("\x1b[91mred\x1b[0m"), "red"),
        (Unavailable("ImportError: no x"), "ImportError: no x"),
        (KeyError("x" * 1000), ("KeyError: 'x" + "x" * 1000)[: statuses.REASON_LENGTH]),
    ],
)
def test_the_reason_is_one_line(error, reason):
    assert statuses.reason(error) == reason

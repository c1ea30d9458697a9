"""Rows that several programs hold, in any order of the programs.

The programs take turns (`interleaved.py`).
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interleaved import Run, interleaved, schedules

from harness import nvml
from kernels import _softmax_shared
from kernels import softmax as family
from kernels.softmax import softmax, softmax_reference

pytestmark = pytest.mark.skipif(bool(nvml.gpus()), reason="kernels are interpreted without a GPU")
BOUND = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DTYPES = list(BOUND)
few = settings(max_examples=15, derandomize=True)


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def near(ours, truth, bound):
    gap = (ours.double() - truth).abs().max().item()
    assert gap <= bound * max(truth.abs().max().item(), 1e-30)


@pytest.fixture(scope="module", autouse=True)
def small():
    """Programs that hold few elements, so that a few share a row of about a thousand."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(family, "PAIR_BYTES", 512)
        patched.setattr(_softmax_shared, "MOST_CHUNKS", 2)
        patched.setattr(_softmax_shared, "WARPS", 1)
        patched.setattr(_softmax_shared, "MORE_WARPS", 2)
        patched.setattr(_softmax_shared, "SHORT_BYTES", 4096)
        yield


def softmax_agrees(x, schedule, scale=1.0):
    """Both passes of a softmax whose rows are shared; returns the launches."""
    x = x.detach().requires_grad_()
    exact = x.detach().double().requires_grad_()
    dy = randn(*x.shape, dtype=x.dtype, seed=7)
    with interleaved(schedule) as runs:
        y = softmax(x, scale=scale)
        y.backward(dy)
    expected = softmax_reference(exact, scale, False, None)
    expected.backward(dy.double())
    near(y, expected, BOUND[x.dtype])
    near(x.grad, exact.grad, BOUND[x.dtype])
    assert [run.kernel for run in runs] == ["_forward_shared_kernel", "_backward_shared_kernel"]
    return runs


def holders(runs: list[Run], rows: int) -> list[int]:
    return [run.grid[0] // rows for run in runs]


@few
@given(st.data())
def test_softmax_in_any_order(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    # Rows that fill their programs, and rows that do not.
    n = data.draw(st.sampled_from([1024, 1040, 1600, 2000, 2048]))
    rows = data.draw(st.integers(1, 3))
    schedule = data.draw(schedules())
    runs = softmax_agrees(randn(rows, n, dtype=dtype), schedule, data.draw(st.floats(0.1, 3)))
    assert min(holders(runs, rows)) >= 2 and all(run.turns > run.grid[0] for run in runs)

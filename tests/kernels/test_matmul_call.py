"""Count the Python of a known product, whose time is a target; counts do not depend on the host."""

import sys

import pytest
import torch

from kernels import matmul
from tests.support.fake_gpu import compiled
from tests.support.fake_host import Host

# Those of the imitated GPU included; 589 where all checks came before the plan.
MOST = 420


@pytest.fixture
def known(monkeypatch):
    """Return a call of matmul, with options, that has a plan on an imitated GPU."""
    compiled(monkeypatch)
    Host(monkeypatch)

    def forget():
        for launcher in (matmul.plain_fwd.launcher, matmul.matmul_fwd.launcher):
            launcher.plans.clear()
            launcher.seen.clear()

    def make(*shape, **options):
        # In float32 and with one step of K the kernel takes neither descriptors nor counters.
        a, b = torch.ones(*shape, 64, 32), torch.ones(32, 64)
        for _ in range(3):
            matmul.matmul(a, b, **options)
        return lambda: matmul.matmul(a, b, **options)

    forget()
    yield make
    forget()


def instructions(call):
    """Return how many instructions of Python a call takes, those of all functions in it."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.no_gpu
@pytest.mark.parametrize("options", [{}, {"activation": "relu"}])
def test_a_plain_product_takes_few_instructions(known, options):
    call = known(**options)
    assert matmul.plain_fwd.launcher.plans and not matmul.matmul_fwd.launcher.plans
    assert instructions(call) < MOST


@pytest.mark.no_gpu
def test_batches_are_no_longer(known):
    assert instructions(known(3)) <= instructions(known())


@pytest.mark.no_gpu
def test_other_products_have_a_plan_as_well(known):
    known(scale=2.0)
    assert matmul.matmul_fwd.launcher.plans and not matmul.plain_fwd.launcher.plans

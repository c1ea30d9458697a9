"""Check that verification refuses zeros, and one value in all places, as results of our cells."""

from pathlib import Path

import pytest
import torch

from harness.calls import tolerance
from harness.project import registry
from harness.study import jobs
from harness.verify import problem as oracle
from harness.verify.worker import EAGER

# A cell of more elements takes long on a CPU, and tests nothing that smaller cells do not.
MOST = 2**17
OPS = jobs.ops(Path(__file__).parents[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_zeros_and_constants_never_pass(name):
    op, _ = registry.op(name)
    if op.properties:
        pytest.skip("results are random; verification checks their properties instead")
    try:
        eager = registry.function(name, EAGER)
    except Exception:
        eager = op.reference
    judged = 0
    for case in op.edge:
        for dtype in op.dtypes_of(case):
            problem = oracle.problem(op, case, dtype, 11, "cpu", eager)
            if sum(truth.numel() for truth in problem.oracle.values()) > MOST:
                continue
            judged += sum(_refuses_trifles(problem, result) for result in problem.oracle)
    assert judged


def _refuses_trifles(problem: oracle.Problem, result: str) -> bool:
    """Assert that zeros and constants are refused; return False if the oracle itself is one."""
    truth, shaped = problem.oracle[result], problem.expected[result]
    held = truth.to(shaped.dtype)
    finite = held[held.isfinite()].double()
    if not finite.numel() or finite.abs().max() <= tolerance.ZERO * problem.scale:
        return False
    half_range = (finite.max() - finite.min()) / 2
    values = [0.0]
    # If the values are closer, the dtype or a long sum can hardly tell them apart.
    if half_range > tolerance.CAP * finite.abs().max():
        values += [finite.mean().item(), finite.max().item()]
    for value in values:
        constant = torch.full_like(held, value).where(held.isfinite(), held)
        verdict = problem.judge({result: constant}, strict=False)[result]
        assert verdict.ratio > 1, (problem.case.name, problem.dtype, result, value, verdict)
    return True

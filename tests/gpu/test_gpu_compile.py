"""Check our functions inside torch.compile and CUDA graphs: one graph, and the eager results."""

from pathlib import Path

import pytest
import torch

from harness.calls import inputs, invoke
from harness.project import registry
from harness.project.implementations import OURS
from harness.study import jobs
from kernels.layer_norm import layer_norm
from kernels.random import dropout, randint
from kernels.rms_norm import rms_norm

pytestmark = pytest.mark.gpu
OPS = sorted(jobs.ops(Path(__file__).resolve().parents[2]))


def plain_cases(op):
    """An edge case for each set of flags, the largest of usual layout and values, and its dtype."""
    usual = [case for case in op.edge if not case.layout and not case.values]
    # The last of those that the op has: bfloat16, where that is one.
    dtype = op.dtypes[-1]
    found = {}
    for case in sorted(usual, key=lambda case: sum(case.sizes.values())):
        if dtype in op.dtypes_of(case):
            found[case.flags] = case, dtype
    assert found, op.name
    return list(found.values())


def with_gradients(op, function, case, tensors):
    """The results of an eager call, and the gradients of the outputs if the op takes any."""
    if not op.differentiable:
        return invoke.run(op, function, case, tensors), None
    outputs = invoke.run(op, function, case, tensors)
    gradients = inputs.gradients(tuple(outputs.values()), 0)
    return invoke.run(op, function, case, tensors, gradients), gradients


def assert_near(results, expected, case):
    """Within a graph another kernel may run, whose sums have another order."""
    for key, truth in expected.items():
        finite = truth[truth.isfinite()].abs()
        largest = finite.max().item() if finite.numel() else 0.0
        atol = 4 * torch.finfo(truth.dtype).eps * largest if truth.is_floating_point() else 0
        torch.testing.assert_close(
            results[key], truth, rtol=0, atol=atol, msg=f"{case.name}: {key} differs"
        )


# An op may write over its arguments, so each call has its own.
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_a_graph_without_a_break_gives_the_same(name, dynamic):
    op, function = registry.op(name)[0], registry.function(name, OURS)
    for case, dtype in plain_cases(op):
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        given = (inputs.make(op, case, dtype, 0, "cuda") for _ in range(3))
        _, gradients = with_gradients(op, function, case, next(given))
        expected = invoke.run(op, function, case, next(given), gradients)
        assert_near(invoke.run(op, compiled, case, next(given), gradients), expected, case)


@pytest.mark.parametrize("name", OPS)
def test_a_captured_graph_follows_what_lies_in_its_inputs(name):
    op, function = registry.op(name)[0], registry.function(name, OURS)
    for case, dtype in plain_cases(op):
        tensors = inputs.make(op, case, dtype, 0, "cuda")
        _, gradients = with_gradients(op, function, case, tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = invoke.run(op, function, case, tensors, gradients)
        for key, tensor in inputs.make(op, case, dtype, 1, "cuda").items():
            if tensor is not None:
                tensors[key].copy_(tensor)
        graph.replay()
        others = inputs.make(op, case, dtype, 1, "cuda")
        assert_near(captured, invoke.run(op, function, case, others, gradients), case)


@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_beyond_32_bits_reach_the_kernel(dynamic):
    def drawn(low, high, seed, offset):
        return randint(low, high, 5000, seed, offset, device="cuda")

    compiled = torch.compile(drawn, fullgraph=True, dynamic=dynamic)
    for given in ((-(2**61), 2**62 + 12345, -(2**50), 2**45 + 3), (0, 50257, 2**31, 2**31)):
        assert torch.equal(compiled(*given), drawn(*given))
    x = torch.randn(5000, device="cuda")
    compiled = torch.compile(dropout, fullgraph=True, dynamic=dynamic)
    for p, seed in ((0.1, 2**40 + 3), (0.7, -(2**62)), (0.9, 1)):
        assert torch.equal(compiled(x, p, seed), dropout(x, p, seed))


@pytest.mark.parametrize("function", [layer_norm, rms_norm])
def test_long_rows_in_a_graph(function):
    # Outside of a graph several programs share each row and wait for each other.
    x = torch.randn(200, 131072, device="cuda", dtype=torch.bfloat16)
    factors = torch.randn(1 + (function is layer_norm), 131072, device="cuda", dtype=x.dtype)
    dy, found = torch.randn_like(x), []
    for call in (function, torch.compile(function, fullgraph=True)):
        leaves = [each.detach().requires_grad_() for each in (x, *factors)]
        y = call(*leaves)
        found.append((y, *torch.autograd.grad(y, leaves, dy)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one)

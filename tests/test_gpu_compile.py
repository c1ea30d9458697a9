"""Our functions inside torch.compile and CUDA graphs: one graph, and the results of eager calls."""

from pathlib import Path

import pytest

from harness import discover, inputs, lease, load, oracle

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not lease.gpus() or not torch.cuda.is_available(), reason="needs a GPU"),
]
OPS = sorted(discover.ops(Path(__file__).resolve().parents[1]))


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
        return oracle.run(op, function, case, tensors), None
    outputs = oracle.run(op, function, case, tensors)
    gradients = inputs.gradients(tuple(outputs.values()), 0)
    return oracle.run(op, function, case, tensors, gradients), gradients


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_a_graph_without_a_break_gives_the_same(name, dynamic):
    op, function = load.op(name)[0], load.function(name, load.OURS)
    for case, dtype in plain_cases(op):
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        tensors = inputs.make(op, case, dtype, 0, "cuda")
        expected, gradients = with_gradients(op, function, case, tensors)
        for key, result in oracle.run(op, compiled, case, tensors, gradients).items():
            torch.testing.assert_close(result, expected[key], msg=f"{case.name}: {key} differs")


@pytest.mark.parametrize("name", OPS)
def test_a_captured_graph_follows_what_lies_in_its_inputs(name):
    op, function = load.op(name)[0], load.function(name, load.OURS)
    for case, dtype in plain_cases(op):
        tensors = inputs.make(op, case, dtype, 0, "cuda")
        _, gradients = with_gradients(op, function, case, tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = oracle.run(op, function, case, tensors, gradients)
        others = inputs.make(op, case, dtype, 1, "cuda")
        for key, tensor in others.items():
            if tensor is not None:
                tensors[key].copy_(tensor)
        graph.replay()
        expected = oracle.run(op, function, case, others, gradients)
        for key, result in captured.items():
            torch.testing.assert_close(result, expected[key], msg=f"{case.name}: {key} differs")

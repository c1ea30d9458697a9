"""Our functions inside torch.compile: one graph without a break, and the results of eager calls."""

from pathlib import Path

import pytest

from harness import discover, inputs, lease, load, oracle

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not lease.gpus() or not torch.cuda.is_available(), reason="needs a GPU"),
]
OPS = sorted(discover.ops(Path(__file__).resolve().parents[1]))
DTYPE = "bfloat16"


def plain_cases(op):
    """An edge case for each set of flags: the largest of usual layout and values."""
    usual = [case for case in op.edge if not case.layout and not case.values]
    found = {}
    for case in sorted(usual, key=lambda case: sum(case.sizes.values())):
        if DTYPE in op.dtypes_of(case):
            found[case.flags] = case
    return list(found.values())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_a_graph_without_a_break_gives_the_same(name, dynamic):
    op, function = load.op(name)[0], load.function(name, load.OURS)
    for case in plain_cases(op):
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        tensors = inputs.make(op, case, DTYPE, 0, "cuda")
        gradients = None
        if op.differentiable:
            outputs = oracle.run(op, function, case, tensors)
            gradients = inputs.gradients(tuple(outputs.values()), 0)
        expected = oracle.run(op, function, case, tensors, gradients)
        for key, result in oracle.run(op, compiled, case, tensors, gradients).items():
            torch.testing.assert_close(result, expected[key], msg=f"{case.name}: {key} differs")

"""Check what every op declares: a right reference, and cases that fit its inputs and flags."""

import itertools
from pathlib import Path

import pytest
import torch

from harness.project import registry, source_tree
from ops._spec import make_case
from tests.support.values import randn

FAMILIES = source_tree.ops(Path(__file__).parents[2])
# Their references are functions of floating tensors alone.
PLAIN = ("attention", "layer_norm", "matmul", "softmax", "vector")
OPS = sorted(name for name, family in FAMILIES.items() if family in PLAIN)


@pytest.mark.parametrize("name", OPS)
def test_reference_is_differentiable_and_right(name):
    """Check the oracle's own gradients against finite differences in float64."""
    op, _ = registry.op(name)
    case = op.edge[1]
    sizes = {letter: min(size, 4) for letter, size in case.sizes.items()}
    tensors = []
    present = {k: t for k, t in op.inputs.items() if t.is_in(case)}
    for tensor in present.values():
        shape = [sizes[letter] for letter in tensor.letters(sizes)]
        tensors.append(randn(*shape, seed=len(tensors)).double().requires_grad_())
    extra = op.arguments(case)
    names = list(present)

    def reference(*values):
        given = dict(zip(names, values, strict=True))
        return op.reference(**{**dict.fromkeys(op.inputs), **extra, **given})

    assert torch.autograd.gradcheck(reference, tensors)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_op_declares_what_the_house_expects(name):
    op, family = registry.op(name)
    assert "forward" in op.passes and op.differentiable == ("both" in op.passes)
    for case in itertools.chain(op.edge, op.sweep):
        for tensor in op.inputs.values():
            tensor.letters(case.sizes)
        assert set(case.flags) <= set(op.flags), f"{family}: {case.name} has an unknown flag"
    names = [case.name for case in (*op.edge, *op.sweep)]
    assert len(set(names)) == len(names)


def test_a_flag_has_not_the_name_of_a_layout_or_of_values():
    for flag in ("offset", "denormal"):
        with pytest.raises(ValueError, match=f"{flag}.* is a layout or a kind of values"):
            make_case(flag, N=3)

"""Check that second derivatives and forward derivatives are right or an error, never a constant."""

import inspect

import pytest
import torch
from torch.autograd import forward_ad

from kernels._runtime.autograd import _Refusing
from kernels.vector import add, mul
from tests.support import kernel_files
from tests.support.op_calls import INDICES, OPS, WITHOUT, call_of

DIFFERENTIABLE = [name for name in OPS if name not in (*INDICES, *WITHOUT)]


def functions():
    """Return all autograd functions of the kernels, found by walking their modules."""
    found = set()
    for module in kernel_files.modules():
        for value in vars(module).values():
            if (
                inspect.isclass(value)
                and issubclass(value, torch.autograd.Function)
                and (value is not _Refusing)
            ):
                found.add(value)
    return found


def second(given, names, function, options, power):
    """Return the derivatives of the squared gradients by the named tensors; None if there is none.
    - power: with 1 the gradient of the outputs is one; with 2 it depends on the outputs.
    - power: with 1 the gradient of the outputs is one; with 2 it depends on the outputs.
    """
    leaves = {name: given[name].detach().clone().requires_grad_() for name in names}
    outputs = function(**given | leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # Raising to the power one would still record a dependence on the outputs.
    loss = sum((output if power == 1 else output**power).sum() for output in outputs)
    first = torch.autograd.grad(loss, [*leaves.values()], create_graph=True)
    squares = sum((each * each).sum() for each in first)
    if not squares.requires_grad:
        return [None] * len(leaves)
    return torch.autograd.grad(squares, [*leaves.values()], allow_unused=True)


def seen(name, dtype, **further):
    op, function, good, options = call_of(name)
    options = options | further
    given = {k: x.to(dtype) if x.is_floating_point() else x for k, x in good.items()}
    names = [key for key in given if op.inputs[key].grad]
    leaf = {key: x.requires_grad_() if key in names else x for key, x in given.items()}
    made = function(**leaf, **options)
    nodes = {type(out.grad_fn) for out in (made if isinstance(made, tuple) else (made,))}
    given = {key: x.detach() for key, x in leaf.items()}
    for power in (1, 2):
        compare(given, names, op, function, options, power)
    return nodes


def compare(given, names, op, function, options, power):
    """Assert that our second derivative is right or an error."""
    try:
        ours = second(given, names, function, options, power)
    except RuntimeError as error:
        assert "no second derivative is computed; expected a single" in str(error), error
        return
    exact = {k: x.double() if x.is_floating_point() else x for k, x in given.items()}
    exact |= {key: None for key in op.inputs if key not in exact}
    wanted = second(exact, names, op.reference, options, power)
    for found, expected in zip(ours, wanted, strict=True):
        if found is None or expected is None:
            assert not any(x is not None and x.any() for x in (found, expected))
        else:
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_second_derivative_of_any_function_is_right_or_an_error():
    nodes = set()
    for name in DIFFERENTIABLE:
        nodes |= seen(name, torch.float32)
        # In float16 a mean has a function of its own.
        nodes |= seen(name, torch.float16) if name.endswith("cross_entropy") else set()
    # The losses of rows have a function of their own as well.
    nodes |= seen("linear_cross_entropy", torch.float32, reduction="none")
    classes = {getattr(node, "_forward_cls", None) for node in nodes} - {None}
    assert classes == functions() and len(classes) > 10


def test_a_part_of_a_sum_does_not_count_as_a_constant():
    x = torch.randn(4, 24, requires_grad=True)
    y = add(mul(x, x), x * x * x)
    (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="Mul: its gradient was differentiated again"):
        torch.autograd.grad(first.pow(2).sum(), x)


def test_a_tensor_that_is_not_differentiated_again_may_be_kept():
    x = torch.randn(24, requires_grad=True)
    (first,) = torch.autograd.grad(mul(x, x).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 2 * x)


@pytest.mark.parametrize("name", OPS)
def test_a_tangent_is_refused_and_not_lost(name):
    _, function, good, options = call_of(name)
    for key, tensor in good.items():
        if not tensor.is_floating_point() or name in INDICES:
            continue
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
            with pytest.raises(ValueError, match=rf"^{key}: has a tangent .*expected a tensor"):
                function(**good | {key: dual}, **options)

"""Check that an argument of the wrong kind is refused by name, value and expectation."""

import inspect
import re
from collections.abc import Sequence

import pytest
import torch

from kernels._runtime.checks import shown
from kernels.block_sparse_attention import BlockMask
from tests.support.op_calls import OPS, call_of

NUMBER = torch.ones(())
# For each kind of parameter: a value of another kind, and the error.
WRONG = {
    torch.Tensor: (TypeError, (None, 3.0, [1.0, 2.0], "x")),
    torch.Tensor | None: (TypeError, (3.0, [1.0, 2.0], "x")),
    float: (TypeError, (None, True, [1.0], "x", NUMBER, 1j)),
    float | None: (TypeError, (True, [1.0], "x", NUMBER, 1j)),
    bool: (TypeError, (None, 1, 0.0, "no", NUMBER)),
    int: (TypeError, (None, True, 1.5, "x", NUMBER)),
    int | None: (TypeError, (True, 1.5, "x", NUMBER)),
    int | torch.Tensor: (TypeError, (None, True, False, 1.5, "x", [3])),
    int | torch.Tensor | None: (TypeError, (True, False, 1.5, "x", [3])),
    int | tuple[int, int] | None: (TypeError, (True, 1.5, "x", (1.5, 1), (2, None), NUMBER)),
    int | tuple[int, ...]: (TypeError, (None, True, 1.5, "x", (1.5,), (2, None), NUMBER)),
    torch.Tensor | Sequence[torch.Tensor]: (TypeError, (None, 3.0, [1.0, 2.0], "x")),
    torch.Tensor | Sequence[torch.Tensor] | None: (TypeError, (3.0, [1.0, 2.0], "x")),
    torch.Tensor | BlockMask: (TypeError, (None, 3.0, [True], "x")),
    float | torch.Tensor: (TypeError, (None, True, [1.0], "x", 1j)),
    str: (TypeError, (None, 3, ["mean"])),
    torch.dtype: (TypeError, (None, "int64", torch.int16, int)),
    torch.dtype | None: (TypeError, ("float32", torch.float64, float)),
    torch.dtype | None: (TypeError, ("int64", torch.int16, int)),
    # PyTorch itself refuses what is no device, in its own words.
    torch.device | str | None: (TypeError, ()),
}
OUTSIDE = {str: ("nonsense",), int | tuple[int, ...]: (-1, (2, -3))}


def parameters_of(name):
    _, function, good, options = call_of(name)
    kinds = inspect.get_annotations(function, eval_str=True)
    return function, {**good, **options}, {k: v for k, v in kinds.items() if k != "return"}


def refused(function, given, name, value, error):
    with pytest.raises(error) as raised:
        function(**given | {name: value})
    words = str(raised.value)
    part = value if not isinstance(value, tuple) else next(x for x in value if x not in (1, 2))
    assert re.match(rf"{name}: .*, expected ", words), words
    assert shown(part) in words or str(part) in words, words


@pytest.mark.parametrize("op", OPS)
def test_an_argument_of_another_kind_is_named(op):
    function, given, kinds = parameters_of(op)
    assert inspect.signature(function).parameters.keys() == kinds.keys()
    for name, kind in kinds.items():
        error, values = WRONG[kind]
        for value in values:
            refused(function, given, name, value, error)
        for value in OUTSIDE.get(kind, ()):
            refused(function, given, name, value, ValueError)


@pytest.mark.parametrize("op", OPS)
def test_nothing_but_tensors_is_asked_where_the_call_is_right(op):
    """Make the same calls without the wrong argument: they must pass, so it was the reason."""
    function, given, _ = parameters_of(op)
    function(**given)


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("adamw", 6),
        ("attention", 8),
        ("attention_varlen", 7),
        ("block_sparse_attention", 4),
        ("rotary", 2),
        ("bucketize", 2),
        ("cross_entropy", 8),
        ("embedding", 1),
        ("linear_cross_entropy", 7),
        ("linear", 4),
    ],
)
def test_options_that_others_order_otherwise_are_given_by_name(op, options):
    function, _, kinds = parameters_of(op)
    named = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    assert len(named) == options and not any(kinds[each.name] is torch.Tensor for each in named)

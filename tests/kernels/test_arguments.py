"""Check that a bad tensor is refused by name and value, and a harmless one is taken."""

import re

import pytest
import torch

from tests.support.op_calls import DEVICE, OPS, call_of

WRONG = {
    "wide": lambda x: x.double() if x.is_floating_point() else x.float(),
    "integers": lambda x: x.to(torch.int16),
    "without memory": lambda x: x.to("meta"),
    "a dimension more": lambda x: x[None],
    "a dimension less": lambda x: x[0] if x.dim() else x[None].expand(2),
    "longer": lambda x: torch.cat([x, x.narrow(-1, 0, 1)], -1) if x.dim() else x[None].expand(2),
    "more rows": lambda x: torch.cat([x, x.narrow(0, 0, 1)]) if x.dim() else x[None].expand(3),
}
APART = "every second of a row"
ARGUMENTS = {APART: lambda x: torch.stack([x, x], -1)[..., 0], **WRONG}
# A GPU kernel cannot read the memory of the host.
if DEVICE == "cuda":
    ARGUMENTS["of the host"] = lambda x: x.cpu()
NOWHERE = ("without memory", "of the host")


def whole(value, words):
    """Return whether a value stands in a message by itself, not as part of another value."""
    return re.search(rf"(?<![\w.]){re.escape(str(value))}(?!\w)", words)


def named(error, given):
    """Assert that a refusal names one of the tensors, its value and the expected one."""
    name, _, words = str(error).partition(": ")
    # The result of randint lies on the device of its seed.
    assert name in given or name == "out", error
    found, expected, _ = words.partition("expected")
    tensor = given.get(name, given.get("seed"))
    shown = (tensor.dtype, tensor.device, tuple(tensor.shape), tensor.dim(), *tensor.shape[-1:])
    assert expected and any(whole(each, found) for each in shown), error


def right(op, result, given, options):
    """Assert that a call that was not refused gives the result of the formula."""
    exact = {k: t.double() if t.dtype.is_floating_point else t for k, t in given.items()}
    expected = op.reference(**{key: exact.get(key) for key in op.inputs}, **options)
    pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (result, expected)), strict=True)
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape
        # The values are sums of float32 numbers of about one; a wrong dtype or row is far off.
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("name", OPS)
def test_a_tensor_is_refused_or_its_result_is_right(name, kind):
    op, function, good, options = call_of(name)
    for wrong in good:
        given = good | {wrong: ARGUMENTS[kind](good[wrong])}
        try:
            result = function(**given, **options)
        except (ValueError, TypeError) as error:
            assert kind != APART, error
            named(error, given)
        else:
            assert kind not in NOWHERE
            right(op, result, given, options)


@pytest.mark.parametrize("kind", ["wide", "integers"])
@pytest.mark.parametrize("name", OPS)
def test_a_dtype_of_all_tensors_is_refused_or_the_result_is_right(name, kind):
    op, function, good, options = call_of(name)
    given = {key: WRONG[kind](x) if x.is_floating_point() else x for key, x in good.items()}
    try:
        result = function(**given, **options)
    except (ValueError, TypeError) as error:
        named(error, given)
    else:
        right(op, result, given, options)

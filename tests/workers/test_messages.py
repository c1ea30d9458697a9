"""Messages between parents and workers: their form, and what is refused of it."""

import dataclasses
import json
import typing
from types import NoneType, UnionType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.measure import messages as measure
from harness.tune import messages as tune
from harness.verify import messages as verify
from harness.workers.messages import Done, Failure, Hello, MessageError, Pid, decode, encode

REQUESTS = (*measure.REQUESTS, *verify.REQUESTS, *tune.REQUESTS)
KINDS = (*REQUESTS, *{each.answer for each in REQUESTS}, Done, Failure, Hello, Pid)
SCALARS = {
    str: st.text(),
    int: st.integers(),
    float: st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    bool: st.booleans(),
    NoneType: st.none(),
    object: st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers()),
}


def values(hint) -> st.SearchStrategy:
    """Values of a field's type, as JSON holds them."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is UnionType:
        return st.one_of(*map(values, arguments))
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(*map(values, arguments), max_size=3)
    return SCALARS[hint]


def messages(kind) -> st.SearchStrategy:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{each.name: values(hints[each.name]) for each in fields(kind)})


def fields(kind):
    return dataclasses.fields(kind)


EVERY = st.sampled_from(KINDS).flatmap(messages)


@given(EVERY)
def test_a_message_survives_the_way_through_json(message):
    text = json.dumps(encode(message), allow_nan=False)
    assert decode(json.loads(text), *KINDS) == message
    assert vars(decode(json.loads(text), type(message))) == vars(message)


@given(EVERY, st.data())
def test_a_message_without_a_field_or_with_one_too_many_is_refused(message, data):
    kind, whole = type(message), encode(message)
    unknown = data.draw(st.text().filter(lambda name: name not in whole))
    with pytest.raises(MessageError, match=f"{kind.__name__} with an unknown field"):
        decode(whole | {unknown: 1}, kind)
    if fields(kind):
        name = data.draw(st.sampled_from([each.name for each in fields(kind)]))
        without = {key: value for key, value in whole.items() if key != name}
        with pytest.raises(MessageError, match=f"{kind.__name__} without {name}"):
            decode(without, kind)


@pytest.mark.parametrize(
    ("message", "field", "wrong"),
    [
        (measure.Released(7), "held_bytes", 7.5),
        (measure.Released(7), "held_bytes", True),
        (measure.Released(7), "held_bytes", None),
        (measure.BlockTimes(0.1, 1.0, 2.0), "device_us", "1.0"),
        (measure.BlockTimes(0.1, 1.0, 2.0), "throttle", None),
        (verify.UnitChecked([], True), "alive", 1),
        (verify.UnitChecked([], True), "cells", [{}, 3]),
        (verify.CheckUnit(0), "unit", "0"),
        (tune.Device("H", "90", {"sm_count": 132}), "limits", {"sm_count": "132"}),
        (Failure("crashed", "died"), "reason", 3),
    ],
)
def test_a_value_of_another_type_is_refused(message, field, wrong):
    kind = type(message)
    assert decode(encode(message), kind) == message
    with pytest.raises(MessageError, match=f"^{kind.__name__} with {field} = "):
        decode(encode(message) | {field: wrong}, kind)


@pytest.mark.parametrize("data", [None, 3, [], {}, {"status": "ok"}, {"pid": 3}])
def test_a_value_that_is_no_message_is_refused(data):
    with pytest.raises(MessageError, match="no message"):
        decode(data, Pid)


def test_a_message_of_another_class_is_refused_even_with_the_same_fields():
    with pytest.raises(MessageError, match="'Released' in place of Checked or Failure"):
        decode(encode(measure.Released(0)), measure.Checked, Failure)


def test_the_requests_of_a_stage_name_different_methods():
    for stage in (measure, verify, tune):
        assert len({each.do for each in stage.REQUESTS}) == len(stage.REQUESTS)

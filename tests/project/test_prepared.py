"""An input that a library prepares: made once for a tensor, and anew after a change."""

import gc
import types
import weakref

import pytest
import torch

from harness.cli import UserError
from harness.project import registry
from harness.project.prepared import prepared
from ops._spec import Op


class Made:
    """An object that a maker made, with the entries and the option that it was given."""

    def __init__(self, entries, option):
        self.entries, self.option = entries, option


@pytest.fixture
def called():
    """A function with a prepared input `mask`, and all that was made."""
    made = []

    def function(x, mask, option=1):
        return mask

    def maker(x, mask, option=1):
        made.append(Made(mask.tolist(), option))
        return made[-1]

    return prepared(function, {"mask": maker}), made


def test_it_is_made_once_for_a_tensor(called):
    function, made = called
    x, mask = torch.ones(2), torch.zeros(2)
    first = function(x, mask, option=2)
    assert function(x=x, mask=mask, option=2) is first is function(torch.zeros(2), mask, option=2)
    assert (first.entries, first.option) == ([0, 0], 2) and len(made) == 1


@pytest.mark.parametrize("change", ["an entry", "an option", "a shape", "the tensor"])
def test_it_is_made_anew_after_a_change(called, change):
    function, made = called
    x, mask, option = torch.ones(2), torch.zeros(2), 1
    first = function(x, mask)
    if change == "an entry":
        mask[1] = 5
    elif change == "an option":
        option = 3
    elif change == "a shape":
        x = torch.ones(3)
    else:
        mask = torch.full((2,), 7.0)
    again = function(x, mask, option=option)
    assert again is not first and len(made) == 2
    assert again.entries == mask.tolist() and again.option == option


def test_it_lives_no_longer_than_its_tensor(called):
    function, made = called
    for value in range(50):
        # Most of these come to lie where one before them lay.
        assert function(torch.ones(2), torch.full((2,), float(value))).entries == [value, value]
    references = [weakref.ref(each) for each in made]
    made.clear()
    gc.collect()
    assert len(references) == 50 and not any(reference() for reference in references)


def test_a_value_that_is_no_tensor_is_handed_on(called):
    function, made = called
    assert function(torch.ones(2), "a word") == "a word" and function(None, None) is None
    assert not made


def test_a_function_without_a_maker_is_called_itself():
    assert prepared(len, {}) is len


def declared(*names):
    return Op("an_op", None, {}, None, (), (), prepared=names)


def test_a_file_prepares_what_its_op_names_and_nothing_else():
    module = types.SimpleNamespace(
        __name__="baselines.rival", PREPARES={"an_op": {"mask": "_lists"}}, _lists=sorted
    )
    assert registry._makers(module, declared("mask")) == {"mask": sorted}
    assert registry._makers(types.SimpleNamespace(), declared("mask")) == {}
    with pytest.raises(UserError, match=r"rival: prepares \['mask'\] of an_op.*prepare \['x'\]"):
        registry._makers(module, declared("x"))

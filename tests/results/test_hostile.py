"""Check which cases are hostile, by their declaration and, in older reports, by their names."""

from pathlib import Path

import pytest

from harness.project import registry
from harness.results import hostile
from harness.study import jobs
from ops._spec import LAYOUTS, OFFSETS, VALUES, make_case

ROOT = Path(__file__).parents[2]
PLAIN = {"M": 4, "N": 100}


@pytest.mark.parametrize("values", VALUES)
def test_values_of_any_kind_but_normal_are_hostile(values):
    assert make_case(**PLAIN, values=values).hostile == (values != "")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_that_are_not_aligned_or_share_memory_are_hostile(layout):
    odd = layout in ("padded", "expanded", *OFFSETS)
    assert make_case(**PLAIN, layout=layout).hostile == odd
    assert make_case("smooth", **PLAIN, layout=layout).hostile == odd


@pytest.mark.parametrize(
    ("sizes", "odd"),
    [
        ({"N": 0}, True),
        ({"M": 0, "N": 64}, True),
        ({"M": 64, "N": 64, "K": 0}, True),
        ({"N": 1}, True),
        ({"M": 1, "N": 1, "K": 1}, True),
        ({"M": 1, "N": 2}, False),
        ({"M": 1, "N": 270000}, False),
        ({}, False),
    ],
)
def test_tensors_of_one_element_or_none_are_hostile(sizes, odd):
    assert make_case(**sizes).hostile == odd


def test_flags_are_ordinary_but_for_extreme_ones():
    assert not make_case("causal", "int32", **PLAIN).hostile
    assert make_case("late", "wide", N=2048).hostile


@pytest.mark.parametrize("name", sorted(jobs.ops(ROOT)))
def test_a_name_says_what_its_case_is(name):
    op, _ = registry.op(name)
    for each in (*op.edge, *op.sweep):
        assert hostile.parsed(each.name).hostile == each.hostile, each.name
        assert hostile.parsed(each.name).name == each.name
    # Some cases of each op are ordinary; otherwise its mark would rest on nothing.
    assert any(not each.hostile for each in op.edge)


def test_a_cell_that_says_what_it_is_is_believed():
    assert hostile.cell({"case": "N100-large"}) and not hostile.cell({"case": "N100"})
    assert hostile.cell({"case": "N100", "hostile": True})
    assert not hostile.cell({"case": "N100-large", "hostile": False})

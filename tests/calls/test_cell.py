"""Check that the parts of a sweep are apart, hold all of it, and keep the passes of a shape."""

from hypothesis import given
from hypothesis import strategies as st

from harness.calls.cell import Cell, share
from ops._spec import make_case

CASES = [make_case(M=size, N=1) for size in range(1, 8)]
CELLS = st.lists(
    st.builds(
        Cell,
        st.sampled_from(CASES),
        st.sampled_from(["float16", "float32"]),
        st.sampled_from(["forward", "backward"]),
    ),
    unique_by=str,
)


@given(CELLS, st.integers(1, 5))
def test_each_cell_is_of_one_part_with_all_of_its_shape(cells, count):
    parts = [share(cells, number, count) for number in range(1, count + 1)]
    assert sorted(str(each) for part in parts for each in part) == sorted(map(str, cells))
    shapes = [{(each.case.name, each.dtype) for each in part} for part in parts]
    assert sum(map(len, shapes)) == len(set().union(*shapes))
    # In turn: no part has two shapes more than another.
    assert max(map(len, shapes)) - min(map(len, shapes)) <= 1
    assert all(part == [each for each in cells if each in part] for part in parts)

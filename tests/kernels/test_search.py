"""Check bucketize against PyTorch for any ascending boundaries, by search and by table."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.machine import nvml
from kernels import search
from kernels.search import VALUES, bucketize
from kernels.search_details import grid as _grid
from tests.support.examples import many

DEVICE = "cuda" if nvml.gpus() else "cpu"
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-40)
real = st.one_of(st.sampled_from(SPECIAL[1:]), st.floats(-3, 3, width=16))
sides = st.booleans()


def agrees(x, boundaries, right, short):
    found = bucketize(x.to(DEVICE), boundaries.to(DEVICE), right=right, out_int32=short).cpu()
    # PyTorch's search fails among NaN boundaries, which no number reaches.
    numbers = boundaries[boundaries == boundaries]
    expected = torch.bucketize(x, numbers, right=right, out_int32=short)
    expected[x != x] = boundaries.numel()
    assert found.dtype == expected.dtype and torch.equal(found, expected)


@many
@given(
    st.lists(st.one_of(real, st.just(math.nan)), max_size=40),
    st.lists(real, max_size=70),
    st.sampled_from([torch.float32, torch.float16, torch.float64]),
    sides,
    sides,
)
def test_as_pytorch_for_any_boundaries(values, boundaries, dtype, right, short):
    x = torch.tensor([*SPECIAL, *values], dtype=dtype)
    # The two sides differ only for values on a boundary, so the boundaries are looked up as well.
    ordered = torch.tensor(boundaries, dtype=dtype).sort().values
    agrees(torch.cat([x, ordered]), ordered, right, short)


@many
@given(
    st.lists(st.integers(-100, 100), min_size=1, max_size=50),
    st.lists(st.integers(-100, 100), max_size=50),
    st.sampled_from([torch.int8, torch.int32, torch.int64]),
    sides,
)
def test_as_pytorch_for_integers(values, boundaries, dtype, right):
    ordered = torch.tensor(sorted(boundaries), dtype=dtype)
    agrees(torch.tensor(values, dtype=dtype), ordered, right, False)


@pytest.mark.parametrize("count", [*range(10), 255, 256, 257, 1023, 1024, 1025, 4100])
def test_as_pytorch_for_any_number_of_boundaries(count):
    boundaries = torch.arange(count, dtype=torch.float32)
    x = torch.linspace(-1, count, 777).round(decimals=1)
    for right in (False, True):
        agrees(x, boundaries, right, False)
        agrees(x, torch.ones_like(boundaries), right, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("narrow", [search.NARROW, 10])
def test_the_table_holds_the_answer_of_every_value(dtype, right, narrow, monkeypatch):
    monkeypatch.setattr(search, "TABLE_FROM", VALUES)
    monkeypatch.setattr(search, "NARROW", narrow)
    every = torch.arange(VALUES, dtype=torch.int32).to(torch.uint16).view(dtype)
    drawn = torch.randn(90, generator=torch.Generator().manual_seed(1)).to(dtype)
    boundaries = torch.cat([drawn, drawn[:9], torch.tensor([math.inf, -math.inf], dtype=dtype)])
    agrees(every, boundaries.sort().values, right, not right)


@pytest.mark.parametrize("count", [2, 3, 32, 33, 1000, 1023, 1024])
@pytest.mark.parametrize("right", [False, True])
def test_the_tree_is_the_search(count, right, monkeypatch):
    monkeypatch.setattr(search, "TREE_FROM", 1)
    monkeypatch.setattr(search, "LEAST_TREE", 2)
    tile = {"BLOCK": 1024, "num_warps": 4}
    monkeypatch.setitem(search.TREE.__dict__, "choose", lambda **key: tile)
    generator = torch.Generator().manual_seed(count)
    for dtype in (torch.float32, torch.float16, torch.int64):
        values = (torch.randn(count, generator=generator) * 300).to(dtype).sort().values
        x = torch.cat([values, values + 1, (torch.randn(900, generator=generator) * 400).to(dtype)])
        if dtype.is_floating_point:
            x = torch.cat([x, torch.tensor(SPECIAL, dtype=dtype)])
        agrees(x, values, right, not right)


wide = st.one_of(
    real,
    st.floats(width=32, allow_nan=False),
    st.floats(1000, 1001, width=32),
    st.builds(math.ldexp, st.floats(-1, 1, width=32), st.integers(-120, 120)),
)


@pytest.fixture
def gridded(monkeypatch):
    monkeypatch.setattr(search, "GRID_FROM", 1)
    monkeypatch.setattr(search, "MOST_TREE", 0)
    monkeypatch.setattr(_grid, "LEAST_CELLS", 128)


@settings(many, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(wide, max_size=30),
    st.lists(wide, min_size=1, max_size=80),
    st.sampled_from([torch.float32, torch.float64]),
    sides,
    sides,
)
def test_the_grid_is_the_search_for_any_boundaries(gridded, values, bounds, dtype, right, short):
    boundaries = torch.tensor(bounds, dtype=dtype).sort().values
    beside = torch.nextafter(boundaries, torch.zeros_like(boundaries))
    agrees(
        torch.cat([torch.tensor([*SPECIAL, *values], dtype=dtype), boundaries, beside]),
        boundaries,
        right,
        short,
    )


CROWDS = {
    "few in each part": lambda z: z,
    "all equal": torch.ones_like,
    "two values": lambda z: z.sign(),
    "a crowd among others": lambda z: torch.where(z.abs() < 0.5, 0.25, z),
    "heavy tails": lambda z: z / z.roll(1),
    "far from zero": lambda z: z + 1e6,
    "denormal": lambda z: z * 1e-39,
    "all of the range": lambda z: z * 1e38,
    "infinities": lambda z: torch.where(z > 1, math.inf, torch.where(z < -1, -math.inf, z)),
    "integers": lambda z: (z * 1000).long(),
    "large integers": lambda z: (z * 2**60).long(),
}


@pytest.mark.parametrize("crowd", CROWDS)
@pytest.mark.parametrize("count", [1, 2, 500, 3000])
def test_the_grid_holds_crowds(gridded, crowd, count):
    generator = torch.Generator().manual_seed(count)
    boundaries = CROWDS[crowd](torch.randn(count, generator=generator)).sort().values
    x = CROWDS[crowd](torch.randn(900, generator=generator))
    x = torch.cat([x, boundaries, torch.tensor([0, 1, -1, 2**30]).to(x.dtype)])
    if x.dtype.is_floating_point:
        x = torch.cat([x, torch.tensor(SPECIAL)])
    for right in (False, True):
        agrees(x, boundaries, right, right)


def test_the_grid_stays_within_boundaries_that_are_in_no_order(gridded):
    generator = torch.Generator().manual_seed(7)
    boundaries = torch.randn(3000, generator=generator)
    boundaries[::5] = math.nan
    found = bucketize(torch.randn(3000, generator=generator).to(DEVICE), boundaries.to(DEVICE))
    assert found.min() >= 0 and found.max() <= len(boundaries)


SEARCHES = {
    "plain": {},
    "tree": {"TREE_FROM": 1, "LEAST_TREE": 2},
    "grid": {"GRID_FROM": 1, "MOST_TREE": 0},
    "table": {"TABLE_FROM": 1},
}


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("nans", [1, 5, 33])
@pytest.mark.parametrize("path", SEARCHES)
def test_boundaries_that_are_nan_lie_beyond_every_number(path, nans, right, monkeypatch):
    for name, value in SEARCHES[path].items():
        monkeypatch.setattr(search, name, value)
    monkeypatch.setattr(_grid, "LEAST_CELLS", 128)
    dtype = torch.float16 if path == "table" else torch.float32
    generator = torch.Generator().manual_seed(nans)
    drawn = torch.randn(33 - nans, generator=generator).to(dtype)
    boundaries = torch.cat([drawn, torch.full((nans,), math.nan, dtype=dtype)]).sort().values
    assert boundaries[-nans:].isnan().all()
    x = torch.cat([drawn, torch.randn(700, generator=generator).to(dtype)])
    agrees(torch.cat([x, torch.tensor(SPECIAL, dtype=dtype)]), boundaries, right, False)


EVERY_DTYPE = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_a_dtype_is_refused_by_name_or_searched(dtype):
    try:
        x, boundaries = torch.zeros(5).to(dtype), torch.ones(3).to(dtype)
    except (RuntimeError, TypeError):
        # A dtype without conversions can be made only from its bits.
        x, boundaries = (torch.zeros(n * dtype.itemsize, dtype=torch.uint8) for n in (5, 3))
        x, boundaries = x.view(dtype), boundaries.view(dtype)
    try:
        found = bucketize(x.to(DEVICE), boundaries.to(DEVICE))
    except TypeError as error:
        assert str(error) == f"x: {dtype}, expected a dtype of real numbers"
        assert dtype not in (torch.float32, torch.float16, torch.int64, torch.uint8)
    else:
        assert torch.equal(found.cpu(), torch.zeros(5, dtype=torch.int64))


def test_shapes_and_layouts():
    x, boundaries = torch.randn(6, 10), torch.randn(40).sort().values
    agrees(x.T[::2], boundaries[::3], False, False)
    agrees(x[0, 0], boundaries, False, False)
    agrees(x[:0], boundaries, False, True)


REFUSALS = {
    "another dtype": (TypeError, "torch.float64, expected torch.float32", torch.Tensor.double),
    "two dimensions": (ValueError, "shape .*expected one dimension", lambda x: x.view(1, -1)),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_bad_arguments_are_refused(what):
    error, words, wrong = REFUSALS[what]
    x = torch.ones(4, device=DEVICE)
    with pytest.raises(error, match=f"^boundaries: {words}"):
        bucketize(x, wrong(x))

"""Check random integers and dropout: their laws and their streams."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.machine import nvml
from harness.project import registry
from kernels import random
from kernels.random import LEVELS, NARROW, dropout, randint
from kernels.random_details import philox as _random
from ops import _philox
from ops import random as problems
from ops._laws import uneven
from ops.random import DROPOUT, dropout_reference, randint_reference
from tests.support.examples import many

DEVICE = "cuda" if nvml.gpus() else "cpu"
INT32, INT64 = torch.iinfo(torch.int32), torch.iinfo(torch.int64)
# Triton's interpreter keeps a number from 2**31 to 2**32 in 32 bits, though it says it has 64.
seeds = st.integers(INT64.min, INT64.max).filter(lambda n: DEVICE == "cuda" or n >> 31 != 1)


def draw(low, high, size, seed, **more):
    return randint(low, high, size, seed, device=DEVICE, **more).cpu()


@many
@given(
    st.integers(0, 1500),
    st.one_of(st.integers(INT32.min, INT32.max), st.integers(-10, 10)),
    st.one_of(st.integers(1, 300), st.integers(1, 2**40)),
    seeds,
    st.one_of(st.integers(0, 5000), st.integers(0, 2**50)),
    st.booleans(),
)
def test_randint_equals_its_reference(count, low, span, seed, offset, short):
    high = min(low + span, INT32.max + 1) if short else low + span
    dtype = torch.int32 if short else torch.int64
    found = draw(low, high, (count,), seed, offset=offset, dtype=dtype)
    assert torch.equal(found, randint_reference(low, high, (count,), seed, offset, dtype))
    assert found.dtype == dtype
    assert not count or low <= found.min() <= found.max() < high


@pytest.mark.parametrize("span", [2, 6, NARROW, NARROW + 1, 2**40 + 1])
@pytest.mark.parametrize("seed", [0, -(2**62) + 77])
def test_randint_is_uniform(span, seed):
    found = draw(-5, span - 5, (2**13,), seed)
    assert uneven(found, -5, span - 5) == ""
    # Numbers that follow each other, or stand a row apart, are not correlated.
    unit = (found.double() + 5.5) / span - 0.5
    for lag in (1, 2, 3, 4, 1024):
        correlation = (unit[lag:] * unit[:-lag]).mean().item() * 12
        assert abs(correlation) < 5 / math.sqrt(len(unit) - lag)


def test_the_whole_range_of_a_dtype():
    for limits, dtype in ((INT32, torch.int32), (INT64, torch.int64)):
        high = min(limits.max + 1, INT64.max)
        found = draw(limits.min, high, (4096,), 3, dtype=dtype)
        expected = randint_reference(limits.min, high, (4096,), 3, dtype=dtype)
        assert torch.equal(found, expected)
        assert abs((found.double() / limits.max).mean().item()) < 5 / math.sqrt(3 * 4096)


@pytest.mark.parametrize("high", [1000, 2**40])
@pytest.mark.parametrize("offset", [1, 4, 16, 1023, 1024, 2**36 + 5])
def test_an_offset_continues_the_stream(high, offset):
    before = min(offset, 700)
    whole = draw(0, high, (before + 90,), 9, offset=offset - before)
    assert torch.equal(whole[before:], draw(0, high, (90,), 9, offset=offset))


def test_streams_of_seeds_and_parts_of_a_stream_have_nothing_in_common():
    parts = [draw(0, 2**31, (4096,), seed) for seed in (0, 1, 2**32, -1)]
    parts += [draw(0, 2**31, (4096,), 0, offset=4096 * k) for k in (1, 2**34)]
    for one, other in itertools.combinations(parts, 2):
        assert (one == other).sum().item() == 0


@pytest.mark.parametrize("block", [512, 2048])
def test_no_number_depends_on_the_tile(block, monkeypatch):
    x = torch.ones(5000, device=DEVICE)
    numbers, kept = draw(0, 99, (5000,), 5, offset=3), dropout(x, 0.3, 5)
    tile = {"BLOCK_N": block, "num_warps": 2}
    for tiles in (random.RANDINT_TILES, random.DROPOUT_TILES):
        monkeypatch.setitem(tiles.__dict__, "choose", lambda **key: tile)
    assert torch.equal(draw(0, 99, (5000,), 5, offset=3), numbers)
    assert torch.equal(dropout(x, 0.3, 5), kept)


def test_a_seed_on_the_device_is_the_same_seed():
    seed = torch.tensor([-77], device=DEVICE)
    assert torch.equal(randint(0, 9, (500,), seed).cpu(), draw(0, 9, (500,), -77))
    x = torch.randn(500, device=DEVICE, requires_grad=True)
    y = dropout(x, 0.5, seed)
    assert torch.equal(y, dropout(x, 0.5, -77))
    seed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@many
@given(
    st.integers(0, 3000), st.floats(0, 1), seeds, st.sampled_from([torch.float32, torch.float16])
)
def test_dropout_keeps_and_drops_the_same_in_both_passes(n, p, seed, dtype):
    x = (torch.rand(n) + 1).to(DEVICE, dtype).requires_grad_()
    y = dropout(x, p, seed)
    expected = dropout_reference(x.detach().cpu().double(), p, seed)
    kept = expected != 0
    assert torch.equal((y != 0).cpu(), kept)
    # If few entries are kept, float16 does not hold their scaled values.
    torch.testing.assert_close(y.detach().cpu(), expected.to(dtype), rtol=2e-3, atol=0)
    dy = torch.full_like(y, 2.0)
    (dx,) = torch.autograd.grad(y, x, dy)
    scale = expected / x.detach().cpu().double()
    torch.testing.assert_close(dx.cpu(), (2 * scale).to(dtype), rtol=4e-3, atol=0)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_dropout_has_its_properties(p):
    x = torch.randn(2**16, device=DEVICE)
    dy = torch.randn(2**16, device=DEVICE)
    leaf = x.clone().requires_grad_()
    y = dropout(leaf, p, 4)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    given_, results = {"x": x, "dy": dy}, {"out": y.detach(), "dx": dx}
    assert DROPOUT.properties(given_, results, p=p, seed=4) == ""
    # The mean is that of x to the last bit of the probability: no bias from its 16 bits.
    dropped = round(p * LEVELS) / LEVELS
    ones = dropout(torch.ones(2**16, device=DEVICE), p, 8).double().mean().item()
    assert abs(ones - 1) < 5 * math.sqrt(dropped / (1 - dropped) / 2**16)


def test_dropout_with_probability_zero_or_one():
    x = torch.tensor([1.0, math.inf, math.nan, -2.0], device=DEVICE, requires_grad=True)
    assert dropout(x, 0.0, 1) is x and dropout(x, 0.9, 1, training=False) is x
    nothing = dropout(x, 1.0, 1)
    assert torch.equal(nothing, torch.zeros_like(x))
    assert torch.equal(torch.autograd.grad(nothing.sum(), x)[0], torch.zeros_like(x))
    some = dropout(torch.ones(2**17, device=DEVICE), 1 - 1e-9, 1)
    assert set(some.unique().tolist()) == {0.0, float(LEVELS)}


@pytest.mark.parametrize("name", ["MULTIPLIERS", "STEPS"])
def test_the_stream_is_the_one_that_the_problem_defines(name):
    assert getattr(_random, name) == getattr(_philox, name)
    assert _random.ROUNDS.value == _philox.ROUNDS
    assert (NARROW, LEVELS) == (problems.NARROW, problems.LEVELS)


@many
@given(st.floats(0, 1))
def test_a_probability_is_rounded_as_the_problem_defines(p):
    dropped = random._levels(p)
    assert dropped == problems._levels(p)
    assert random._scale(dropped) == problems._scale(dropped)


REFUSALS = {
    "p": lambda: dropout(torch.ones(3), 1.5, 0),
    "seed: 9223": lambda: dropout(torch.ones(3), 0.5, 2**63),
    "seed: ": lambda: randint(0, 3, (3,), torch.tensor([1, 2])),
    "seed: on meta": lambda: dropout(torch.ones(3), 0.5, torch.ones(1, dtype=int, device="meta")),
    "low, high: 3, 3": lambda: randint(3, 3, (3,), 0),
    "low, high: 0": lambda: randint(0, 2**31 + 1, (3,), 0, dtype=torch.int32),
    "offset": lambda: randint(0, 3, (3,), 0, offset=-1),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_bad_arguments_are_refused(what):
    with pytest.raises(ValueError, match=rf"^{what}.*expected"):
        REFUSALS[what]()


@pytest.mark.parametrize("dtype", [torch.int16, "int64"])
def test_another_dtype_of_the_result_is_refused(dtype):
    with pytest.raises(TypeError, match=r"^dtype: .*expected int32 or int64"):
        randint(0, 3, (3,), 0, dtype=dtype)


def test_a_seed_of_another_dtype_is_refused():
    with pytest.raises(TypeError, match=r"^seed: torch.int32, expected one int64"):
        randint(0, 3, (3,), torch.tensor([1], dtype=torch.int32))


def test_the_harness_draws_other_seeds_in_other_runs():
    op, _ = registry.op("randint")
    case = next(each for each in op.edge if each["N"] > 1000)
    assert op.arguments(case)["size"] == (case["N"],)
    assert op.judged(ours=True) == "oracle" and op.judged(ours=False) == "properties"

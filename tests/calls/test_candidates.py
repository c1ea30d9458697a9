"""Check that tuners of Triton's meet one candidate where they are told to."""

import pytest
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

from harness.calls import candidates
from tests.support.tuners import tuner


@pytest.mark.parametrize(("candidate", "warps"), [(None, 8), (0, 1), (1, 4), (2, 8), (7, 8)])
def test_a_tuner_meets_one_candidate(candidate, warps):
    made = tuner(1, 4, 8)
    with candidates.only(candidate) as counts:
        made.run(n=3)
        made.run(n=3)
    # Tried once, and then called twice.
    assert made.fn.ran == [warps] * 3
    assert counts == [3]


def test_an_earlier_choice_does_not_count_and_none_of_these_stays_in_the_way():
    made = tuner(1, 4, 8)
    for candidate in (0, 1):
        with candidates.only(candidate):
            made.run(n=3)
    assert made.fn.ran == [1, 1, 4, 4]
    made.fn.ran.clear()
    made.run(n=3)
    assert made.fn.ran == [1, 4, 8, 1]


@pytest.mark.parametrize(("candidate", "warps"), [(None, 1), (0, 1), (1, 1)])
def test_the_next_candidate_takes_the_place_of_one_that_does_not_fit(candidate, warps):
    """Else the tuners after it would not be met."""
    made, after = tuner(1, 4, 8), tuner(2, 4, 8)
    made.fn.unfit = {4, 8}
    with candidates.only(candidate) as counts:
        made.run(n=3)
        after.run(n=3)
    assert made.fn.ran == [warps] * 2
    assert after.fn.ran == [{None: 8, 0: 2, 1: 4}[candidate]] * 2
    assert set(counts) == {3}


def test_a_tuner_without_a_candidate_that_fits_raises():
    made = tuner(1, 4)
    made.fn.unfit = {1, 4}
    with pytest.raises(OutOfResources), candidates.only(0):
        made.run(n=3)


def test_the_tuners_are_as_before_after_a_failure():
    before = Autotuner.run, Autotuner.prune_configs
    with pytest.raises(ZeroDivisionError), candidates.only(0):
        raise ZeroDivisionError
    assert before == (Autotuner.run, Autotuner.prune_configs)

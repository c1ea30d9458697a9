"""Explore the barriers and slots of the product on Hopper in every order of its warps.

The residual is the only part of an epilogue that has slots and barriers. A batch changes which
tiles there are, and a gate what a slot holds. `test_matmul_hopper_threads.py` runs those.
"""

from dataclasses import replace

import pytest

from tests.support.hopper_orders import FaultError, explore
from tests.support.product_trace import NEEDED, SLOTS, traced

# Numbers: tiles, steps of a tile, programs, whether there is a residual, and slots.
SHAPES = [
    (2, SLOTS + 1, 1, False, SLOTS),
    (4, 3, 2, False, SLOTS),
    (9, 1, 1, False, SLOTS),
    (2, 3, 1, True, SLOTS),
    (6, 1, 1, True, SLOTS),
    (3, 4, 1, True, 3),
    (4, 1, 1, True, 3),
    (1, 1, 1, True, SLOTS),
    (2, 7, 1, True, 6),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_no_order_of_warps_and_copies_hangs_or_multiplies_what_is_not_there(shape):
    # One tile of one step has the fewest.
    assert explore(traced(*shape), NEEDED) > (1000 if shape[0] > 1 else 100)


def without(group, what, barrier="", every=1, residual=False):
    """Return the steps without those of a kind, or without every second one of them."""
    groups = traced(2, SLOTS + 1, 1, residual)
    kept, found = [], 0
    for step in groups[group]:
        if step.what == what and (not barrier or step.barrier[0] == barrier):
            found += 1
            if found % every == 0:
                continue
        kept.append(step)
    groups[group] = kept
    return groups


BROKEN = {
    "products before their copies": (1, "wait", "x full"),
    "products of the second group before their copies": (2, "wait", "x full"),
    "copies into slots that are read": (0, "wait", "x free"),
    "a warp sleeps through a phase": (0, "meet"),
    "a group lets nothing go": (1, "arrive"),
    "every other slot is let go": (2, "arrive", "", 2),
    "every other copy is missing": (0, "copy", "", 2),
    "products are still reading": (2, "settle"),
    "other warps are still reading": (1, "meet"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_finds_what_is_missing(what):
    with pytest.raises(FaultError):
        explore(without(*BROKEN[what]), NEEDED)


@pytest.mark.parametrize("kind", ["x full", "x free"])
def test_finds_a_wrong_parity(kind):
    groups = traced(2, SLOTS + 1, 1, False)
    for steps in groups:
        for index, step in enumerate(steps):
            if step.what == "wait" and step.barrier[0] == kind:
                steps[index] = replace(step, parity=1 - step.parity)
    with pytest.raises(FaultError):
        explore(groups, NEEDED)


def test_a_residual_that_only_its_group_waits_for_may_be_missed():
    """Parity tells one phase from the next only, so each group waits for the slots of both."""
    groups = traced(2, 3, 1, True)
    kept, seen = [], 0
    for step in groups[1]:
        if step.what == "wait":
            seen += 1
            # After three steps: the slot of its own rows, and that of the other group.
            if seen % 5 == 0:
                continue
        kept.append(step)
    groups[1] = kept
    with pytest.raises(FaultError):
        explore(groups, NEEDED)

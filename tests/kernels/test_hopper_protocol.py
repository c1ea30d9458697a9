"""Explore the barriers and slots of the Hopper kernel in every order in which its warps can run.

Neither Triton's interpreter nor a CPU runs that kernel. Its steps are taken from its own code
(`hopper_trace.py`), and these tests visit all states to which the steps can lead
(`hopper_orders.py`).
"""

import itertools
from dataclasses import replace

import pytest

from kernels.cross_entropy_details import linear_tiles_hopper as hopper
from tests.support.hopper_orders import FaultError, explore
from tests.support.hopper_trace import Step, traced

SLOTS = hopper.SLOTS.value
# Numbers: tiles of rows, tiles of classes, steps of a tile, programs. `suits` asks for more steps
# than slots. In the first shape a program has two tiles, of different rows and classes.
SHAPES = [(3, 2, SLOTS + 1, 4), (1, 1, 2 * SLOTS + 3, 1)]


def without(group: int, what: str, barrier: str = "", which: int | None = None) -> list[list[Step]]:
    """Return the kernel's steps without those of a kind, or without every second one of them."""
    groups = traced(*SHAPES[0])
    kept, found = [], itertools.count()
    for step in groups[group]:
        of_kind = step.what == what and (not barrier or step.barrier[0] == barrier)
        if not (of_kind and (which is None or next(found) % 2 == which)):
            kept.append(step)
    groups[group] = kept
    return groups


@pytest.mark.parametrize("shape", SHAPES)
def test_no_order_of_warps_and_copies_hangs_or_multiplies_what_is_not_there(shape):
    assert explore(traced(*shape)) > 1000


def test_each_product_has_its_own_copies():
    """Rows are copied once for each product; the weight is copied once for all groups."""
    for group, steps in enumerate(traced(*SHAPES[0])):
        copies = [step.contents[0] for step in steps if step.what == "copy"]
        wanted = [content for step in steps for content in step.contents if step.what == "multiply"]
        rows = [content for content in wanted if content[0] == "x"]
        weight = [content for content in wanted if content[0] == "weight"]
        assert [content for content in copies if content[0] == "x"] == rows
        assert [content for content in copies if content[0] == "weight"] == weight * group


def test_a_copy_before_all_warps_have_seen_its_slot_free_may_hang():
    """A warp that sleeps through the next phase waits for a phase of the same parity.
    The meeting after the wait prevents that. The meeting before the copy of rows does not help."""
    broken = traced(*SHAPES[0])
    steps = broken[1]
    frees = [i for i, step in enumerate(steps) if step.barrier and step.barrier[0] == "weight free"]
    assert frees and all(steps[i + 1].what == "meet" for i in frees)
    broken[1] = [step for i, step in enumerate(steps) if i - 1 not in frees]
    with pytest.raises(FaultError, match=r"deadlock.*weight free"):
        explore(broken)


BROKEN = {
    "rows are multiplied before they are there": (0, "wait", "x full"),
    "weight is multiplied before it is there": (0, "wait", "weight full"),
    "weight is multiplied by the second group before it is there": (1, "wait", "weight full"),
    "weight is copied into a slot that the first group reads": (1, "wait", "weight free"),
    "the first group lets nothing go": (0, "arrive", "weight free"),
    "rows are copied while another warp reads them": (0, "meet"),
    "products are still reading": (1, "settle"),
    "every other copy is missing": (1, "copy", "weight full", 1),
    "every other slot is let go": (0, "arrive", "weight free", 0),
}


@pytest.mark.parametrize("what", BROKEN)
def test_finds_what_is_missing(what):
    with pytest.raises(FaultError):
        explore(without(*BROKEN[what]))


@pytest.mark.parametrize("kind", ["x full", "weight full", "weight free"])
def test_finds_a_wrong_parity(kind):
    groups = traced(*SHAPES[0])
    for steps in groups:
        for index, step in enumerate(steps):
            if step.what == "wait" and step.barrier[0] == kind:
                steps[index] = replace(step, parity=1 - step.parity)
    with pytest.raises(FaultError):
        explore(groups)


def test_the_kernel_is_asked_only_for_more_steps_than_slots():
    assert not hopper.suits(hopper.CLASSES, hopper.INNER * SLOTS)
    assert hopper.suits(hopper.CLASSES, hopper.INNER * (SLOTS + 1))
    assert hopper.OWN_SLOTS.value <= SLOTS

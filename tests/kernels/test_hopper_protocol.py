"""Explore the barriers and slots of the Hopper kernel in every order in which its warps can run.

Neither Triton's interpreter nor a CPU runs that kernel. Its steps are taken from its own code
(`hopper_trace.py`), and these tests visit all states to which the steps can lead. Two warps of each
group are followed: the one that copies and arrives, and one of the others, which are alike. A copy
may complete at any time after it was issued. A barrier of Hopper knows only the parity of its
phase. A warp that waits for a phase therefore keeps waiting if that phase and the next have both
passed.

Local steps join the step before them: a copy is issued as early as possible. A product reads its
slots from the end of its waits until the warp has seen it finish.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from kernels.cross_entropy_details import linear_tiles_hopper as hopper
from tests.support.hopper_trace import Step, traced

SLOTS = hopper.SLOTS.value
# Numbers: tiles of rows, tiles of classes, steps of a tile, programs. `suits` asks for more steps
# than slots. In the first shape a program has two tiles, of different rows and classes.
SHAPES = [(3, 2, SLOTS + 1, 4), (1, 1, 2 * SLOTS + 3, 1)]


class FaultError(AssertionError):
    """Signals an order in which the kernel hangs or multiplies the wrong data."""


class _Warp:
    """A warp as a list of places: place p follows its p-th wait or meeting.

    - stops: the wait or meeting that leads to each place.
    - deeds: the products, copies and arrivals there.
    - reads: the slots, as bits, that its products read there.
    - phases: how many copies and arrivals of each barrier this warp has begun.
    - holds: the data that it has had copied into each slot.
    """

    def __init__(self, steps: Sequence[Step], copies: bool):
        self.stops: list[Step | None] = [None]
        self.deeds: list[list[Step]] = [[]]
        self.reads: list[int] = [0]
        self.phases: list[dict] = [{}]
        self.holds: list[dict] = [{}]
        reading: list[tuple] = []
        for step in steps:
            if step.what in ("wait", "meet"):
                self.stops.append(step)
                self.deeds.append([])
                self.reads.append(_bits(sum(reading, ())))
                self.phases.append(dict(self.phases[-1]))
                self.holds.append(dict(self.holds[-1]))
            elif step.what == "settle":
                reading = reading[len(reading) - step.left :] if step.left else []
            elif step.what == "multiply":
                reading.append(step.slots)
                self.reads[-1] = _bits(sum(reading, ()))
                self.deeds[-1].append(step)
            elif copies:
                self.deeds[-1].append(step)
                self.phases[-1][step.barrier] = self.phases[-1].get(step.barrier, 0) + 1
                if step.what == "copy":
                    self.holds[-1][step.slots[0]] = step.contents[0]


def _bits(slots: Sequence[tuple[str, int]]) -> int:
    """Return slots as bits of a number; a ring has fewer than 16 slots."""
    bits = 0
    for name, number in slots:
        bits |= 1 << (number + 16 * (name == "weight"))
    return bits


def explore(groups: Sequence[Sequence[Step]]) -> int:
    """Return how many states can be reached.
    Raises FaultError for a deadlock, a product of a slot that holds the wrong data, and a copy into
    a slot that is being read or filled."""
    # The warp of each group that copies and arrives, and one other.
    warps = [_Warp(steps, copies) for steps in groups for copies in (True, False)]
    ends = tuple(len(warp.stops) - 1 for warp in warps)
    places, pending = (0,) * len(warps), 0
    for index in range(len(warps)):
        pending = _deeds(warps, places, pending, index)
    seen, queue = {(places, pending)}, [(places, pending)]
    while queue:
        places, pending = queue.pop()
        following = list(_following(warps, ends, places, pending))
        if not following and places != ends:
            stuck = [(*w.stops, None)[at + 1] for w, at in zip(warps, places, strict=True)]
            raise FaultError(f"deadlock at {places}: {stuck}")
        for state in following:
            if state not in seen:
                seen.add(state)
                queue.append(state)
    return len(seen)


def _following(warps, ends, places, pending) -> Iterator[tuple[tuple, int]]:
    left = pending
    while left:
        yield places, pending & ~(left & -left)
        left &= left - 1
    for index, (warp, at) in enumerate(zip(warps, places, strict=True)):
        if at == ends[index]:
            continue
        stop = warp.stops[at + 1]
        if stop.what == "meet":
            # The first of the two acts for both, which go on at once.
            if index % 2 or places[index + 1] != at:
                continue
            then = (*places[:index], at + 1, at + 1, *places[index + 2 :])
            moved = (index, index + 1)
        else:
            if _completed(warps, places, pending, stop.barrier) % 2 == stop.parity:
                continue
            then = (*places[:index], at + 1, *places[index + 1 :])
            moved = (index,)
        after = pending
        for i in moved:
            after = _deeds(warps, then, after, i)
        yield then, after


def _completed(warps, places, pending, barrier) -> int:
    """Return how many phases of a barrier are over: one for each arrival or completed copy."""
    begun = 0
    # Only one warp of a group copies or arrives.
    for index in range(0, len(warps), 2):
        begun += warps[index].phases[places[index]].get(barrier, 0)
    name, number = barrier
    return begun - bool(name[-4:] == "full" and pending & _bits([(name[:-5], number)]))


def _deeds(warps, places, pending, index) -> int:
    """Return the slots that are being filled after a warp has acted at its place."""
    for deed in warps[index].deeds[places[index]]:
        bits = _bits(deed.slots)
        if deed.what == "copy":
            read = [i for i, at in enumerate(places) if warps[i].reads[at] & bits]
            if read or pending & bits:
                raise FaultError(f"copied into a slot in use: {deed}, at {places}")
            pending |= bits
        elif deed.what == "multiply":
            for slot, content in zip(deed.slots, deed.contents, strict=True):
                held = [w.holds[at].get(slot) for w, at in zip(warps, places, strict=True)]
                if pending & _bits([slot]) or content not in held:
                    raise FaultError(f"{slot} holds {held}, not {content}, at {places}")
    return pending


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

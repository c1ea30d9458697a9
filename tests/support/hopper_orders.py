"""Explore the barriers and slots of a Hopper kernel in every order in which its warps can run.

Two warps of each group are followed: the one that copies and arrives, and one of the others, which
are alike. A copy may complete at any time after it was issued. A barrier of Hopper knows only the
parity of its phase. A warp that waits for a phase therefore keeps waiting if that phase and the
next have both passed.

Local steps join the step before them: a copy is issued as early as possible. A product reads its
slots from the end of its waits until the warp has seen it finish.
"""

from collections.abc import Iterator, Mapping, Sequence

from tests.support.hopper_trace import Step


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


def explore(groups: Sequence[Sequence[Step]], needed: Mapping[str, int] | None = None) -> int:
    """Return how many states can be reached.

    needed: the arrivals that complete a phase of the barriers of a name, one if left out. Raises
    FaultError for a deadlock, a product of a slot that holds the wrong data, and a copy into a slot
    that is being read or filled.
    """
    needed = needed or {}
    # The warp of each group that copies and arrives, and one other.
    warps = [_Warp(steps, copies) for steps in groups for copies in (True, False)]
    ends = tuple(len(warp.stops) - 1 for warp in warps)
    places, pending = (0,) * len(warps), 0
    for index in range(len(warps)):
        pending = _deeds(warps, places, pending, index)
    seen, queue = {(places, pending)}, [(places, pending)]
    while queue:
        places, pending = queue.pop()
        following = list(_following(warps, ends, places, pending, needed))
        if not following and places != ends:
            stuck = [(*w.stops, None)[at + 1] for w, at in zip(warps, places, strict=True)]
            raise FaultError(f"deadlock at {places}: {stuck}")
        for state in following:
            if state not in seen:
                seen.add(state)
                queue.append(state)
    return len(seen)


def _following(warps, ends, places, pending, needed) -> Iterator[tuple[tuple, int]]:
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
            if _completed(warps, places, pending, stop.barrier, needed) % 2 == stop.parity:
                continue
            then = (*places[:index], at + 1, *places[index + 1 :])
            moved = (index,)
        after = pending
        for i in moved:
            after = _deeds(warps, then, after, i)
        yield then, after


def _completed(warps, places, pending, barrier, needed) -> int:
    """Return how many phases of a barrier are over, by its arrivals or completed copies."""
    begun = 0
    # Only one warp of a group copies or arrives.
    for index in range(0, len(warps), 2):
        begun += warps[index].phases[places[index]].get(barrier, 0)
    name, number = barrier
    begun //= needed.get(name, 1)
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

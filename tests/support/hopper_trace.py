"""Record the steps of each warp group of the Hopper kernel with barriers and slots, in their order.

The kernel's functions are Python until Gluon compiles them. Here they run as Python, and objects
that record each operation stand for Gluon. So the order is the kernel's, not a copy.
"""

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

from kernels.cross_entropy_details import linear_tiles_hopper as hopper

GROUPS, ROWS, CLASSES, INNER = hopper.GROUPS.value, hopper.ROWS, hopper.CLASSES, hopper.INNER


@dataclass(frozen=True)
class Step:
    """One step of a group.

    - what: one of the kinds below.
    - left: how many products may still run after "settle".
    - contents: the data that is copied, or that must be in the slots.

    - "wait": waits for a phase of a barrier by its parity.
    - "copy": copies into a slot, which completes a phase of a barrier.
    - "arrive": arrives at a barrier.
    - "meet": the warps of the group wait for each other.
    - "multiply": reads slots.
    - "settle": waits until at most `left` products are under way.
    """

    what: str
    barrier: tuple[str, int] | None = None
    parity: int = 0
    slots: tuple[tuple[str, int], ...] = ()
    contents: tuple = ()
    left: int = 0


class _Slot(tuple):
    def permute(self, order):
        return self


class _Ring:
    """The slots, or the barriers, of one name."""

    def __init__(self, name: str, *shape: int):
        self.name, self.shape = name, shape

    def index(self, index):
        return _Slot((self.name, int(index)))


class _Numbers:
    """Stands for accumulators, pointers and offsets."""

    def to(self, dtype):
        return self

    def _itself(self, *others):
        return self

    __add__ = __radd__ = __mul__ = __rmul__ = __lt__ = _itself


def traced(tiles_m: int, tiles_n: int, steps_h: int, programs: int) -> list[list[Step]]:
    """Return the steps of the groups of program 0.
    `programs` share tiles_m times tiles_n tiles of steps_h steps."""
    return [_group(which, tiles_m, tiles_n, steps_h, programs) for which in range(GROUPS)]


def _group(which: int, tiles_m: int, tiles_n: int, steps_h: int, programs: int) -> list[Step]:
    done: list[Step] = []
    told: list[tuple] = []
    descriptors = {}
    for name, size in (("x", ROWS), ("weight", CLASSES)):
        block = SimpleNamespace(shape=(size, INNER), nbytes=size)
        descriptors[name] = SimpleNamespace(name=name, block_type=block)

    def expect(barrier, nbytes):
        told.append((barrier, nbytes))

    def copy(descriptor, coordinates, barrier, slot):
        # The barrier has been told of the bytes of this copy, and of no other.
        assert told == [(barrier, descriptor.block_type.nbytes)]
        told.clear()
        content = (descriptor.name, *coordinates)
        done.append(Step("copy", barrier, slots=(slot,), contents=(content,)))

    def multiply(x, weight, acc, use_acc, is_async):
        number = sum(step.what == "multiply" for step in done)
        tile, inner = divmod(number, steps_h)
        # All rows are one group of tiles: the tiles go down a column, then down the next.
        column, row = divmod(tile * programs, tiles_m)
        rows = ("x", (row * GROUPS + which) * ROWS, inner * INNER)
        # Only the first product of a tile begins anew.
        assert use_acc == (inner > 0) and is_async
        contents = (rows, ("weight", column * CLASSES, inner * INNER))
        done.append(Step("multiply", slots=(x, weight), contents=contents))
        return _Numbers()

    def settle(left, accumulators):
        done.append(Step("settle", left=left))
        return accumulators[0]

    language = mock.Mock(
        static_range=range,
        program_id=lambda axis: 0,
        num_programs=lambda axis: programs,
        where=lambda held, one, other: one if held else other,
        thread_barrier=lambda: done.append(Step("meet")),
        arange=lambda *_: _Numbers(),
        cast=lambda *_: _Numbers(),
    )
    barriers = mock.Mock(
        wait=lambda barrier, parity: done.append(Step("wait", barrier, int(parity))),
        expect=expect,
        arrive=lambda barrier, count: done.append(Step("arrive", barrier)),
    )
    stands = {
        "gl": language,
        "mbarrier": barriers,
        "tma": mock.Mock(async_copy_global_to_shared=copy),
        "warpgroup_mma": multiply,
        "warpgroup_mma_wait": settle,
        "_write_part": mock.Mock(),
        "SLOTS": hopper.SLOTS.value,
        "OWN_SLOTS": hopper.OWN_SLOTS.value,
        "GROUPS": GROUPS,
    }

    # A kernel calls functions that are compiled with it; here each is the Python it was made of.
    def place(pid, *sizes):
        # Past the last tile the place is not read; the kernel may divide by zero there.
        return made["tile_coords"](pid, *sizes) if pid < tiles_m * tiles_n else (0, 0)

    made = {name: value.fn for name, value in vars(hopper).items() if hasattr(value, "fn")}
    with contextlib.ExitStack() as stack:
        for name, value in (made | stands | {"tile_coords": place}).items():
            stack.enter_context(mock.patch.object(hopper, name, value))
        operands = *descriptors.values(), _Ring("x", 0, ROWS), _Ring("weight", 0, CLASSES)
        known = _Ring("x full"), _Ring("weight full"), _Ring("weight free")
        sizes = tiles_m, tiles_n, steps_h
        hopper.consumer_loop(operands, known, _Numbers(), 0, sizes, which, tiles_m)
    return done
